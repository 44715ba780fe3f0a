"""Messages of chats: texts, lists of parts, calls of earlier turns; errors say what is wrong with which part."""

import json
import time
from typing import Any

import pytest

from graphcore.serving.chat_call import function_tool
from graphcore.serving.message_parts import call_arguments
from graphcore.serving.openai_chat import read_chat
from graphcore.serving.openai_messages import text_of
from graphcore.serving.request_errors import RequestError

ASKED: list[dict[str, Any]] = [{"role": "user", "content": "Look."}]


def test_parts_are_joined() -> None:
    assert text_of([{"type": "text", "text": "a"}, {"type": "input_text", "text": ""}], "content") == "a"


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("hi", "content[0] must be an object with a type and a text"),
        ({"type": "text"}, "content[0].text must be a text"),
        ({"type": "text", "text": 5}, "content[0].text must be a text"),
        ({"type": "image_url"}, "content[0]: a part of type 'image_url' cannot be read; this model takes text alone"),
    ],
)
def test_a_part_that_is_no_text_is_refused_for_what_it_is(part: object, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        text_of([part], "content")
    assert caught.value.message == said


def test_what_a_tool_has_returned_besides_text_is_named() -> None:
    parts = [
        {"type": "text", "text": "It: "},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
        {"type": "file", "file": {}},
    ]
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    turns = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": parts}]
    _, read, ignored = read_chat({"messages": [*ASKED, *turns, *turns]})
    assert read.messages[2]["content"] == read.messages[4]["content"] == "It: [image left out][file left out]"
    assert ignored == ["messages.tool.image_url", "messages.tool.file"]
    with pytest.raises(RequestError, match="cannot be read; this model takes text alone"):
        read_chat({"messages": [{"role": "user", "content": parts}]})


LINE = "x-anthropic-billing-header: cc_version=2.1.9; cc_entrypoint=cli; cch=1a2b;"


def test_a_billing_line_goes_and_the_rest_of_a_systems_text_stays() -> None:
    for content, found in (
        (LINE + "\nBe brief.\nBe kind.", ["Be brief.\nBe kind."]),
        ([{"type": "text", "text": LINE}, {"type": "text", "text": "Be brief."}], ["Be brief."]),
        (LINE, []),
        ([{"type": "text", "text": LINE}], []),
        ("", [""]),
        ("Never say " + LINE, ["Never say " + LINE]),
    ):
        for role in ("system", "developer"):
            read = read_chat({"messages": [{"role": role, "content": content}, *ASKED]})[1].messages
            assert [turn["content"] for turn in read] == [*found, "Look."], content
    assert read_chat({"messages": [{"role": "user", "content": LINE}]})[1].messages[0]["content"] == LINE
    with pytest.raises(RequestError, match="messages has no content"):
        read_chat({"messages": [{"role": "system", "content": LINE}]})


def test_arguments_of_earlier_calls_are_read_as_far_as_they_go() -> None:
    deep = "[" * 150 + "]" * 150
    for given, found in (
        *((nothing, {}) for nothing in (None, "", "  \n", "null", 5, "5", True, "nonsense", [], "[]", "[1]", '"text"')),
        ({"a": 1}, {"a": 1}),
        ('{"city": "Oslo", "count": }', {"city": "Oslo"}),
        ('{"city": "Oslo", "count": 12', {"city": "Oslo"}),
        ('{"city": "Oslo", "days": [1, 2, "th', {"city": "Oslo", "days": [1, 2]}),
        ('{"city": "Oslo", "is', {"city": "Oslo"}),
        ('{"city": "Oslo",}', {"city": "Oslo"}),
        ('{"city": "Oslo"} </tool_call>', {"city": "Oslo"}),
        ('{"city": "Oslo", city}', {"city": "Oslo"}),
        ('{"city" "Oslo"}', {}),
        ('[{"city": "Oslo"}]', {"city": "Oslo"}),
        ([{"city": "Oslo"}], {"city": "Oslo"}),
        ('"{\\"city\\": \\"Oslo\\"}"', {"city": "Oslo"}),
        ('{"city": "Oslo", "deep": ' + "[" * 500 + "]" * 500 + "}", {"city": "Oslo"}),
        (f'{{"deep": {deep}}}', {"deep": json.loads(deep)}),
        (r'{"city": "\ud800", "other": "\ud83d\ude00"}', {"city": "\ufffd", "other": "\U0001f600"}),
    ):
        assert call_arguments(given) == found, given
        call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": given}}
        turn = read_chat({"messages": [*ASKED, {"role": "assistant", "tool_calls": [call]}]})[1].messages[1]
        assert turn["tool_calls"][0]["function"] == {"name": "look", "arguments": found}


def test_arguments_with_long_runs_of_digits_are_read_in_linear_time() -> None:
    began = time.process_time()
    for text in ("1" * 200_000, "-" * 200_000, "e." * 100_000):
        assert call_arguments(json.dumps({"text": text})) == {"text": text}
        assert call_arguments('{"a": 1, "b": "' + text) == {"a": 1}
    assert time.process_time() - began < 10  # ten minutes where each digit begins a search


def test_nulls_of_a_tool_count_as_left_out_where_they_are_no_values() -> None:
    inner = {"type": "object", "properties": None, "required": None, "default": None, "enum": [None, {"a": None}]}
    many = {"anyOf": [{"const": None, "title": None}, {"items": {"format": None}}], "additionalProperties": None}
    given = {
        "name": "look",
        "description": None,
        "strict": None,
        "parameters": {"type": "object", "properties": {"required": inner, "b": many}, "required": None, "$defs": None},
    }
    kept = {"type": "object", "default": None, "enum": [None, {"a": None}]}
    some = {"anyOf": [{"const": None}, {"items": {}}]}
    parameters = {"type": "object", "properties": {"required": kept, "b": some}}
    assert function_tool(given) == {"type": "function", "function": {"name": "look", "parameters": parameters}}
    empty = {"type": "object", "properties": None, "required": None}
    read = read_chat({"messages": ASKED, "tools": [{"function": {"name": "look", "parameters": empty}}]})[1]
    assert read.tools == [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
