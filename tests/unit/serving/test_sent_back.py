"""What this server may have sent is accepted as history: answers of all families, cut anywhere, in each interface."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from support.scripted_answers import answer, collected, finished, streamed
from support.tool_texts import (
    ASKED,
    PARALLEL,
    SOURCES,
    THINKING,
    TOOLS,
    chat_template,
    format_named,
    rendered,
    template_options,
    turn,
)

from graphcore.serving.anthropic_events import messages_body, messages_events
from graphcore.serving.anthropic_messages import read_message_request
from graphcore.serving.chat_call import Content, Part, Reasoning, ToolCallArguments, ToolCallBegin
from graphcore.serving.openai_chat import ChatChunks, chat_body, read_chat
from graphcore.serving.openai_options import StreamOptions
from graphcore.serving.openai_response_events import responses_body, responses_events
from graphcore.serving.openai_responses import read_responses
from graphcore.serving.token_texts import TokenTexts
from graphcore.serving.tool_formats.answer_parser import AnswerParser
from graphcore.serving.tool_formats.template_messages import template_messages

STEP = 17  # characters between two places where an answer is cut
TEXTS = TokenTexts(None, False)
CHAT = read_chat({"messages": [ASKED]})[1]
MESSAGE = read_message_request({"max_tokens": 9, "messages": [ASKED]})[0]
RESPONSE = read_responses({"input": "x"})[0]
NEXT = {"role": "user", "content": "And now?"}
SAID: dict[str, Any] = {"city": 'Z\u00fcrich "\\', "items": [1, {"a": None}], "share": 1.5, "exact": True}


def chat_streamed(parts: Sequence[Part]) -> dict[str, Any]:
    """Return the message that a client puts together from a stream of chunks."""
    chunks = ChatChunks({"id": "x"}, TEXTS, 1, StreamOptions())
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: list[dict[str, Any]] = []
    for part in parts:
        for chunk in chunks.of(part):
            for choice in chunk["choices"]:
                delta = choice["delta"]
                message["content"] += delta.get("content") or ""
                if "reasoning_content" in delta:
                    message["reasoning_content"] = message.get("reasoning_content", "") + delta["reasoning_content"]
                for call in delta.get("tool_calls", ()):
                    if "id" in call:
                        calls.append({**call, "function": dict(call["function"])})
                    else:
                        calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return {**message, "tool_calls": calls} if calls else message


def message_streamed(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Return the blocks that a client puts together, arguments as their text where it is no JSON."""
    blocks: list[dict[str, Any]] = []
    for name, event in collected(messages_events(streamed(parts), MESSAGE, "msg_1")):
        if name == "content_block_start":
            blocks.append(dict(event["content_block"]))
        if name == "content_block_delta":
            delta, block = event["delta"], blocks[event["index"]]
            if delta["type"] == "input_json_delta":
                block["input"] = (block["input"] or "") + delta["partial_json"]
            else:
                field = next(name for name in delta if name != "type")
                block[field] = block.get(field, "") + delta[field]
    return blocks


def histories(parts: Sequence[Part]) -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    """Yield readers of requests, and bodies whose conversation goes on after an answer, whole and streamed."""
    calls = [part.call_id for part in parts if isinstance(part, ToolCallBegin)]
    for results in {bool(calls), False}:
        ran = calls if results else []
        whole = finished(chat_body(streamed(parts), {}, TEXTS, CHAT))["choices"][0]["message"]
        for message in (whole, chat_streamed(parts)):
            tools = [{"role": "tool", "tool_call_id": call, "content": "done"} for call in ran]
            yield read_chat, {"messages": [ASKED, message, *tools, NEXT]}
        last = collected(responses_events(streamed(parts), RESPONSE, "resp_1", 1, TEXTS))[-1][1]["response"]
        for body in (finished(responses_body(streamed(parts), RESPONSE, "resp_1", 1, TEXTS)), last):
            outputs = [{"type": "function_call_output", "call_id": call, "output": "done"} for call in ran]
            yield read_responses, {"input": [ASKED, *body["output"], *outputs, NEXT]}
        for blocks in (finished(messages_body(streamed(parts), MESSAGE, "msg_1"))["content"], message_streamed(parts)):
            said = [{"type": "tool_result", "tool_use_id": call, "content": "done"} for call in ran]
            asked = {"role": "user", "content": [*said, {"type": "text", "text": NEXT["content"]}]}
            answered = {"role": "assistant", "content": blocks}
            yield read_message_request, {"max_tokens": 9, "messages": [ASKED, answered, asked]}


def check_taken(name: str, parts: Sequence[Part]) -> None:
    """Check that each interface reads an answer as history, all in the same way, and that the template takes it."""
    known, variables = format_named(name), template_options(name)
    seen: list[Any] = []
    for read, body in histories(parts):
        messages = read(json.loads(json.dumps(body)))[1].messages
        if messages in seen:
            continue
        seen.append(messages)
        json.dumps(messages, ensure_ascii=False).encode()  # as it is before it is encoded to tokens
        turns = chat_template(name).fitted(template_messages(known, messages, TOOLS), variables, True)
        assert "And now?" in chat_template(name).render(turns, variables, True, TOOLS), (name, messages)


@pytest.mark.parametrize("name", SOURCES)
def test_an_answer_that_was_cut_anywhere_is_accepted_as_history(name: str) -> None:
    thoughts = "I must look." if name in THINKING else ""
    made = [("search_2", SAID), ("clock.now-utc", {})][: 2 if name in PARALLEL else 1]
    content = "" if name == "gpt_oss" else "Hm."
    prompt, text = rendered(name, turn(*made, content=content, thoughts=thoughts))
    for end in {*range(0, len(text), STEP), len(text)}:
        parser = AnswerParser(format_named(name), TOOLS, prompt)
        parts = [*parser.push(text[:end]), *parser.finish()]
        check_taken(name, answer(parts, "length"))


BROKEN = (
    *("", "null", "[]", "[1]", "x", '{"a": ', '{"a": 1, "b', '{"a": }', r'{"a": "\ud800"}'),
    *("{" * 300, '{"a":' * 300),
)


def test_arguments_of_any_kind_and_empty_answers_are_accepted_as_history() -> None:
    """Arguments are streamed before they are whole, so that they may be anything once an answer is cut."""
    for name in ("qwen3", "qwen3_5", "mistral_list", "mistral_named", "glm45", "gemma4", "gpt_oss"):
        for text in BROKEN:
            check_taken(name, answer([ToolCallBegin(0, "call_1", "search_2"), ToolCallArguments(0, text)], "length"))
        for parts in ([], [Content("")], [Reasoning("Hm.")], [Reasoning("Hm."), Content("\n")]):
            check_taken(name, answer(list[Part](parts), "length"))
