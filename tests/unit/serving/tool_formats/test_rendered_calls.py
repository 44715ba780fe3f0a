"""What a family's chat template renders is parsed back, however the text is cut."""

import json
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import in_case
from support.tool_texts import (
    PARALLEL,
    SILENT,
    SOURCES,
    STREAMED,
    THINKING,
    TOOLS,
    WHOLE,
    format_named,
    parsed,
    pieces,
    rendered,
    tokenizer,
    turn,
)
from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS
from transformers.utils.chat_parsing import parse_response

from graphcore.serving.chat_call import ToolCallArguments, ToolCallBegin
from graphcore.serving.tool_formats.answer_parser import AnswerParser

pytestmark = pytest.mark.thorough

HARD = {
    "city": 'Z\u00fcrich "{[\\ </tool_call> <function=clock> }\n  \U0001f30d <|im_start|>',
    "count": -12,
    "exact": True,
    "items": [1, "a}\"'", {"deep": [None, 1.5e-07, []]}],
    "limits": {"lo": 0, "hi": {"x": "</parameter>"}},
    "none": None,
    "share": 0.25,
}
FRAGMENTS = (
    "</tool_call>",
    "<tool_call>",
    "</parameter>",
    "}",
    "{",
    '"',
    "\\",
    "\n",
    " ",
    "\u00e9",
    "<",
    "a",
    "<think>",
)
texts = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=4)), max_size=6).map("".join)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["k", "k_2", "z"]), inner, max_size=3),
    max_leaves=6,
)
arguments = st.fixed_dictionaries(
    {"city": texts},
    optional={
        "count": st.integers(-(10**20), 10**20),
        "exact": st.booleans(),
        "items": st.lists(values, max_size=3),
        "limits": st.dictionaries(st.sampled_from(["k", "k_2"]), values, max_size=2),
        "none": st.none(),
        "share": st.floats(allow_nan=False, allow_infinity=False),
    },
)


def texts_in(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for key, item in value.items() for text in [key, *texts_in(item)]]
    return [text for item in value for text in texts_in(item)] if isinstance(value, list) else []


def can_be_written(name: str, given_arguments: dict[str, Any]) -> bool:
    """Return whether a family's syntax has a way to write the texts: tags and Gemma's quotes have no escapes."""
    found = texts_in(given_arguments)
    if name == "lfm2":  # the template puts a text between quotes as it is
        return not any("'" in text or "\\" in text for text in found)
    if name == "gemma4":
        return not any('<|"|>' in text for text in found)
    return name != "qwen3_5" or not any("<parameter=" in text or "</function>" in text for text in found)


def test_a_rendered_call_is_parsed_back() -> None:
    for name, size in product(SOURCES, [1, 2, 5, 10_000]):
        with in_case(size, name):
            prompt, text = rendered(name, turn(("search_2", HARD)))
            found = parsed(format_named(name), pieces(text, size), prompt)
            assert found.values == [("search_2", HARD)]
            assert (found.reasoning, found.content) == ("", "")


def test_thoughts_and_text_beside_a_call_are_parsed_back() -> None:
    for name, size in product([name for name in SOURCES if name not in SILENT or name in THINKING], [1, 2, 5, 10_000]):
        with in_case(size, name):
            content = "" if name in SILENT else "Let me look:\n\n- one"
            thoughts = "First <tool_call>\n\n  then } so." if name in THINKING else ""
            prompt, text = rendered(name, turn(("search_2", {"city": "x"}), content=content, thoughts=thoughts))
            found = parsed(format_named(name), pieces(text, size), prompt)
            assert found.values == [("search_2", {"city": "x"})]
            assert (found.reasoning, found.content) == (thoughts, content)


def test_calls_of_one_turn_are_parsed_back() -> None:
    for name, size in product(PARALLEL, [1, 2, 5, 10_000]):
        with in_case(size, name):
            calls = [("search_2", {"city": "a"}), ("clock.now-utc", {}), ("search_2", HARD)]
            prompt, text = rendered(name, turn(*calls))
            found = parsed(format_named(name), pieces(text, size), prompt)
            assert found.values == calls
            assert len(set(found.ids)) == 3
            assert all(call_id.startswith("call_") for call_id in found.ids)
            assert found.content == ""


@pytest.mark.parametrize("name", SOURCES)
def test_pieces_of_tokens_are_parsed_like_the_whole(name: str) -> None:
    prompt, text = rendered(name, turn(("search_2", HARD)))
    known, backend = format_named(name), tokenizer()
    ids = backend.encode(text, add_special_tokens=False).ids
    for size in (1, 2, 5):
        ends = [backend.decode(ids[: at + size], skip_special_tokens=False) for at in range(0, len(ids), size)]
        whole = [end for end in ends if not end.endswith("\ufffd")]
        texts = [end[len(before) :] for before, end in zip(["", *whole], whole, strict=False)]
        assert "".join(texts) == text
        assert parsed(known, texts, prompt).calls == parsed(known, [text], prompt).calls != []


@pytest.mark.parametrize("name", SOURCES)
@given(data=st.data())
def test_any_arguments_are_parsed_back_however_they_are_cut(name: str, data: st.DataObject) -> None:
    given_arguments = data.draw(arguments.filter(lambda found: can_be_written(name, found)))
    prompt, text = rendered(name, turn(("search_2", given_arguments)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    cut = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found, whole = parsed(format_named(name), cut, prompt), parsed(format_named(name), [text], prompt)
    assert (found.calls, found.content, found.reasoning) == (whole.calls, whole.content, whole.reasoning)
    assert found.values == [("search_2", given_arguments)]
    assert found.content == ""


@pytest.mark.parametrize("name", STREAMED)
def test_arguments_in_json_come_as_they_are_written(name: str) -> None:
    """Each character that belongs to the arguments is passed on with the piece that holds it."""
    prompt, text = rendered(name, turn(("search_2", {"city": "a long name", "count": 5})))
    parser = AnswerParser(format_named(name), TOOLS, prompt)
    start, end = text.index('{"city"'), text.index("5}") + 2
    for at, letter in enumerate(text):
        streamed = "".join(part.text for part in parser.push(letter) if isinstance(part, ToolCallArguments))
        assert streamed == (letter if start <= at < end else "")


@pytest.mark.parametrize("name", WHOLE)
def test_arguments_of_tags_come_when_the_call_is_whole(name: str) -> None:
    prompt, text = rendered(name, turn(("search_2", {"city": "a long name", "count": 5})))
    parser = AnswerParser(format_named(name), TOOLS, prompt)
    parts = [part for letter in text for part in parser.push(letter)] + parser.finish()
    begin, whole = parts
    assert isinstance(begin, ToolCallBegin)
    assert isinstance(whole, ToolCallArguments)
    assert json.loads(whole.text) == {"city": "a long name", "count": 5}


@pytest.mark.parametrize(("name", "model_type"), [("qwen3", "qwen3"), ("qwen3_5", "qwen3_5"), ("gemma4", "gemma4")])
def test_parts_are_those_of_transformers(name: str, model_type: str) -> None:
    """For texts without what transformers' templates cannot parse."""
    shipped = next(found for types, found in _RESPONSE_TEMPLATE_FALLBACKS.items() if model_type in types)
    calls = [("search_2", {"city": "Bern", "count": 3, "share": 0.5, "items": [1, "b"], "limits": {"k": True}})] * 2
    prompt, text = rendered(name, turn(*calls, thoughts="Two calls."))
    theirs = parse_response(text, shipped, prefix=prompt, tools=TOOLS)
    found = parsed(format_named(name), [text], prompt)
    assert found.values == [(one["function"]["name"], one["function"]["arguments"]) for one in theirs["tool_calls"]]
    assert found.reasoning == theirs["reasoning_content"].strip("\n")
    assert found.content == theirs.get("content", "").strip()


def test_a_call_of_the_longest_name_is_read_in_every_family() -> None:
    name = "x" * 128
    tool = {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for family in SOURCES:
        prompt, text = rendered(family, turn((name, {"city": "Oslo"})))
        found = parsed(format_named(family), [text], prompt, [tool])
        assert found.values == [(name, {"city": "Oslo"})], family
