"""/v1/messages: what Anthropic's client sends is read, and what is sent back is what its client and specs expect."""

import json
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import httpx2
import llm_comply
import pytest
from anthropic import Anthropic, APIStatusError
from anthropic.types import ErrorResponse, Message, RawMessageStreamEvent
from llm_comply.schema import SpecLoader
from pydantic import TypeAdapter
from starlette.responses import JSONResponse
from support.cases import in_case
from support.scripted_answers import (
    ANSWERS,
    CALLS,
    FAILURE,
    RECORDS,
    TEXT,
    THOUGHT,
    answer,
    collected,
    finished,
    streamed,
    unknown_fields,
)

from graphcore.serving.anthropic_events import SIGNATURE, messages_body, messages_events
from graphcore.serving.anthropic_messages import read_count_tokens, read_message_request
from graphcore.serving.chat_call import ChatCall, Content, Part, Reasoning, ToolCallArguments, ToolCallBegin
from graphcore.serving.request_errors import RequestError, anthropic_error

SPEC = SpecLoader(str(Path(llm_comply.__file__).parent / "specs" / "anthropic.json"))
MOST = sys.float_info.max
EVENT = TypeAdapter(RawMessageStreamEvent)
WEATHER = {
    "name": "get_weather",
    "description": "Weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TIME = {"type": "custom", "name": "get_time", "input_schema": {"type": "object"}, "strict": True}
QUESTION: dict[str, Any] = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "Weather?"}]}
OMITTED = {"thinking": {"type": "adaptive", "display": "omitted"}}


def call_of(**fields: Any) -> ChatCall:
    return read_message_request({**QUESTION, **fields})[1]


def turns_of(*messages: tuple[str, Any]) -> list[Any]:
    return list(call_of(messages=[{"role": role, "content": content} for role, content in messages]).messages)


def events_of(parts: list[Part], error: RequestError | None = None, **fields: Any) -> list[tuple[str, dict[str, Any]]]:
    request = read_message_request({**QUESTION, **fields})[0]
    return collected(messages_events(streamed(parts, error), request, "msg_1"))


def body_of(parts: list[Part], **fields: Any) -> dict[str, Any]:
    return finished(messages_body(streamed(parts), read_message_request({**QUESTION, **fields})[0], "msg_1"))


def client_of(handler: Callable[[httpx2.Request], httpx2.Response]) -> Anthropic:
    transport = httpx2.Client(transport=httpx2.MockTransport(handler))
    return Anthropic(api_key="k", base_url="http://server", http_client=transport, max_retries=0)


def client_that_receives(events: list[tuple[str, dict[str, Any]]]) -> Anthropic:
    text = "".join(f"event: {name}\ndata: {json.dumps(fields)}\n\n" for name, fields in events)
    return client_of(lambda _: httpx2.Response(200, headers={"content-type": "text/event-stream"}, text=text))


def body_sent_by(send: Callable[[Anthropic], object], reply: dict[str, Any]) -> dict[str, Any]:
    """Return the body of the request that Anthropic's client makes."""
    sent: list[dict[str, Any]] = []

    def handler(request: httpx2.Request) -> httpx2.Response:
        sent.append(json.loads(request.content))
        return httpx2.Response(200, json=reply)

    send(client_of(handler))
    return sent[0]


def test_a_message_is_one_that_the_client_and_the_specification_know() -> None:
    for name, fields in product(ANSWERS, [{}, OMITTED]):
        with in_case(fields, name):
            body = body_of(ANSWERS[name], **fields)
            assert unknown_fields(Message.model_validate(body, strict=True)) == []
            assert SPEC.validate(body, "Message") == []


def test_an_event_is_one_that_the_client_and_the_specification_know() -> None:
    for name, fields in product(ANSWERS, [{}, OMITTED]):
        with in_case(fields, name):
            for event, data in events_of(ANSWERS[name], **fields):
                assert event == data["type"]
                assert unknown_fields(EVENT.validate_python(data, strict=True)) == []
                assert SPEC.validate(data, "MessageStreamEvent") == []


def test_the_client_builds_the_whole_message_of_a_stream() -> None:
    for name, fields in product(ANSWERS, [{}, OMITTED]):
        with in_case(fields, name):
            events = events_of(ANSWERS[name], **fields)
            with client_that_receives(events).messages.stream(**QUESTION) as stream:
                built = stream.get_final_message().to_dict(exclude_unset=False)
            whole = Message.model_validate(body_of(ANSWERS[name], **fields)).to_dict(exclude_unset=False)
            for block in built["content"]:
                block.pop("parsed_output", None)  # the client's own
            assert built == whole


def test_events_come_in_the_order_of_anthropic() -> None:
    parts = answer([Reasoning("a"), Content("b"), RECORDS[0], Content("c"), *CALLS[:3]], "tool_calls")
    shown = [(event, data.get("index"), data.get("delta", {}).get("type")) for event, data in events_of(parts)]
    assert shown == [
        ("message_start", None, None),
        ("content_block_start", 0, None),
        ("content_block_delta", 0, "thinking_delta"),
        ("content_block_delta", 0, "signature_delta"),
        ("content_block_stop", 0, None),
        ("content_block_start", 1, None),
        ("content_block_delta", 1, "text_delta"),
        ("content_block_delta", 1, "text_delta"),
        ("content_block_stop", 1, None),
        ("content_block_start", 2, None),
        ("content_block_delta", 2, "input_json_delta"),
        ("content_block_delta", 2, "input_json_delta"),
        ("content_block_stop", 2, None),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]


def test_a_message_has_all_that_was_answered() -> None:
    assert body_of(ANSWERS["everything, twice"])["content"][:4] == [
        {"type": "thinking", "thinking": "I must look it up.", "signature": SIGNATURE},
        {"type": "text", "text": "It is sunny.", "citations": None},
        {
            "type": "tool_use",
            "id": "call_1",
            "name": "get_weather",
            "input": {"city": "París"},
            "caller": {"type": "direct"},
        },
        {"type": "tool_use", "id": "call_2", "name": "get_time", "input": {}, "caller": {"type": "direct"}},
    ]
    assert body_of(ANSWERS["nothing"])["content"] == [{"type": "text", "text": "", "citations": None}]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"a": 1e999, "b": [-1e999, 12.5, true]}', {"a": MOST, "b": [-MOST, 12.5, True]}),
        ('{"a": 1' + "0" * 400 + "}", {"a": MOST}),
        ('{"a": 1' + "0" * 5000 + "}", {}),
        (r'{"a": "\ud800", "b": "\udc00x", "c": "\ud83d\ude00"}', {"a": "\ufffd", "b": "\ufffdx", "c": "\U0001f600"}),
        (r'{"a": "\\ud800"}', {"a": r"\ud800"}),
        ('{"a": ' + "[" * 20_000, {}),
        ('{"a": [1, {"b": "te', {"a": [1, {}]}),
        ('{"a" 1}', {}),
        ("[1]", {}),
        ("", {}),
    ],
)
def test_arguments_can_be_sent_whatever_the_model_writes(text: str, found: dict[str, Any]) -> None:
    parts: list[Part] = [ToolCallBegin(0, "call_1", "get_weather"), ToolCallArguments(0, text)]
    sent = JSONResponse(finished(messages_body(streamed(answer(parts)), read_message_request(QUESTION)[0], "msg_1")))
    assert json.loads(sent.body)["content"][0]["input"] == found


def test_thoughts_can_be_left_out() -> None:
    deltas = [data["delta"] for event, data in events_of(answer(THOUGHT), **OMITTED) if event == "content_block_delta"]
    assert deltas == [{"type": "signature_delta", "signature": SIGNATURE}]
    assert body_of(answer(THOUGHT), **OMITTED)["content"][0]["thinking"] == ""


@pytest.mark.parametrize(
    ("name", "reason", "text"),
    [
        ("text", "end_turn", None),
        ("stop string", "stop_sequence", "END"),
        ("calls", "tool_use", None),
        ("cut call", "max_tokens", None),
        ("interrupted text", "max_tokens", None),
    ],
)
def test_a_message_says_why_it_ended(name: str, reason: str, text: str | None) -> None:
    body = body_of(ANSWERS[name])
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, text)
    start, end = events_of(ANSWERS[name])[0][1]["message"], events_of(ANSWERS[name])[-2][1]["delta"]
    assert (start["stop_reason"], end["stop_reason"], end["stop_sequence"]) == (None, reason, text)


def test_cached_tokens_are_counted_apart() -> None:
    usage = body_of(ANSWERS["text"])["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (4, 16, 9)
    assert usage["output_tokens_details"] == {"thinking_tokens": 4}
    assert events_of(ANSWERS["text"])[0][1]["message"]["usage"]["input_tokens"] == 20


def test_an_error_after_the_beginning_is_an_event() -> None:
    events = events_of(answer(TEXT)[:2], FAILURE)
    assert events[-1] == ("error", anthropic_error(FAILURE))
    with client_that_receives(events).messages.stream(**QUESTION) as stream, pytest.raises(APIStatusError) as found:
        list(stream)
    assert FAILURE.message in str(found.value)


def test_an_error_before_the_beginning_is_raised() -> None:
    with pytest.raises(RequestError, match="inside the server"):
        events_of([], FAILURE)
    with pytest.raises(RequestError, match="inside the server"):
        finished(messages_body(streamed(answer(TEXT)[:2], FAILURE), read_message_request(QUESTION)[0], "msg_1"))


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (415, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_an_error_has_the_type_of_its_status(status: int, kind: str) -> None:
    body = anthropic_error(RequestError("wrong", status=status), "req_1")
    assert body["error"] == {"type": kind, "message": "wrong"}
    assert ErrorResponse.model_validate(body, strict=True).request_id == "req_1"
    assert SPEC.validate(body, "ErrorResponse") == []
    reply = httpx2.Response(status, json=body)
    with pytest.raises(APIStatusError) as found:
        client_of(lambda _: reply).messages.create(**QUESTION)
    assert (found.value.status_code, found.value.body) == (status, body)


def test_blocks_of_one_turn_are_one_message() -> None:
    use = {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Oslo"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "sunny"}
    blocks = [{"type": "text", "text": "rain"}, {"type": "text", "text": "later sun"}]
    cached = {"cache_control": {"type": "ephemeral"}}
    call = {"id": "t1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
    assert turns_of(
        ("user", [{"type": "text", "text": "Weather?", **cached}, {"type": "text", "text": "In Oslo."}]),
        ("user", "Please."),
        (
            "assistant",
            [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "redacted_thinking", "data": "gAAA"},
                {"type": "text", "text": "I look."},
                use,
                {**use, "id": "t2"},
                {**use, "id": "t3"},
            ],
        ),
        (
            "user",
            [
                result,
                {"type": "tool_result", "tool_use_id": "t2", "content": blocks, "is_error": True},
                {"type": "tool_result", "tool_use_id": "t3"},
                {"type": "text", "text": "So?"},
            ],
        ),
    ) == [
        {"role": "user", "content": "Weather?\n\nIn Oslo."},
        {"role": "user", "content": "Please."},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [call, {**call, "id": "t2"}, {**call, "id": "t3"}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "t2", "content": "rain\n\nlater sun"},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
        {"role": "user", "content": "So?"},
    ]


def test_a_message_can_be_sent_back() -> None:
    sent = Message.model_validate(body_of(answer([*THOUGHT, *TEXT, *CALLS], "tool_calls"))).to_param()
    content = [block.to_dict() for block in sent["content"]]  # type: ignore[union-attr]
    results = [{"type": "tool_result", "tool_use_id": f"call_{number}", "content": "x"} for number in (1, 2)]
    message = turns_of(("user", "Weather?"), ("assistant", content), ("user", results))[1]
    assert (message["content"], message["reasoning_content"]) == ("It is sunny.", "I must look it up.")
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == [{"city": "París"}, {}]


@pytest.mark.parametrize(
    ("system", "found"),
    [
        ("Be brief.", "Be brief."),
        ([{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}], "Be brief.\n\nBe kind."),
        (
            [
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1f;"},
                {"type": "text", "text": "Be brief."},
            ],
            "Be brief.",
        ),
        ("x-anthropic-billing-header: cc_version=2; cch=1f;\nBe brief.\nBe kind.", "Be brief.\nBe kind."),
        ("x-anthropic-billing-header: cc_version=2;\r\n\r\nBe brief.", "Be brief."),
        ([{"type": "text", "text": "x-anthropic-billing-header: 2;\nBe brief."}], "Be brief."),
        ("Say x-anthropic-billing-header: 2;", "Say x-anthropic-billing-header: 2;"),
    ],
    ids=str,
)
def test_a_system_prompt_is_the_first_message(system: object, found: str) -> None:
    assert call_of(system=system).messages[0] == {"role": "system", "content": found}
    assert len(call_of(system=system).messages) == 2


def test_a_billing_line_alone_is_no_system_prompt() -> None:
    line = "x-anthropic-billing-header: cc_version=2;"
    user = {"role": "user", "content": "Weather?"}
    assert call_of(system=line).messages == [user]
    assert call_of(messages=[{"role": "system", "content": line}, user]).messages == [user]
    assert call_of(messages=[{**user, "content": line}]).messages == [{**user, "content": line}]


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}
USE = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
DOCUMENT = {
    "type": "document",
    "title": "notes.txt",
    "source": {"type": "text", "media_type": "text/plain", "data": "a"},
}
FOUND = {"type": "search_result", "title": "T", "source": "http://x", "content": [{"type": "text", "text": "b"}]}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="}}


def test_documents_of_text_are_read_and_what_a_tool_has_returned_besides_is_named() -> None:
    inner = {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "c"}]}}
    blocks = [{"type": "text", "text": "It:"}, DOCUMENT, IMAGE, FOUND, PDF, inner, {"type": "tool_reference"}, IMAGE]
    result = {"type": "tool_result", "tool_use_id": "t1", "content": blocks}
    messages = [{"role": "assistant", "content": [USE]}, {"role": "user", "content": [result, DOCUMENT, FOUND]}]
    for read, body in ((read_message_request, QUESTION), (read_count_tokens, {})):
        _, call, ignored = read({**body, "messages": messages})
        assert [turn["content"] for turn in call.messages[1:]] == [
            "It:\n\nnotes.txt\n\na\n\n[image left out]\n\nT\n\nhttp://x\n\nb\n\n[document left out]\n\nc\n\n"
            "[tool_reference left out]\n\n[image left out]",
            "notes.txt\n\na\n\nT\n\nhttp://x\n\nb",
        ]
        assert ignored == [f"messages.tool_result.{kind}" for kind in ("image", "document", "tool_reference")]


def test_blocks_of_an_answer_that_only_their_sender_can_read_are_left_out_and_named() -> None:
    blocks = [
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []},
        {"type": "text", "text": "Sunny."},
    ]
    _, call, ignored = read_message_request(
        {**QUESTION, "messages": [*QUESTION["messages"], {"role": "assistant", "content": blocks}]}
    )
    assert (call.messages[-1]["content"], call.continues_last) == ("Sunny.", True)
    assert ignored == ["messages.assistant.server_tool_use", "messages.assistant.web_search_tool_result"]


def test_the_beginning_of_an_answer_is_continued() -> None:
    begun = call_of(messages=[*QUESTION["messages"], {"role": "assistant", "content": "It is"}])
    assert (begun.continues_last, begun.messages[-1]["content"]) == (True, "It is")
    empty = call_of(messages=[*QUESTION["messages"], {"role": "assistant", "content": ""}])
    assert (empty.continues_last, empty.messages) == (False, [{"role": "user", "content": "Weather?"}])
    assert not call_of().continues_last


def test_a_request_of_the_client_is_read() -> None:
    asked: dict[str, Any] = {
        **QUESTION,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "stop_sequences": ["END"],
        "extra_body": {"temperature": 0.5, "top_p": 0.9, "top_k": 5},  # arguments of older clients
        "tools": [WEATHER, TIME],
        "tool_choice": {"type": "tool", "name": "get_time", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "array"}}},
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "cache_control": {"type": "ephemeral"},
        "inference_geo": "eu",
        "speed": "standard",
    }
    body = body_sent_by(lambda client: client.messages.create(**asked), body_of(answer(TEXT)))
    request, call, ignored = read_message_request(body)
    assert (request.model, request.stream, ignored) == ("m", False, ["thinking.budget_tokens"])
    time = {"name": "get_time", "parameters": {"type": "object"}, "strict": True}
    weather = {"name": "get_weather", "description": "Weather of a city.", "parameters": WEATHER["input_schema"]}
    assert call == ChatCall(
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Weather?"}],
        tools=[
            {"type": "function", "function": {**weather, "strict": False}},
            {"type": "function", "function": time},
        ],
        tool_choice="required",
        tool_name="get_time",
        has_parallel_tools=False,
        grammar={"json_schema": {"type": "array"}},
        max_new_tokens=50,
        stop=["END"],
        sampling={"temperature": 0.5, "top_p": 0.9, "top_k": 5},
        options={"reasoning_effort": "low", "enable_thinking": True},
    )


def test_a_request_to_count_tokens_has_the_prompt_of_the_same_message() -> None:
    asked: dict[str, Any] = {
        "model": "m",
        "messages": QUESTION["messages"],
        "system": "Be brief.",
        "tools": [WEATHER],
        "tool_choice": {"type": "any"},
        "thinking": {"type": "disabled"},
    }
    body = body_sent_by(lambda client: client.messages.count_tokens(**asked), {"input_tokens": 5})
    _, counted, ignored = read_count_tokens(body)
    answered = call_of(**asked)
    assert ignored == []
    for name in ("messages", "tools", "tool_choice", "tool_name", "options", "continues_last"):
        assert getattr(counted, name) == getattr(answered, name)
    assert (answered.tool_choice, answered.options) == ("required", {"enable_thinking": False})


def test_what_is_left_out_or_null_has_no_effect() -> None:
    empty = dict.fromkeys(("system", "tools", "tool_choice", "thinking", "stop_sequences", "temperature", "container"))
    assert read_message_request({**QUESTION, **empty}) == read_message_request(QUESTION)
    assert (call_of().options, call_of().sampling, call_of().tool_choice) == ({}, {}, "auto")


def test_unknown_fields_are_named() -> None:
    assert read_message_request({**QUESTION, "context_management": {}, "bogus": 1})[2] == [
        "context_management",
        "bogus",
    ]


@pytest.mark.parametrize(
    ("choice", "found"),
    [
        ({"type": "auto"}, ("auto", None, True)),
        ({"type": "auto", "disable_parallel_tool_use": True}, ("auto", None, False)),
        ({"type": "any"}, ("required", None, True)),
        ({"type": "tool", "name": "get_time"}, ("required", "get_time", True)),
        ({"type": "none"}, ("none", None, True)),
    ],
    ids=str,
)
def test_a_choice_of_tools_is_read(choice: dict[str, Any], found: tuple[str, str | None, bool]) -> None:
    call = call_of(tools=[WEATHER, TIME], tool_choice=choice)
    assert (call.tool_choice, call.tool_name, call.has_parallel_tools) == found


@pytest.mark.parametrize(("kind", "thinks"), [("enabled", True), ("adaptive", True), ("disabled", False)])
def test_thinking_is_a_variable_of_the_template(kind: str, thinks: bool) -> None:
    assert call_of(thinking={"type": kind}).options == {"enable_thinking": thinks}


def content(*blocks: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}]}


def test_what_cannot_be_taken_is_named() -> None:
    cases = [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": {}, "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (content(), "messages"),
        (content(IMAGE), "messages[0].content[0]"),
        (content({"type": "text", "text": "x"}, {"type": "document"}), "messages[0].content[1]"),
        (content({"type": "text"}), "messages[0].content[0].text"),
        (content(USE), "messages[0].content[0]"),
        (content(USE, role="assistant"), "messages"),
        (content({"type": "document", "source": {"type": "base64", "data": "AA=="}}), "messages[0].content[0]"),
        (content({"type": "document", "source": {"type": "text"}}), "messages[0].content[0].source.data"),
        (content({"type": 5}, role="assistant"), "messages[0].content[0]"),
        (content({"type": "tool_result", "content": "x"}), "messages[0].content[0].tool_use_id"),
        (content({"type": "tool_result", "tool_use_id": "t", "content": ["x"]}), "messages[0].content[0].content[0]"),
        ({"system": [IMAGE]}, "system[0]"),
        ({"system": 5}, "system"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"container": "c"}, "container"),
        ({"temperature": -1}, "temperature"),
    ]
    for fields, name in cases:
        with in_case(fields, name):
            with pytest.raises(RequestError) as found:
                read_message_request({**QUESTION, **fields})
            assert (found.value.field, found.value.status) == (name, 400)
