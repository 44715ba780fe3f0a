"""/v1/responses: what OpenAI's client sends is read, and what is sent back is what OpenAI's client and specs expect."""

import json
from collections import defaultdict
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import httpx2
import llm_comply
import pytest
from llm_comply.schema import SSE_EVENT_TO_SCHEMA, SpecLoader
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
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

from graphcore.serving.chat_call import ChatCall, Content, Part, Reasoning
from graphcore.serving.openai_response_events import responses_body, responses_events
from graphcore.serving.openai_responses import read_responses
from graphcore.serving.request_errors import RequestError
from graphcore.serving.token_texts import TokenTexts

OPEN_RESPONSES = SpecLoader(str(Path(llm_comply.__file__).parent / "specs" / "openresponses.json"))
EVENT = TypeAdapter(ResponseStreamEvent)
BEYOND_OPENAI = {".frequency_penalty", ".presence_penalty", ".store"}  # Open Responses requires them
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
TIME = {"type": "function", "name": "get_time", "parameters": None}
QUESTION = {"model": "m", "input": "What is the weather?"}
SUMMARY = {"reasoning": {"effort": "low", "summary": "auto"}}
ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "summary": SUMMARY,
    "everything": {
        "instructions": "Be brief.",
        "tools": [WEATHER, TIME],
        "tool_choice": {"type": "function", "name": "get_time"},
        "parallel_tool_calls": False,
        "temperature": 0.5,
        "top_p": 0.9,
        "max_output_tokens": 99,
        "max_tool_calls": 3,
        "top_logprobs": 2,
        "metadata": {"a": "b"},
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "service_tier": "auto",
        "store": True,
        "text": {"format": {"type": "json_object"}, "verbosity": "low"},
        "user": "u",
    },
    "allowed tools": {
        "tools": [WEATHER, TIME],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_time"}]},
    },
}


def call_of(**fields: Any) -> ChatCall:
    return read_responses({**QUESTION, **fields})[1]


def events_of(parts: list[Part], error: RequestError | None = None, **fields: Any) -> list[tuple[str, dict[str, Any]]]:
    request = read_responses({**QUESTION, **fields})[0]
    source = streamed(parts, error)
    return collected(responses_events(source, request, "resp_1", 1000, TokenTexts(None), now=lambda: 1002.75))


def body_of(parts: list[Part], **fields: Any) -> dict[str, Any]:
    request = read_responses({**QUESTION, **fields})[0]
    return finished(responses_body(streamed(parts), request, "resp_1", 1000, TokenTexts(None), now=lambda: 1002.75))


def client_of(handler: Callable[[httpx2.Request], httpx2.Response]) -> OpenAI:
    transport = httpx2.Client(transport=httpx2.MockTransport(handler))
    return OpenAI(api_key="k", base_url="http://server/v1", http_client=transport, max_retries=0)


def client_that_receives(events: list[tuple[str, dict[str, Any]]]) -> OpenAI:
    text = "".join(f"event: {name}\ndata: {json.dumps(fields)}\n\n" for name, fields in events)
    return client_of(lambda _: httpx2.Response(200, headers={"content-type": "text/event-stream"}, text=text))


def body_sent_by(send: Callable[[OpenAI], object]) -> dict[str, Any]:
    """Return the body of the request that OpenAI's client makes."""
    sent: list[dict[str, Any]] = []

    def handler(request: httpx2.Request) -> httpx2.Response:
        sent.append(json.loads(request.content))
        return httpx2.Response(200, json=body_of(answer([Content('{"city": "Oslo"}')])))

    send(client_of(handler))
    return sent[0]


def test_a_response_is_one_that_the_client_and_open_responses_know() -> None:
    for name, asked in product(ANSWERS, ASKED):
        with in_case(asked, name):
            body = body_of(ANSWERS[name], **ASKED[asked])
            assert set(unknown_fields(Response.model_validate(body, strict=True))) == BEYOND_OPENAI
            assert OPEN_RESPONSES.validate(body, "ResponseResource") == []


def test_an_event_is_one_that_the_client_and_open_responses_know() -> None:
    for name, asked in product(ANSWERS, ASKED):
        with in_case(asked, name):
            events = events_of(ANSWERS[name], **ASKED[asked])
            for number, (event, fields) in enumerate(events):
                assert (event, number) == (fields["type"], fields["sequence_number"])
                known = EVENT.validate_python(fields, strict=True)
                assert {name.removeprefix(".response") for name in unknown_fields(known)} <= BEYOND_OPENAI
                if event in SSE_EVENT_TO_SCHEMA:
                    assert OPEN_RESPONSES.validate_sse_event(event, fields) == []
                else:  # OpenAI's names; llm-comply's table has others
                    assert event.startswith(("response.reasoning_text.", "response.reasoning_summary_text."))


def test_a_stream_ends_with_the_whole_response() -> None:
    for name, asked in product(ANSWERS, ASKED):
        with in_case(asked, name):
            body = body_of(ANSWERS[name], **ASKED[asked])
            events = events_of(ANSWERS[name], **ASKED[asked])
            assert events[-1][1]["response"] == body
            items = [fields["item"] for event, fields in events if event == "response.output_item.done"]
            assert items == body["output"]
            texts: dict[str, str] = defaultdict(str)
            for event, fields in events:
                if event.endswith(".delta"):
                    texts[fields["item_id"]] += fields["delta"]
            for item in body["output"]:
                parts = item.get("content") or item.get("summary")
                assert texts[item["id"]] == (parts[0]["text"] if parts else item["arguments"])


@pytest.mark.parametrize("name", ["text", "thought and text", "calls", "everything, twice", "nothing"])
def test_the_client_builds_the_whole_response_of_a_stream(name: str) -> None:
    events = events_of(ANSWERS[name], tools=[WEATHER, TIME])
    with client_that_receives(events).responses.stream(model="m", input="x", tools=[WEATHER, TIME]) as stream:
        seen = [event.type for event in stream]
        final = stream.get_final_response()
    assert seen == [event for event, _ in events]
    body = body_of(ANSWERS[name], tools=[WEATHER, TIME])
    assert final.output_text == "".join(part.text for part in ANSWERS[name] if isinstance(part, Content))
    assert [item.type for item in final.output] == [item["type"] for item in body["output"]]
    calls = [item for item in final.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [{"city": "París"}, {}][: len(calls)]
    assert final.usage is not None
    assert (final.usage.total_tokens, final.usage.input_tokens_details.cached_tokens) == (29, 16)


def test_events_come_in_the_order_of_openai() -> None:
    parts = answer([Reasoning("a"), Content("b"), Content("c"), *CALLS[:3]], "tool_calls")
    assert [event.removeprefix("response.") for event, _ in events_of(parts)] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]


def test_a_new_item_is_empty_and_in_progress() -> None:
    items = [
        fields["item"] for event, fields in events_of(ANSWERS["everything, twice"]) if event.endswith("item.added")
    ]
    assert [item["type"] for item in items[:4]] == ["reasoning", "message", "function_call", "function_call"]
    assert {item["status"] for item in items} == {"in_progress"}
    assert all(not item.get("content") and not item.get("arguments") for item in items)


def test_thoughts_are_the_summary_if_one_is_asked_for() -> None:
    plain, summary = body_of(answer(THOUGHT))["output"][0], body_of(answer(THOUGHT), **SUMMARY)["output"][0]
    assert (plain["summary"], plain["content"]) == ([], [{"type": "reasoning_text", "text": "I must look it up."}])
    assert summary["summary"] == [{"type": "summary_text", "text": "I must look it up."}]
    assert "content" not in summary
    events = [event.removeprefix("response.reasoning_") for event, _ in events_of(answer(THOUGHT), **SUMMARY)[3:-2]]
    deltas = ["summary_text.delta", "summary_text.delta", "summary_text.done"]
    assert events == ["summary_part.added", *deltas, "summary_part.done"]


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("text", "completed", None),
        ("calls", "completed", None),
        ("cut call", "incomplete", {"reason": "max_output_tokens"}),
        ("interrupted text", "incomplete", {"reason": "max_output_tokens"}),
    ],
)
def test_a_response_says_whether_it_is_whole(name: str, status: str, reason: dict[str, str] | None) -> None:
    body = body_of(ANSWERS[name])
    assert (body["status"], body["incomplete_details"], body["output"][-1]["status"]) == (status, reason, status)
    assert body["completed_at"] == (1002 if status == "completed" else None)
    assert [item["status"] for item in body["output"][:-1]] == ["completed"] * (len(body["output"]) - 1)
    assert events_of(ANSWERS[name])[-1][0] == f"response.{status}"


def test_log_probabilities_belong_to_messages_alone() -> None:
    parts = answer([RECORDS[0], Reasoning("a"), RECORDS[0], RECORDS[1], Content("b"), RECORDS[1], Content("c")])
    message = body_of(parts, top_logprobs=2)["output"][1]
    first = {"token": "token_id:5", "logprob": -0.25, "bytes": list(b"token_id:5")}
    other = {"token": "token_id:7", "logprob": -1.5, "bytes": list(b"token_id:7")}
    found = message["content"][0]["logprobs"]
    assert [record["token"] for record in found] == ["token_id:5", "token_id:6", "token_id:6"]
    assert found[0] == {**first, "top_logprobs": [first, other]}
    deltas = [fields for event, fields in events_of(parts) if event.endswith(".delta")]
    assert ["logprobs" in fields for fields in deltas] == [False, True, True]
    assert [len(fields["logprobs"]) for fields in deltas[1:]] == [2, 1]
    for event, fields in events_of(parts):
        EVENT.validate_python(fields, strict=True)
        assert event not in SSE_EVENT_TO_SCHEMA or OPEN_RESPONSES.validate_sse_event(event, fields) == []


def test_an_error_after_the_beginning_is_an_event() -> None:
    events = events_of(answer(TEXT)[:2], FAILURE)
    response = events[-1][1]["response"]
    assert [event.removeprefix("response.") for event, _ in events[-2:]] == ["output_item.done", "failed"]
    assert response["error"] == {"code": "server_error", "message": FAILURE.message}
    assert (response["status"], response["output"][0]["status"]) == ("failed", "incomplete")
    assert response["output"][0]["content"][0]["text"] == "It is "
    assert OPEN_RESPONSES.validate_sse_event(*events[-1]) == []
    EVENT.validate_python(events[-1][1], strict=True)


def test_an_error_before_the_beginning_is_raised() -> None:
    with pytest.raises(RequestError, match="inside the server"):
        events_of([], FAILURE)
    request = read_responses(QUESTION)[0]
    with pytest.raises(RequestError, match="inside the server"):
        finished(responses_body(streamed(answer(TEXT)[:2], FAILURE), request, "resp_1", 1000))


def test_items_of_one_turn_are_one_message() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Oslo"}'}
    messages = call_of(
        instructions="Be brief.",
        input=[
            {"role": "developer", "content": "In English."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {
                "type": "message",
                "id": "msg_1",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
            },
            call,
            {**call, "call_id": "c2", "arguments": ""},
            {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "rain"}]},
            {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "gAAA"},
            {"role": "user", "content": "So?"},
        ],
    ).messages
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}},
        {"id": "c2", "type": "function", "function": {"name": "get_weather", "arguments": {}}},
    ]
    assert messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "In English."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c2", "content": "rain"},
        {"role": "user", "content": "So?"},
    ]


@pytest.mark.parametrize("asked", ["plain", "summary"])
def test_a_response_can_be_sent_back_as_input(asked: str) -> None:
    output = body_of(answer([*THOUGHT, *TEXT, *CALLS], "tool_calls"), **ASKED[asked])["output"]
    message = call_of(input=output).messages[0]
    assert (message["content"], message["reasoning_content"]) == ("It is sunny.", "I must look it up.")
    assert [call["id"] for call in message["tool_calls"]] == ["call_1", "call_2"]
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == [{"city": "París"}, {}]


def test_items_of_other_tools_are_left_out_and_named() -> None:
    """Codex sends them, and the result of a shell's call as that of a function's."""
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
    body = {
        **QUESTION,
        "instructions": "x-anthropic-billing-header: cc_version=2;\nBe brief.",
        "input": [
            {"role": "developer", "content": [{"type": "input_text", "text": "x-anthropic-billing-header: 2;"}]},
            {"role": "user", "content": "Look."},
            {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"},
            {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
            {"type": "local_shell_call", "call_id": "c0", "status": "completed", "action": {"type": "exec"}},
            {"type": "function_call_output", "call_id": "c0", "output": "a.py"},
            {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "***"},
            {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
            {"type": "function_call", "call_id": "c2", "name": "view_image", "arguments": None},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "It:"}, image]},
            {"type": "compaction", "encrypted_content": "gAAA"},
            {"role": "user", "content": "And now?"},
        ],
    }
    _, call, ignored = read_responses(body)
    function = {"name": "view_image", "arguments": {}}
    assert call.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c2", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c2", "content": "It:[image left out]"},
        {"role": "user", "content": "And now?"},
    ]
    kinds = ("reasoning.encrypted_content", "web_search_call", "local_shell_call", "custom_tool_call")
    outputs = ("custom_tool_call_output", "function_call_output.input_image", "compaction")
    assert ignored == [f"input.{kind}" for kind in (*kinds, *outputs)]


class Place(BaseModel):
    """A format that the client turns into a schema."""

    city: str


def test_a_request_of_the_client_is_read() -> None:
    body = body_sent_by(
        lambda client: client.responses.parse(
            model="m",
            input=[{"role": "user", "content": "Where?"}],
            text_format=Place,
            instructions="Be brief.",
            tools=[WEATHER],
            tool_choice="required",
            parallel_tool_calls=False,
            max_output_tokens=50,
            temperature=0.5,
            top_p=0.9,
            top_logprobs=3,
            include=["message.output_text.logprobs", "reasoning.encrypted_content"],
            reasoning={"effort": "high", "summary": "auto"},
            store=False,
            truncation="disabled",
            background=False,
            metadata={"a": "b"},
            user="u",
            service_tier="auto",
            safety_identifier="s",
            prompt_cache_key="k",
            prompt_cache_retention="24h",
        )
    )
    request, call, ignored = read_responses(body)
    assert (request.model, request.stream, ignored) == ("m", False, ["include.reasoning.encrypted_content"])
    function = {name: WEATHER[name] for name in ("name", "description", "parameters", "strict")}
    assert call == ChatCall(
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where?"}],
        tools=[{"type": "function", "function": function}],
        tool_choice="required",
        has_parallel_tools=False,
        grammar={"json_schema": body["text"]["format"]["schema"]},
        max_new_tokens=50,
        sampling={"temperature": 0.5, "top_p": 0.9},
        wants_logprobs=True,
        num_top_logprobs=3,
        options={"reasoning_effort": "high", "enable_thinking": True},
    )
    assert body["text"]["format"]["schema"]["required"] == ["city"]


def test_what_is_left_out_or_null_has_no_effect() -> None:
    empty = dict.fromkeys(("tools", "tool_choice", "text", "reasoning", "temperature", "include", "background"))
    plain = ChatCall(messages=[{"role": "user", "content": "What is the weather?"}], tools=[])
    assert read_responses({**QUESTION, **empty})[1:] == (plain, [])
    nested = {"text": {"format": None, "verbosity": None}, "reasoning": {"effort": None, "summary": None}}
    assert read_responses({**QUESTION, **nested})[1] == plain


SEARCH = {"type": "web_search", "search_context_size": "low"}
PATCH = {"type": "custom", "name": "get_time", "format": {"type": "text"}}


def test_tools_of_other_kinds_and_values_that_cannot_be_given_are_left_out_and_named() -> None:
    values = ["file_search_call.results", "message.output_text.logprobs", "file_search_call.results"]
    body = {**QUESTION, "tools": [SEARCH, PATCH, WEATHER, SEARCH], "include": values}
    request, call, ignored = read_responses(body)
    assert ignored == ["tools.web_search", "tools.custom", "include.file_search_call.results"]
    assert call == call_of(tools=[WEATHER], include=["message.output_text.logprobs"])
    assert [tool.name for tool in request.functions] == ["get_weather"]
    named = body_of(answer(TEXT), tools=[SEARCH, PATCH, WEATHER])["tools"]
    assert [tool["name"] for tool in named] == ["get_weather"]
    assert read_responses({**QUESTION, "tools": [{"type": "x" * 99}]})[2] == ["tools." + "x" * 54]
    assert len(read_responses({**QUESTION, "include": [str(at) for at in range(99)]})[2]) == 20


@pytest.mark.parametrize(
    ("choice", "name", "kind"),
    [
        ({"type": "web_search"}, "tool_choice", "web_search"),
        ({"type": "custom", "name": "get_time"}, "tool_choice", "custom"),
        ({"type": "allowed_tools", "tools": [WEATHER, {"type": "web_search"}]}, "tool_choice.tools", "web_search"),
        ({"type": "allowed_tools", "tools": [{"type": "custom", "name": "get_time"}]}, "tool_choice.tools", "custom"),
    ],
    ids=str,
)
def test_a_tool_that_is_left_out_cannot_be_chosen(choice: object, name: str, kind: str) -> None:
    with pytest.raises(RequestError, match=kind) as found:
        call_of(tools=[SEARCH, PATCH, WEATHER, TIME], tool_choice=choice)
    assert found.value.field == name
    with pytest.raises(RequestError, match="web_search") as found:
        call_of(tools=[SEARCH, PATCH], tool_choice="required")
    assert found.value.field == "tool_choice"
    assert call_of(tools=[SEARCH, PATCH]).tool_choice == "auto"


def test_unknown_fields_are_named() -> None:
    assert read_responses({**QUESTION, "access_programs": {}, "bogus": 1})[2] == ["access_programs", "bogus"]


@pytest.mark.parametrize(
    ("choice", "found"),
    [
        ("none", ("none", None, 2)),
        ("auto", ("auto", None, 2)),
        ("required", ("required", None, 2)),
        ({"type": "function", "name": "get_time"}, ("required", "get_time", 2)),
        ({"type": "allowed_tools", "mode": "required", "tools": [TIME]}, ("required", None, 1)),
        ({"type": "allowed_tools", "tools": [TIME, TIME]}, ("auto", None, 1)),
    ],
    ids=str,
)
def test_a_choice_of_tools_is_read(choice: object, found: tuple[str, str | None, int]) -> None:
    call = call_of(tools=[WEATHER, TIME], tool_choice=choice)
    assert (call.tool_choice, call.tool_name, len(call.tools)) == found
    assert call.tools[-1]["function"]["name"] == "get_time"
    assert call.tools[-1]["function"]["parameters"] == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("effort", "thinks"), [("none", False), ("minimal", False), ("low", True), ("max", True)], ids=str
)
def test_an_effort_is_a_variable_of_the_template(effort: str, thinks: bool) -> None:
    assert call_of(reasoning={"effort": effort}).options == {"reasoning_effort": effort, "enable_thinking": thinks}


@pytest.mark.parametrize(
    ("asked", "grammar"),
    [
        ({"type": "text"}, {}),
        ({"type": "json_object"}, {"json_schema": {"type": "object"}}),
        ({"type": "json_schema", "name": "n", "schema": {"type": "array"}}, {"json_schema": {"type": "array"}}),
    ],
    ids=str,
)
def test_a_format_is_a_grammar(asked: dict[str, Any], grammar: dict[str, Any]) -> None:
    assert call_of(text={"format": asked}).grammar == grammar
    body = body_of(answer(TEXT), text={"format": asked})
    assert Response.model_validate(body, strict=True).text is not None
    assert asked.items() <= body["text"]["format"].items()


def test_what_cannot_be_taken_is_named() -> None:
    cases = [
        ({"previous_response_id": "resp_0"}, "previous_response_id"),
        ({"conversation": "conv_0"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": {}, "content": "x"}]}, "input[0].role"),
        ({"input": [{}]}, "input[0].type"),
        ({"input": [{"type": [], "content": "x"}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "msg_0"}]}, "input[0].type"),
        ({"input": [{"type": "reasoning", "summary": "x"}]}, "input[0].summary"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "compaction", "encrypted_content": "gAAA"}]}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": ["x"]}]}, "input[0].output[0]"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"tools": [{"name": "f"}]}, "tools.0.type"),
        ({"tools": [{"type": 5}]}, "tools.0.type"),
        ({"tools": [{"type": "web_search"}, {"type": "function"}]}, "tools.1.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "tools": [{"name": "f"}]}}, "tool_choice.tools"),
        ({"tool_choice": {"type": "allowed_tools", "tools": 5}}, "tool_choice.tools"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_object"}}, "regex": "a"}, "text.format"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"metadata": {"a": 1}}, "metadata.a"),
    ]
    for fields, name in cases:
        with in_case(fields, name):
            with pytest.raises(RequestError) as found:
                read_responses({**QUESTION, **fields})
            assert (found.value.field, found.value.status) == (name, 400)


def test_the_client_reports_a_failed_response() -> None:
    events = events_of(answer(TEXT)[:2], FAILURE)
    with client_that_receives(events).responses.stream(model="m", input="x") as stream:
        last = list(stream)[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.code == "server_error"
