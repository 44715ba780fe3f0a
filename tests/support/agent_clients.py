"""Clients of agents in the server's three interfaces: one conversation, kept and sent in the form of each."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
INTERFACES = (CHAT, RESPONSES, MESSAGES)
IMAGE = "data:image/png;base64,iVBORw0KGgo="
SOURCE = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}


@dataclass
class Said:
    """An answer as a client has it.

    Attributes:
        calls: id, name and text of the arguments of each call.
        reason: "stop", "tool_calls" or "length".
        entries: what the client sends back in later turns.
    """

    thoughts: str = ""
    content: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    reason: str = ""
    entries: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Turn:
    """A part of a conversation in the form of each interface.

    Attributes:
        entries: messages or items, by interface.
        marks: words that its texts have, and nothing else in the conversation.
    """

    entries: dict[str, list[dict[str, Any]]]
    marks: tuple[str, ...] = ()


def spoken(role: str, text: str, mark: str) -> Turn:
    """Return the turn of a user, or of a system in the middle of a conversation."""
    item = {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}
    return Turn({CHAT: [{"role": role, "content": text}], RESPONSES: [item], MESSAGES: [_message(role, text)]}, (mark,))


def _message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text}]}


def results(found: Sequence[tuple[Mapping[str, str], str, bool]], marks: Sequence[str]) -> Turn:
    """Return the turn of tools.

    Args:
        found: the call's id by interface, the result's text, and whether an image is beside it.
    """
    chat, items, blocks = list[dict[str, Any]](), list[dict[str, Any]](), list[dict[str, Any]]()
    for ids, text, has_image in found:
        parts: list[Any] = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": IMAGE}}]
        given = [{"type": "input_text", "text": text}, {"type": "input_image", "image_url": IMAGE}]
        seen = [{"type": "text", "text": text}, {"type": "image", "source": SOURCE}]
        chat.append({"role": "tool", "tool_call_id": ids[CHAT], "content": parts if has_image else text})
        output = {"type": "function_call_output", "call_id": ids[RESPONSES], "output": given if has_image else text}
        items.append(output)
        blocks.append({"type": "tool_result", "tool_use_id": ids[MESSAGES], "content": seen if has_image else text})
    entries = {CHAT: chat, RESPONSES: items, MESSAGES: [{"role": "user", "content": blocks}]}
    return Turn(entries, tuple(marks))


@dataclass(frozen=True)
class Wish:
    """What a request asks for beside its conversation.

    Attributes:
        tools: functions as chat completions have them.
        choice: "auto", "none", "required", or the name of a tool.
        schema: JSON schema of the answer's text; None for free text.
        effort: effort of thinking; "none" for no thoughts, None for the template's default.
        max_tokens: most tokens of the answer.
    """

    tools: Sequence[dict[str, Any]] = ()
    choice: str = "auto"
    is_parallel: bool = True
    schema: dict[str, Any] | None = None
    effort: str | None = None
    max_tokens: int = 1 << 16


def body_of(interface: str, turns: Sequence[Turn], wish: Wish, joins: bool = False) -> dict[str, Any]:
    """Return the body of a request.

    Args:
        joins: whether neighbouring messages of one role are one message where the interface lets a client choose.
    """
    entries = [entry for turn in turns for entry in turn.entries[interface]]
    named = wish.choice if wish.choice not in ("auto", "none", "required") else None
    if interface == CHAT:
        body: dict[str, Any] = {"messages": entries, "max_tokens": wish.max_tokens, "reasoning_effort": wish.effort}
        if wish.tools:
            choice = {"type": "function", "function": {"name": named}} if named else wish.choice
            body |= {"tools": wish.tools, "tool_choice": choice, "parallel_tool_calls": wish.is_parallel}
        if wish.schema is not None:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": wish.schema}}
        return body
    if interface == RESPONSES:
        reasoning = {"effort": wish.effort, "summary": "auto" if joins else None}
        body = {"input": entries, "max_output_tokens": wish.max_tokens, "reasoning": reasoning}
        if wish.tools:
            flat = [{"type": "function", **tool["function"]} for tool in wish.tools]
            choice = {"type": "function", "name": named} if named else wish.choice
            body |= {"tools": flat, "tool_choice": choice, "parallel_tool_calls": wish.is_parallel}
        if wish.schema is not None:
            body["text"] = {"format": {"type": "json_schema", "name": "x", "schema": wish.schema}}
        return body
    body = {"messages": _joined(entries) if joins else entries, "max_tokens": wish.max_tokens}
    if wish.effort is not None:
        body["thinking"] = {"type": "disabled" if wish.effort == "none" else "adaptive"}
    if wish.tools:
        kind = "tool" if named else {"required": "any"}.get(wish.choice, wish.choice)
        single = {} if wish.choice == "none" else {"disable_parallel_tool_use": not wish.is_parallel}
        names = {"parameters": "input_schema"}
        described = [{names.get(key, key): value for key, value in tool["function"].items()} for tool in wish.tools]
        body |= {"tools": described, "tool_choice": {"type": kind, "name": named, **single}}
    if wish.schema is not None:
        body["output_config"] = {"format": {"type": "json_schema", "schema": wish.schema}}
    return body


def _joined(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for message in messages:
        if found and found[-1]["role"] == message["role"] != "system":
            found[-1] = {**message, "content": [*found[-1]["content"], *message["content"]]}
        else:
            found.append(message)
    return found


def said(interface: str, answer: Any) -> Said:
    """Return an answer: a body, or the data of a stream's events."""
    if interface == CHAT:
        return _chat(answer)
    return _response(answer) if interface == RESPONSES else _blocks(answer)


def _chat(answer: Any) -> Said:
    if isinstance(answer, dict):
        message, reason = answer["choices"][0]["message"], answer["choices"][0]["finish_reason"]
    else:
        message, reason = {"role": "assistant", "content": ""}, ""
        for chunk in answer:
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                delta, reason = choice["delta"], choice["finish_reason"] or reason
                for name in ("content", "reasoning_content"):
                    if delta.get(name):
                        message[name] = message.get(name, "") + delta[name]
                for call in delta.get("tool_calls", ()):
                    if "id" in call:
                        message.setdefault("tool_calls", []).append({**call, "function": dict(call["function"])})
                    else:
                        message["tool_calls"][-1]["function"]["arguments"] += call["function"]["arguments"]
                        assert call["index"] == len(message["tool_calls"]) - 1
    made = [(one["id"], *map(one["function"].get, ("name", "arguments"))) for one in message.get("tool_calls") or ()]
    calls = [(str(at), str(name), str(arguments)) for at, name, arguments in made]
    return Said(message.get("reasoning_content", ""), message["content"] or "", calls, reason, [message])


def _response(answer: Any) -> Said:
    found = Said()
    if isinstance(answer, list):
        assert not [event for event in answer if event["type"] in ("error", "response.failed")], answer[-1]
        deltas = {"reasoning": "", "message": "", "function_call": ""}
        kinds = {"output_text": "message", "function_call_arguments": "function_call"}
        for event in answer:
            if event["type"].endswith(".delta"):
                deltas[kinds.get(event["type"].split(".")[1], "reasoning")] += event["delta"]
        done = [event["item"] for event in answer if event["type"] == "response.output_item.done"]
        answer = answer[-1]["response"]
        assert done == answer["output"]
    else:
        deltas = {}
    for item in answer["output"]:
        if item["type"] == "function_call":
            found.calls.append((item["call_id"], item["name"], item["arguments"]))
        text = "".join(part["text"] for part in [*item.get("content", ()), *item.get("summary", ())])
        found.thoughts += text if item["type"] == "reasoning" else ""
        found.content += text if item["type"] == "message" else ""
    parts = found.thoughts, found.content, "".join(arguments for *_, arguments in found.calls)
    assert not deltas or tuple(deltas.values()) == parts, (deltas, parts)
    ended = "tool_calls" if found.calls else "stop"
    found.reason = "length" if answer["status"] == "incomplete" else ended
    found.entries = answer["output"]
    return found


def _blocks(answer: Any) -> Said:
    found = Said()
    if isinstance(answer, list):
        blocks, reason = _streamed_blocks(answer)
    else:
        blocks, reason = answer["content"], answer["stop_reason"]
    for block in blocks:
        if block["type"] == "tool_use":
            given = block["input"]
            text = given if isinstance(given, str) else json.dumps(given)
            found.calls.append((block["id"], block["name"], text))
        found.thoughts += block.get("thinking", "")
        found.content += block.get("text", "")
    found.reason = {"end_turn": "stop", "tool_use": "tool_calls", "max_tokens": "length"}[reason]
    found.entries = [{"role": "assistant", "content": blocks}]
    return found


def _streamed_blocks(events: Sequence[Any]) -> tuple[list[dict[str, Any]], str]:
    blocks, reason = list[dict[str, Any]](), ""
    for event in events:
        assert event["type"] != "error", event
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], blocks[event["index"]]
            name = next(name for name in delta if name != "type")
            field_name = "input" if name == "partial_json" else name
            block[field_name] = (block.get(field_name) or "") + delta[name]
        elif event["type"] == "message_delta":
            reason = event["delta"]["stop_reason"]
    for block in blocks:
        if isinstance(block.get("input"), str) and is_whole(block["input"]):
            block["input"] = json.loads(block["input"])
    return blocks, reason


def is_whole(text: str) -> bool:
    """Return whether a text of arguments is a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def without_thoughts(entries: Mapping[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Return what is sent back of an answer by clients that leave its thoughts out."""
    chat = [{name: value for name, value in one.items() if "reasoning" not in name} for one in entries[CHAT]]
    items = [item for item in entries[RESPONSES] if item["type"] != "reasoning"]
    kept = [block for block in entries[MESSAGES][0]["content"] if block["type"] != "thinking"]
    return {CHAT: chat, RESPONSES: items, MESSAGES: [{**entries[MESSAGES][0], "content": kept}]}


def same_value(one: str, other: str) -> bool:
    """Return whether two texts are the same arguments; where one was cut, messages have what could be read of it."""
    return not is_whole(other) or (is_whole(one) and json.loads(one) == json.loads(other))
