"""Calls of tools and thinking, as the clients of OpenAI and Anthropic get them from a model of random weights.

The model's template is of Qwen's kind (chat_folders.py). Grammars make it call validly: `tool_choice`, and `strict`.
"""

import contextlib
import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, Literal

import anthropic
import jsonschema
import openai
import pytest
import torch
from anthropic import beta_tool
from openai.lib.responses_tool_runner import RegisteredFunction, ResponsesToolRunner
from pydantic import BaseModel, Field
from support.chat_folders import BRIEF, TOKEN_IDS, VOCAB, save_calling_folder
from support.serving import SECONDS, Running, running_server

from graphcore import Engine
from graphcore.sampling_params import SamplingParams
from graphcore.serving import answering

pytestmark = pytest.mark.thorough

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 9},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
CLOCK = {
    "type": "object",
    "properties": {"zone": {"type": "string", "enum": ["UTC", "CET"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": WEATHER, "get_time": CLOCK}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": f"{name}.", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
FLAT_TOOLS: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
ANTHROPIC_TOOLS: list[Any] = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
ASKED: list[Any] = [{"role": "user", "content": "What is the weather in Z\u00fcrich?"}]
CALLING = {str(token): value for token, value in {**BRIEF, TOKEN_IDS["<tool_call>"]: 5.0}.items()}
"""A `logit_bias` with which the model often begins a call."""

MOST = 600
SIZES = ["batching.max_sequences=8", "context_length=4096"]


class Person(BaseModel):
    """What the answer must be."""

    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=120)
    mood: Literal["glad", "sad"]


PERSON_FORMAT: dict[str, Any] = {"schema": {**Person.model_json_schema(), "additionalProperties": False}}


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Engine]:
    def load(thinks: bool) -> Engine:
        folder = save_calling_folder(tmp_path_factory.mktemp("calling") / "model", thinks)
        return Engine.load(folder, dtype="fp32", device="cpu", overrides=SIZES)

    return load


@pytest.fixture(scope="module")
def running(load: Callable[[bool], Engine]) -> Iterator[Running]:
    with (
        load(False) as engine,
        running_server(lambda: engine, stream_interval=0, sampling=SamplingParams(logit_bias=BRIEF)) as running,
    ):
        yield running


@pytest.fixture(scope="module")
def thinking(load: Callable[[bool], Engine]) -> Iterator[Running]:
    """A server of a model whose answers begin with thoughts, which it soon ends."""
    bias = {**BRIEF, TOKEN_IDS["<|im_end|>"]: 0.5, TOKEN_IDS["</think>"]: 3.5}
    with (
        load(True) as engine,
        running_server(lambda: engine, stream_interval=0, sampling=SamplingParams(logit_bias=bias)) as running,
    ):
        yield running


@pytest.fixture(autouse=True)
def seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give requests without a seed the seeds 58, 59, ...: Anthropic's interface has none."""
    numbers = count(58)
    monkeypatch.setattr(secrets, "randbelow", lambda _: next(numbers))


def openai_client(running: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=SECONDS)


def anthropic_client(running: Running) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0, timeout=SECONDS)


def chat(running: Running, **fields: Any) -> Any:
    given = {"model": "tiny", "messages": ASKED, "tools": TOOLS, "max_tokens": MOST, "seed": 1, **fields}
    return openai_client(running).chat.completions.create(**given)


def check_calls(calls: Sequence[Any] | None) -> list[str]:
    """Check that the arguments of each call are valid, and return the names of the functions."""
    for call in calls or ():
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    assert len({call.id for call in calls or ()}) == len(calls or ())
    return [call.function.name for call in calls or ()]


def thoughts_of(message: Any) -> str:
    """Return the thoughts of an answer; the model may end them at once."""
    found = getattr(message, "reasoning", "")
    assert found == getattr(message, "reasoning_content", "")
    return found


def test_required_calls_are_valid_and_some_are_parallel(running: Running) -> None:
    choices = chat(running, tool_choice="required", n=8).choices
    assert {choice.finish_reason for choice in choices} == {"tool_calls"}
    assert {choice.message.content for choice in choices} == {None}
    called = [check_calls(choice.message.tool_calls) for choice in choices]
    assert all(called)
    assert {name for names in called for name in names} == set(SCHEMAS)
    assert any(len(names) > 1 for names in called)


def test_without_parallel_calls_each_answer_has_one(running: Running) -> None:
    choices = chat(running, tool_choice="required", n=8, parallel_tool_calls=False).choices
    assert [len(check_calls(choice.message.tool_calls)) for choice in choices] == [1] * 8


def test_a_named_function_is_the_one_that_is_called(running: Running) -> None:
    for name in SCHEMAS:
        named: Any = {"type": "function", "function": {"name": name}}
        choices = chat(running, tool_choice=named, n=4).choices
        assert {name for choice in choices for name in check_calls(choice.message.tool_calls)} == {name}


def test_a_streamed_call_is_the_whole_one(running: Running) -> None:
    several = False
    for seed in range(6):
        whole = chat(running, tool_choice="required", seed=seed).choices[0].message.tool_calls
        pieces: list[list[str]] = []
        for chunk in chat(running, tool_choice="required", seed=seed, stream=True):
            for call in chunk.choices[0].delta.tool_calls or ():
                if call.id is not None:
                    assert call.index == len(pieces)
                    pieces.append([call.function.name])
                pieces[call.index].append(call.function.arguments)
        assert [(name, "".join(texts)) for name, *texts in pieces] == [
            (call.function.name, call.function.arguments) for call in whole
        ]
        several = several or any(len(texts) > 4 for texts in pieces)
    assert several, "arguments come as they are written"


def test_the_stream_helper_collects_calls(running: Running) -> None:
    fields: dict[str, Any] = {"model": "tiny", "messages": ASKED, "tools": TOOLS, "tool_choice": "required", "seed": 3}
    with openai_client(running).chat.completions.stream(**fields, max_tokens=MOST) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        message = stream.get_final_completion().choices[0].message
    whole = chat(running, tool_choice="required", seed=3).choices[0].message
    assert check_calls(message.tool_calls) == check_calls(whole.tool_calls)
    assert [event.arguments for event in done] == [call.function.arguments for call in whole.tool_calls]


def test_results_go_back_in_the_next_turn(running: Running) -> None:
    first = chat(running, tool_choice="required")
    message = first.choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "\u2600 21"} for call in message.tool_calls]
    turns = [*ASKED, message.model_dump(exclude_none=True), *results]
    second = chat(running, messages=turns, tool_choice="none")
    calls = [
        {"function": {"name": call.function.name, "arguments": json.loads(call.function.arguments)}}
        for call in message.tool_calls
    ]
    engine = running.served.engine
    rendered = [*ASKED, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    assert second.usage.prompt_tokens == len(engine.chat_ids(rendered))
    assert second.choices[0].message.tool_calls is None
    third = chat(running, messages=turns, tool_choice="required")
    assert third.usage.prompt_tokens == len(engine.chat_ids(rendered, TOOLS))
    assert third.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens
    check_calls(third.choices[0].message.tool_calls)


def test_a_strict_tool_that_the_model_chooses_to_call_has_valid_arguments(running: Running) -> None:
    """The tag of a call is one token here, as in Qwen's tokenizers, and a grammar must let the model write it."""
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    choices = chat(running, tools=strict, tool_choice="auto", n=8, logit_bias=CALLING).choices
    called = [choice for choice in choices if choice.finish_reason == "tool_calls"]
    assert len(called) >= 2
    assert all(check_calls(choice.message.tool_calls) for choice in called)


def test_a_strict_tool_whose_schema_cannot_be_kept_is_refused_by_name(running: Running) -> None:
    for schema, said in (
        ({"properties": {"a": {"type": "integer", "minimum": 2**63}}}, r"properties\.a\.minimum=9223372036854775808"),
        (
            {"properties": {"a": {"type": "integer", "minimum": -(2**63), "maximum": -(2**63)}}},
            r"properties\.a\.maximum=-92233720368",
        ),
    ):
        function = {"name": "f", "parameters": {"type": "object", **schema}, "strict": True}
        for choice in ("auto", "required"):
            with pytest.raises(openai.BadRequestError, match=rf"tools\[1\]\.function\.parameters: {said}"):
                chat(running, tools=[TOOLS[0], {"type": "function", "function": function}], tool_choice=choice)
    assert chat(running, tools=TOOLS, tool_choice="required").choices[0].message.tool_calls


def test_parsed_tools_have_the_class_that_was_asked_for(running: Running) -> None:
    tool = openai.pydantic_function_tool(Person, name="save_person")
    found = openai_client(running).chat.completions.parse(
        model="tiny", messages=ASKED, tools=[tool], tool_choice="required", max_tokens=MOST, seed=2
    )
    calls = found.choices[0].message.tool_calls
    assert calls
    assert all(isinstance(call.function.parsed_arguments, Person) for call in calls)


def responses_fields(**fields: Any) -> dict[str, Any]:
    seeded = {"extra_body": {"seed": 1}}
    return {"model": "tiny", "input": ASKED, "tools": FLAT_TOOLS, "max_output_tokens": MOST, **seeded, **fields}


def test_responses_call_and_take_results(running: Running) -> None:
    client = openai_client(running)
    whole = client.responses.create(**responses_fields(tool_choice="required"))
    calls = [item for item in whole.output if item.type == "function_call"]
    expected = chat(running, tool_choice="required").choices[0].message.tool_calls
    assert [(call.name, call.arguments) for call in calls] == [
        (call.function.name, call.function.arguments) for call in expected
    ]
    with client.responses.stream(**responses_fields(tool_choice="required")) as stream:
        streamed = stream.get_final_response().output
    assert [(item.name, item.arguments) for item in streamed] == [(call.name, call.arguments) for call in calls]
    outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "\u2600 21"} for call in calls]
    second = client.responses.create(**responses_fields(input=[*ASKED, *whole.output, *outputs], tool_choice="none"))
    assert second.output[0].type == "message"


def test_the_tools_runner_of_responses_runs_what_is_called(running: Running) -> None:
    seen: list[Any] = []

    def execute(arguments: dict[str, object]) -> str:
        jsonschema.validate(arguments, WEATHER)
        seen.append(arguments)
        return "\u2600 21"

    runner = ResponsesToolRunner(functions=[RegisteredFunction({**FLAT_TOOLS[0], "strict": True}, execute)])
    fields: Any = responses_fields(parallel_tool_calls=False, extra_body={"seed": 2, "logit_bias": CALLING})
    del fields["tools"]
    tokens = []
    with contextlib.closing(runner.iterate(openai_client(running), fields)) as turns:
        for turn in turns:
            tokens.append(turn.response.usage.input_tokens)
            if len(tokens) == 3:
                break
    assert len(seen) == 2
    assert tokens == sorted(set(tokens)), "each turn has the calls and results of those before it"


def message_fields(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": ASKED, "max_tokens": MOST, "tools": ANTHROPIC_TOOLS, **fields}


def check_uses(message: Any) -> list[str]:
    uses = [block for block in message.content if block.type == "tool_use"]
    for use in uses:
        jsonschema.validate(use.input, SCHEMAS[use.name])
    return [use.name for use in uses]


def test_messages_call_and_take_results(running: Running) -> None:
    client = anthropic_client(running)
    fields = message_fields(tool_choice={"type": "any"}, extra_body={"top_k": 1})
    whole = client.messages.create(**fields)
    assert check_uses(whole)
    assert whole.stop_reason == "tool_use"
    with client.messages.stream(**fields) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        streamed = stream.get_final_message()
    assert [(block.name, block.input) for block in streamed.content] == [
        (block.name, block.input) for block in whole.content
    ]
    assert len(pieces) > len(whole.content)
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": "\u2600 21"} for block in whole.content]
    turns = [*ASKED, {"role": "assistant", "content": whole.content}, {"role": "user", "content": results}]
    second = client.messages.create(**message_fields(messages=turns, tool_choice={"type": "none"}))
    assert check_uses(second) == []
    only: Any = {"type": "tool", "name": "get_time", "disable_parallel_tool_use": True}
    named = client.messages.create(**message_fields(tool_choice=only))
    assert check_uses(named) == ["get_time"]
    counted = client.messages.count_tokens(model="tiny", messages=ASKED, tools=ANTHROPIC_TOOLS)
    assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


def test_the_tools_runner_of_messages_runs_what_is_called(running: Running) -> None:
    zones: list[str] = []

    @beta_tool
    def get_time(zone: Literal["UTC", "CET"]) -> str:
        """Return the time.

        Args:
            zone: The time zone.
        """
        zones.append(zone)
        return "12:00"

    alone = {"type": "any", "disable_parallel_tool_use": True}
    runner = anthropic_client(running).beta.messages.tool_runner(
        model="tiny", max_tokens=MOST, messages=ASKED, tools=[get_time], tool_choice=alone, max_iterations=3
    )
    assert [message.stop_reason for message in runner] == ["tool_use"] * 3
    assert len(zones) >= 2
    assert set(zones) <= {"UTC", "CET"}


def test_thoughts_come_apart_from_the_answer_whole_and_streamed(thinking: Running) -> None:
    choices = chat(thinking, tools=[], n=8).choices
    assert sum(bool(thoughts_of(choice.message) and choice.message.content) for choice in choices) >= 3
    assert all("</think>" not in thoughts_of(choice.message) for choice in choices)
    content, reasoning = [""] * 8, [""] * 8
    for chunk in chat(thinking, tools=[], n=8, stream=True):
        delta = chunk.choices[0].delta
        content[chunk.choices[0].index] += delta.content or ""
        reasoning[chunk.choices[0].index] += getattr(delta, "reasoning_content", "")
    assert content == [choice.message.content for choice in choices]
    assert reasoning == [thoughts_of(choice.message) for choice in choices]


def test_thoughts_that_are_turned_off_are_not_there(thinking: Running) -> None:
    quiet = chat(thinking, tools=[], n=4, reasoning_effort="none")
    assert quiet.usage.completion_tokens_details.reasoning_tokens == 0
    assert not any(thoughts_of(choice.message) for choice in quiet.choices)
    loud = chat(thinking, tools=[], n=4)
    assert loud.usage.completion_tokens_details.reasoning_tokens > 0


def test_required_calls_come_after_thoughts(thinking: Running) -> None:
    choices = chat(thinking, tool_choice="required", n=8).choices
    whole = [choice for choice in choices if choice.finish_reason == "tool_calls"]
    assert len(whole) >= 6
    assert all(check_calls(choice.message.tool_calls) for choice in whole)
    thoughts = [thoughts_of(choice.message) for choice in whole]
    assert sum(map(bool, thoughts)) >= 4
    assert not any(text.lstrip().startswith("<think>") for text in thoughts), "the prompt has opened them already"


@pytest.mark.parametrize("effort", ["low", "none"])
def test_a_schema_binds_the_answer_and_not_the_thoughts(thinking: Running, effort: Any) -> None:
    client = openai_client(thinking)
    parsed = client.chat.completions.parse(
        model="tiny", messages=ASKED, response_format=Person, max_tokens=MOST, seed=4, reasoning_effort=effort
    )
    message = parsed.choices[0].message
    assert isinstance(message.parsed, Person)
    assert bool(thoughts_of(message)) == (effort == "low")
    found = client.responses.parse(
        model="tiny", input=ASKED, text_format=Person, reasoning={"effort": effort}, extra_body={"seed": 4}
    )
    assert found.output_parsed == message.parsed


@pytest.mark.parametrize(
    "grammar",
    [
        {"regex": "[ab]{3}/c"},
        {"choice": ["aba/c", "bab/c"]},
        {"grammar": "start: /[ab]{3}/ SLASH\nSLASH: /\\/c/"},
        {"grammar": 'root ::= [ab] [ab] [ab] "/c"'},
    ],
)
def test_other_grammars_bind_the_answer_and_not_the_thoughts(thinking: Running, grammar: dict[str, Any]) -> None:
    message = chat(thinking, tools=[], extra_body=grammar).choices[0].message
    assert set(message.content[:3]) <= set("ab")
    assert message.content[3:] == "/c"
    assert thoughts_of(message)


def test_thoughts_in_messages_and_responses(thinking: Running) -> None:
    one: Any = {"type": "any", "disable_parallel_tool_use": True}
    fields = {"model": "tiny", "messages": ASKED, "max_tokens": MOST, "tools": ANTHROPIC_TOOLS, "tool_choice": one}
    client = anthropic_client(thinking)
    for _ in range(8):  # messages have no seed, and one of ten answers has no thoughts
        with client.messages.stream(**fields) as stream:
            message = stream.get_final_message()
        if message.content[0].type == "thinking":
            break
    assert [message.content[0].type, message.content[1].type] == ["thinking", "tool_use"]
    assert check_uses(message)
    assert message.content[0].thinking
    back = [*ASKED, {"role": "assistant", "content": message.content}]
    results = [{"type": "tool_result", "tool_use_id": message.content[1].id, "content": "1"}]
    assert client.messages.create(**{**fields, "messages": [*back, {"role": "user", "content": results}]}).content
    disabled = client.messages.create(**fields, thinking={"type": "disabled"})
    assert {block.type for block in disabled.content} == {"tool_use"}
    asked = responses_fields(tool_choice="required", reasoning={"summary": "auto"})
    found = openai_client(thinking).responses.create(**asked)
    assert [found.output[0].type, found.output[1].type] == ["reasoning", "function_call"]
    assert found.output[0].summary[0].text


def test_beside_a_schema_the_model_calls_or_answers(running: Running, thinking: Running) -> None:
    """What OpenAI's Agents SDK sends in each turn of an agent with an output type; in all three interfaces."""
    wished, strict = {**PERSON_FORMAT, "name": "person"}, [{**tool, "strict": True} for tool in FLAT_TOOLS]
    chat_tools = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    kinds = set()
    for server in (running, thinking):
        soon = {} if server is running else {str(TOKEN_IDS["</think>"]): 3.5}
        for parallel, called_for in ((True, 5.0), (False, 5.0), (True, -5.0)):
            bias = {**CALLING, **soon, str(TOKEN_IDS["<tool_call>"]): called_for}
            asked = {"response_format": {"type": "json_schema", "json_schema": wished}, "parallel_tool_calls": parallel}
            for choice in chat(server, n=2, logit_bias=bias, tools=chat_tools, **asked).choices:
                if choice.finish_reason == "length":
                    continue
                kinds.add((server is running, choice.finish_reason))
                if choice.finish_reason == "tool_calls":
                    called = check_calls(choice.message.tool_calls)
                    assert not choice.message.content
                    assert parallel or len(called) == 1
                else:
                    Person.model_validate_json(choice.message.content)
    assert kinds == {(True, "tool_calls"), (True, "stop"), (False, "tool_calls"), (False, "stop")}
    required = chat(running, tool_choice="required", response_format={"type": "json_schema", "json_schema": wished})
    assert check_calls(required.choices[0].message.tool_calls)
    found = set()
    for seed in range(4):
        bias = {**CALLING, str(TOKEN_IDS["<tool_call>"]): 5.0 if seed % 2 else -5.0}
        text = {"format": {"type": "json_schema", **wished}}
        fields = responses_fields(tools=strict, text=text, extra_body={"seed": seed, "logit_bias": bias})
        for item in openai_client(running).responses.create(**fields).output:
            found.add(item.type)
            if item.type == "message":
                Person.model_validate_json(item.content[0].text)
            else:
                jsonschema.validate(json.loads(item.arguments), SCHEMAS[item.name])
        wanted = {"format": {"type": "json_schema", "schema": PERSON_FORMAT["schema"]}}
        fields = message_fields(output_config=wanted, max_tokens=200, extra_body={"logit_bias": bias})
        for block in anthropic_client(running).messages.create(**fields).content:
            found.add(block.type)
            if block.type == "text":
                Person.model_validate_json(block.text)
            else:
                assert block.name in SCHEMAS
    assert found == {"message", "function_call", "text", "tool_use"}


def scripted(monkeypatch: pytest.MonkeyPatch, running: Running, text: str) -> int:
    """Make the server's model write a text and its end token, and return the number of these tokens."""
    ids = [*running.served.engine.tokenizer.encode(text, add_special_tokens=False), TOKEN_IDS["<|im_end|>"]]

    def mask(new_ids: Sequence[int]) -> torch.Tensor:
        allowed = torch.zeros(VOCAB, dtype=torch.bool)
        allowed[ids[min(len(new_ids), len(ids) - 1)]] = True
        return allowed

    monkeypatch.setattr(answering, "call_mask", lambda *_: mask)
    return len(ids)


def answers_of(running: Running, stops: list[str], **fields: Any) -> list[tuple[str, str, list[str], str, int]]:
    """Return thoughts, content, names of calls, reason and tokens: of chats and messages, whole and streamed."""
    found: list[tuple[str, str, list[str], str, int]] = []
    for choice in (whole := chat(running, stop=stops, **fields)).choices:
        calls = [call.function.name for call in choice.message.tool_calls or ()]
        said = choice.message.content or ""
        ended = choice.finish_reason
        found.append((thoughts_of(choice.message), said, calls, ended, whole.usage.completion_tokens))
    pieces: dict[str, str] = {"reasoning_content": "", "content": ""}
    names: list[str] = []
    ended, used = "", 0
    for chunk in chat(running, stop=stops, stream=True, stream_options={"include_usage": True}, **fields):
        used = chunk.usage.completion_tokens if chunk.usage else used
        for choice in chunk.choices:
            ended = choice.finish_reason or ended
            names += [call.function.name for call in choice.delta.tool_calls or () if call.function.name]
            for name in pieces:
                pieces[name] += getattr(choice.delta, name, None) or ""
    found.append((pieces["reasoning_content"], pieces["content"], names, ended, used))
    client, asked = anthropic_client(running), message_fields(stop_sequences=stops)
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for message in (client.messages.create(**asked), streamed):
        texts = dict.fromkeys(("thinking", "text"), "")
        for block in message.content:
            if block.type in texts:
                texts[block.type] += getattr(block, block.type)
        uses = [block.name for block in message.content if block.type == "tool_use"]
        reason = {"stop_sequence": "stop", "end_turn": "stop", "tool_use": "tool_calls"}[str(message.stop_reason)]
        assert (message.stop_reason == "stop_sequence") == (message.stop_sequence in stops)
        found.append((texts["thinking"], texts["text"], uses, reason, message.usage.output_tokens))
    return found


def test_stop_strings_end_neither_thoughts_nor_calls(
    running: Running, thinking: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each text that the model writes: what is left of it, and the tokens of a byte or a tag each up to its end."""
    call = '<tool_call>\n{"name": "get_time", "arguments": {"zone": "UTC"}}\n</tool_call>'
    for server, text, stops, expected, last in [
        (thinking, "a.\n\nb\n</think>\n\nc.\n\nd", ["\n\n"], ("a.\n\nb", "c.", [], "stop"), "c.\n\n"),
        (thinking, "a.\n\nb\n</think>\n\nc. d", ["\n\n", "x"], ("a.\n\nb", "c. d", [], "stop"), ""),
        (thinking, "a.\n</think>\n\nc", ["</think>"], ("a.\n", "", [], "stop"), "</think>"),
        (thinking, f"zone\n</think>\nc\n{call}", ["zone", '"'], ("zone", "c", ["get_time"], "tool_calls"), ""),
        (running, f"Hi.\n{call}\n{call}", ["\n\n", "UTC"], ("", "Hi.", ["get_time"] * 2, "tool_calls"), ""),
        (running, f"Hi.\n\n{call}", ["\n\n"], ("", "Hi.", [], "stop"), "Hi.\n\n"),
        (running, "Hi. So", [". S"], ("", "Hi", [], "stop"), "Hi. S"),
    ]:
        tokens = scripted(monkeypatch, server, text)
        if last:
            tokens = len(server.served.engine.tokenizer.encode(text[: text.index(last) + len(last)]))
        for found in answers_of(server, stops):
            assert found == (*expected, tokens), text
    late = chat(running, stop=["i", "o"], extra_body={"min_tokens": 4}, n=2)
    assert [choice.message.content for choice in late.choices] == ["Hi. S"] * 2
    assert late.usage.completion_tokens == 12


def test_a_call_in_thoughts_that_are_not_closed_is_a_call_and_counted(
    thinking: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = '<tool_call>\n{"name": "get_time", "arguments": {"zone": "UTC"}}\n</tool_call>'

    def counted() -> float:
        with thinking.client() as client:
            lines = client.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith("graphcore_calls_in_thoughts_total")).split()[1])

    before = counted()
    tokens = scripted(monkeypatch, thinking, f"I look.\n{call}")
    for found in answers_of(thinking, []):
        assert found == ("I look.", "", ["get_time"], "tool_calls", tokens)
    assert counted() == before + 4
    cut = chat(thinking, max_tokens=tokens - 1).choices[0]
    assert (cut.finish_reason, cut.message.tool_calls) == ("length", None)
    scripted(monkeypatch, thinking, f"I look.\n{call}\n</think>\nHi")
    for found in answers_of(thinking, []):
        assert found[1:4] == ("Hi", [], "stop")
    assert counted() == before + 4
