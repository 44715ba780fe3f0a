"""Text that is no call becomes content, without an exception and without a lost character, in linear time."""

import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import in_case
from support.tool_texts import SOURCES, STREAMED, format_named, parsed, pieces, rendered, turn

from graphcore.serving.tool_formats.families import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GEMMA4,
    GLM4,
    GLM45,
    GPT_OSS,
    GRANITE3,
    HERMES,
    LFM2,
    LLAMA3,
    MISTRAL_LIST,
    MISTRAL_NAMED,
    OLMO3,
    QWEN_XML,
    tool_format_of,
)

CALL = '{"name": "search_2", "arguments": {"city": "x"}}'
XML = "<function=search_2>\n<parameter=city>\nx\n</parameter>\n"
V3_CALL = "<\uff5ctool\u2581call\u2581begin\uff5c>"
BROKEN = [
    (HERMES, "Tags like <tool_call> open one."),
    (HERMES, "<tool_call>"),
    (HERMES, "<tool_call>\n{"),
    (HERMES, "<tool_call>[]</tool_call>"),
    (HERMES, "<tool_call>\n{}\n</tool_call>"),
    (HERMES, '<tool_call>\n{"name": "nobody", "arguments": {}}\n</tool_call>'),
    (HERMES, '<tool_call>\n{"name": 5, "arguments": {}}\n</tool_call>'),
    (HERMES, '<tool_call>\n{"name": "search_2", "arguments": [1]}\n</tool_call>'),
    (HERMES, '<tool_call>\n{"name": "search_2", "arguments": "{x}"}\n</tool_call>'),
    (HERMES, '<tool_call>\n{"name": "search_2", "why": 1}\n</tool_call>'),
    (HERMES, '<tool_call>\n{"name": "search_2" "arguments": {}}\n</tool_call>'),
    (HERMES, '<tool_call>\n{"arguments": {"city": 01}, "name": "search_2"}\n</tool_call>'),
    (HERMES, '<tool_call>\n{"name": "search_2", "arg'),
    (QWEN_XML, "<tool_call>\n<function=nobody>\n</function>\n</tool_call>"),
    (QWEN_XML, "<tool_call>\n<function=search_2\n</function>\n</tool_call>"),
    (QWEN_XML, f"<tool_call>\n{XML}or so</function>\n</tool_call>"),
    (QWEN_XML, f"<tool_call>\n{XML[:-16]} and no end"),
    (LLAMA3, '{"answer": {"name": "search_2", "parameters": {}}}'),
    (LLAMA3, '{"name": "nobody", "parameters": {}}'),
    (LLAMA3, 'So: {"name": "search_2", "parameters": {}}'),
    (LLAMA3, "<|python_tag|>search_2(city='x')"),
    (GEMMA4, "<|tool_call>call:nobody{}<tool_call|>"),
    (GEMMA4, "<|tool_call>call:search_2{city}<tool_call|>"),
    (GEMMA4, "<|tool_call>call:search_2{city:}<tool_call|>"),
    (GEMMA4, '<|tool_call>call:search_2{city:<|"|>x<|"|>]<tool_call|>'),
    (GEMMA4, '<|tool_call>call:search_2{count:<|"|>x'),
    (GEMMA4, "<|tool_call>call:search_2" + "{a:" * 150),
    (MISTRAL_LIST, "[TOOL_CALLS] [] "),
    (MISTRAL_LIST, '[TOOL_CALLS] [{"name": "nobody", "arguments": {}}]'),
    (MISTRAL_LIST, "[TOOL_CALLS]search_2[ARGS]{}"),
    (MISTRAL_NAMED, "[TOOL_CALLS]nobody[ARGS]{}"),
    (MISTRAL_NAMED, "[TOOL_CALLS]search_2[CALL_ID]abc[ARGS]{}"),
    (MISTRAL_NAMED, "[TOOL_CALLS]search_2[ARGS][1]"),
    (MISTRAL_NAMED, f"[TOOL_CALLS]{'s' * 150}[ARGS]{{}}"),
    (LFM2, "<|tool_call_start|>[nobody()]<|tool_call_end|>"),
    (LFM2, "<|tool_call_start|>[search_2(city='x'), nobody()]<|tool_call_end|>"),
    (LFM2, "<|tool_call_start|>[search_2('x')]<|tool_call_end|>"),
    (LFM2, "<|tool_call_start|>[search_2(count=1 + 1)]<|tool_call_end|>"),
    (LFM2, "<|tool_call_start|>[search_2(count=0x1F)]<|tool_call_end|>"),
    (LFM2, "<|tool_call_start|>[search_2(city=Bern)]<|tool_call_end|>"),
    (LFM2, "<|tool_call_start|>[search_2(limits={1: 2})]<|tool_call_end|>"),
    (LFM2, "<|tool_call_start|>[search_2(share=inf)]<|tool_call_end|>"),
    (LFM2, f"<|tool_call_start|>[search_2(items={'[' * 150}{']' * 150})]<|tool_call_end|>"),
    (LFM2, "<|tool_call_start|>[search_2(city='x"),
    (LFM2, "<|tool_call_start|>[]<|tool_call_end|>"),
    (OLMO3, "<function_calls>search_2(city='x'</function_calls>"),
    (GLM4, "nobody\n{}"),
    (GLM4, "search_2 {}"),
    (GLM4, "search_2\n[1]"),
    (GLM4, "search_2"),
    (GLM45, "<tool_call>nobody\n</tool_call>"),
    (GLM45, "<tool_call>search_2\n<arg_key>city</arg_key>\nx</arg_value>\n</tool_call>"),
    (GLM45, "<tool_call>search_2\n<arg_key>city</arg_key>\n<arg_value>x</arg_value>\nor so</tool_call>"),
    (GLM45, "<tool_call>search_2 or so\n</tool_call>"),
    (GRANITE3, '<|tool_call|>[{"name": "nobody", "arguments": {}}]'),
    (DEEPSEEK_V31, f"{V3_CALL}nobody<\uff5ctool\u2581sep\uff5c>{{}}"),
    (DEEPSEEK_V3, f"{V3_CALL}function<\uff5ctool\u2581sep\uff5c>search_2\n{{}}"),
    (GPT_OSS, "<|channel|>commentary to=python<|message|>print(1)"),
    (GPT_OSS, "<|channel|>commentary to=functions.nobody<|message|>{}"),
    (GPT_OSS, "<|channel|>commentary to=functions.search_2 <|constrain|>json<|message|>[]"),
    (GPT_OSS, "<|channel|>commentary to=functions.sear"),
]
LIMIT = 1.0  # seconds of processor time for 60,000 characters
LONG = [
    *(
        " ",
        "<",
        "x",
        "\\",
        '"',
        "[",
        "{",
        "9",
        "</parameter>",
        " </parameter>\n",
        "<tool_call>",
        "<tool_call>{",
        "</think>",
    ),
    *(
        "<think>",
        "<tool_call><function=search_2><parameter=city>",
        "<|tool_call>call:search_2{",
        "<|channel|>",
        "<|call|>",
    ),
    *(
        "<|im_end|>",
        "<|start|>assistant",
        '{"name": "search_2", "parameters": {',
        '<|"|>',
        "<|tool_call>call:search_2{[[",
    ),
    *(
        "```\n",
        "`",
        "\n<parameter=count>\n",
        "\n</function>\n",
        "\n</tool_call>\n",
        "<function=search_2>",
        '"a" b,',
        "'a' b",
    ),
    *(
        'x<|"|>,',
        'count:x<|"|>,',
        "city:'",
        "</parameter></function></tool_call>",
        "\n<tool_call>\n<function=search_2>\n",
    ),
    *("</function_calls>", "</arg_value>", "[TOOL_CALLS]", "'", "')", "', city='", "search_2\n{", "search_2("),
]
OPENED = {
    "qwen3": [
        "",
        "<think>",
        "```\n",
        '<think>\n<tool_call>{"name": "search_2", "arguments": {"city": "',
        '<tool_call>{"name": "search_2", "arguments": {"city": "',
    ],
    "qwen3_5": [
        "",
        "<think>\n<tool_call>\n<function=search_2>\n<parameter=city>\n",
        "<tool_call><function=search_2><parameter=city>",
    ],
    "gemma4": [
        "",
        "<|channel>thought\n<|tool_call>call:search_2{city:",
        '<|tool_call>call:search_2{city:<|"|>',
        "<|tool_call>call:search_2{items:[",
    ],
    "llama3": ["", '{"parameters": {"city": '],
    "gpt_oss": ["", "<|channel|>commentary to=functions.search_2<|message|>{"],
    "mistral_list": ["", '[TOOL_CALLS] [{"name": "search_2", "arguments": {"city": "'],
    "mistral_named": ["", "[TOOL_CALLS]", "[TOOL_CALLS]search_2[ARGS]{"],
    "lfm2": ["", "<|tool_call_start|>[search_2(city='", "<|tool_call_start|>[search_2(items=["],
    "olmo3": ["", "<function_calls>search_2(city='"],
    "glm4": ["", "search_2\n", "search_2\n{"],
    "glm45": ["", "<tool_call>search_2\n<arg_key>city</arg_key>\n<arg_value>", "<tool_call>search_2\n<arg_key>"],
}


def test_a_broken_call_is_content() -> None:
    for (known, text), size in product(BROKEN, [1, 2, 5, 10_000]):
        with in_case(size, known.name, text):
            for before in ["", "Look:\n\n"] if known not in (LLAMA3, GPT_OSS, GLM4) else [""]:
                found = parsed(known, pieces(before + text, size))
                assert found.calls == []
                assert found.content == before + text


def test_what_follows_arguments_that_break_is_content() -> None:
    cases = [
        ('{"name": "search_2", "arguments": {"a": tru}}\n</tool_call>', '{"a": tru', "}}\n</tool_call>"),
        (CALL[:-1] + ", 5}</tool_call>", '{"city": "x"}', ", 5}</tool_call>"),
        (CALL[:-1] + ', "arguments": {}}', '{"city": "x"}', ', "arguments": {}}'),
        (CALL + "\n\nBye </tool", '{"city": "x"}', "\n\nBye </tool"),
        (CALL[:-4], '{"city": "', ""),
        (CALL + "\n</tool", '{"city": "x"}', ""),
        (CALL, '{"city": "x"}', ""),
    ]
    for (text, arguments, content), size in product(cases, [1, 2, 5, 10_000]):
        with in_case(size, text, arguments, content):
            found = parsed(HERMES, pieces("<tool_call>\n" + text, size))
            assert found.calls == [("search_2", arguments)]
            assert found.content == content


def test_other_forms_of_a_call_in_json_are_calls() -> None:
    cases = [
        ('{"arguments": {"city": "x"}, "name": "search_2"}', '{"city": "x"}'),
        ('{"name": "search_2", "parameters": {"city": "x"}}', '{"city": "x"}'),
        ('{"name": "search_2", "arguments": "{\\"city\\": \\"x\\"}"}', '{"city": "x"}'),
        ('{"name": "search_2", "arguments": null}', "{}"),
        ('{"name": "search_2"}', "{}"),
        ('{"type": "function", "id": 5, "name": "search_2", "arguments": {}}', "{}"),
        ('[{"name": "search_2", "arguments": {}}]', "{}"),
    ]
    for size, (text, arguments) in product([1, 10_000], cases):
        with in_case(text, arguments, size):
            found = parsed(HERMES, pieces(f"<tool_call>{text}</tool_call>", size))
            assert (found.calls, found.content) == ([("search_2", arguments)], "")


def test_a_list_of_calls_is_parallel_calls() -> None:
    found = parsed(HERMES, pieces(f"<tool_call>[{CALL}, {CALL}]</tool_call>\n<tool_call>{CALL}</tool_call>", 3))
    assert found.values == [("search_2", {"city": "x"})] * 3
    assert found.content == ""


def test_a_second_call_is_content_where_a_family_makes_one() -> None:
    found = parsed(LLAMA3, [f"<|python_tag|>{CALL}<|python_tag|>{CALL}"])
    assert found.calls == [("search_2", '{"city": "x"}')]
    assert found.content == "<|python_tag|>" + CALL


@pytest.mark.parametrize("name", SOURCES)
def test_without_tools_every_call_is_content(name: str) -> None:
    prompt, text = rendered(name, turn(("search_2", {"city": "x"})))
    for size in (1, 10_000):
        found = parsed(format_named(name), pieces(text, size), prompt, tools=())
        assert found.calls == []
        assert "search_2" in found.content


@pytest.mark.parametrize("name", SOURCES)
def test_an_answer_may_be_cut_off_anywhere(name: str) -> None:
    """No character is lost: what is cut off is a call's arguments so far, or content."""
    prompt, text = rendered(name, turn(("search_2", {"city": "x y", "count": 12})))
    for end in range(len(text)):
        found = parsed(format_named(name), pieces(text[:end], 1), prompt)
        whole = parsed(format_named(name), [text[:end]], prompt)
        assert (found.calls, found.content) == (whole.calls, whole.content)
        if (
            name not in (*STREAMED, "glm45") and not found.calls
        ):  # the template of GLM 4.5 writes that it has no thoughts
            assert found.content.rstrip() == text[:end].rstrip()


@pytest.mark.parametrize("name", SOURCES)
@given(data=st.data())
def test_any_text_is_parsed_alike_however_it_is_cut(name: str, data: st.DataObject) -> None:
    known = format_named(name)
    words = [*LONG, *known.controls, known.call_open, known.call_close, known.reasoning_open, known.reasoning_close]
    words += [
        CALL,
        "}",
        ",",
        ":",
        "]",
        "<function=search_2>",
        "</function>",
        "<parameter=city>",
        "call:search_2{",
        "\n",
    ]
    words += ["```\n", "`", "\n</function>\n", "\n</tool_call>\n", "\n<parameter=count>\n5", '"', "city:'x'"]
    words += ["[ARGS]", "search_2(", "city='", "')", "search_2\n", "<arg_key>", "</arg_key><arg_value>", "</arg_value>"]
    words += ["<|message|>", "<|channel|>analysis", "<|channel|>commentary to=functions.search_2", "city:", "null"]
    text = "".join(data.draw(st.lists(st.sampled_from([word for word in words if word]), max_size=12)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    cut = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    one, other, third = (parsed(known, texts) for texts in (cut, [text], list(text)))
    for found in (one, third):
        assert (found.calls, found.content, found.reasoning) == (other.calls, other.content, other.reasoning)


def first_in_ci(words: Iterable[str]) -> list[Any]:
    return [pytest.param(word, marks=pytest.mark.slow if at else ()) for at, word in enumerate(words)]


@pytest.mark.thorough
@pytest.mark.parametrize("word", first_in_ci(LONG))
@pytest.mark.parametrize("name", OPENED)
def test_a_long_text_takes_time_in_proportion(name: str, word: str) -> None:
    known = format_named(name)
    for opened in OPENED[name]:
        text = opened + word * (60_000 // len(word))
        started = time.process_time()
        parsed(known, [text])
        assert time.process_time() - started < LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("word", first_in_ci(["<", " ", "</parameter> ", "<tool_call>", '<|"|>']))
@pytest.mark.parametrize("name", OPENED)
def test_a_long_text_in_single_characters_takes_time_in_proportion(name: str, word: str) -> None:
    text = OPENED[name][-1] + word * (20_000 // len(word))
    started = time.process_time()
    parsed(format_named(name), list(text))
    assert time.process_time() - started < LIMIT


@pytest.mark.parametrize("size", [1, 2, 5, 10_000])
def test_white_space_around_calls_is_left_out_but_not_between_texts(size: int) -> None:
    text = f"Look:\n\n<tool_call>\n{CALL}\n</tool_call>\n\n<tool_call>{CALL}</tool_call>\n Done.\n"
    found = parsed(HERMES, pieces(text, size))
    assert found.values == [("search_2", {"city": "x"})] * 2
    assert found.content == "Look:\n Done.\n"


def test_an_end_token_within_a_call_is_no_part_of_it() -> None:
    cases = [
        (HERMES, '<tool_call>{"name": "search_2", "arguments": {"city": "x<|im_end|>', '{"city": "x', ""),
        (HERMES, '<tool_call>{"name": "search_2"<|im_end|>', None, '<tool_call>{"name": "search_2"'),
        (QWEN_XML, f"<tool_call>\n{XML[:-13]}<|im_end|>", None, f"<tool_call>\n{XML[:-13]}"),
        (GEMMA4, '<|tool_call>call:search_2{city:<|"|>x<turn|>', None, '<|tool_call>call:search_2{city:<|"|>x'),
        (GPT_OSS, '<|channel|>commentary to=functions.search_2<|message|>{"city": "x<|call|>', '{"city": "x', ""),
    ]
    for (known, text, arguments, content), size in product(cases, [1, 2, 5, 10_000]):
        with in_case(size, known.name, text, arguments, content):
            found = parsed(known, pieces(text, size))
            assert found.calls == ([] if arguments is None else [("search_2", arguments)])
            assert found.content == content


def test_an_object_that_continues_a_text_is_no_call() -> None:
    header, call = "<|start_header_id|>assistant<|end_header_id|>\n\n", '{"name": "search_2", "parameters": {}}'
    assert parsed(LLAMA3, [call], header).calls == [("search_2", "{}")]
    assert parsed(LLAMA3, [call], header + "So: ").content == call


def test_values_of_python_are_read() -> None:
    cases = [
        ("city='it's 5', count=1", {"city": "it's 5", "count": 1}),
        ("city='a', b', count=1", {"city": "a', b", "count": 1}),
        ('city="say \\"hi\\"\\n\\u00e9\\x41"', {"city": 'say "hi"\n\u00e9A'}),
        ("city='x',", {"city": "x"}),
        ("city = 'x' , exact = True", {"city": "x", "exact": True}),
        ("city='x', none=None, exact=false", {"city": "x", "none": None, "exact": False}),
        ("city='x', count=+1_000, share=.5", {"city": "x", "count": 1000, "share": 0.5}),
        ("city='x', count=07, share=-1e3", {"city": "x", "count": 7, "share": -1000.0}),
        (
            "city='x', items=[1, ('a', \"b'c\"), {'k': [0]},]",
            {"city": "x", "items": [1, ["a", "b'c"], {"k": [0]}]},
        ),
        ("city='</function_calls>'", {"city": "</function_calls>"}),
        ("city='\\ud83c\\udf0d'", {"city": "\U0001f30d"}),
    ]
    for (text, arguments), size in product(cases, [1, 2, 5, 10_000]):
        with in_case(size, text, arguments):
            found = parsed(OLMO3, pieces(f"<function_calls>\nsearch_2({text})\n</function_calls>", size))
            assert found.values == [("search_2", arguments)]
            assert found.content == ""


def test_a_call_of_python_needs_no_closing_tag_at_the_end() -> None:
    found = parsed(LFM2, ["<|tool_call_start|>[search_2(city='x')]<|im_end|>"])
    assert found.values == [("search_2", {"city": "x"})]
    assert parsed(LFM2, ["<|tool_call_start|>[search_2(city='x'), sear"]).calls == []


def test_one_call_of_a_list_is_read_where_a_request_asks_for_one() -> None:
    two = '[TOOL_CALLS] [{"name": "search_2", "arguments": {}}, {"name": "search_2", "arguments": {}}]'
    found = parsed(replace(MISTRAL_LIST, is_parallel=False), pieces(two, 3))
    assert found.calls == [("search_2", "{}")]
    assert found.content == ', {"name": "search_2", "arguments": {}}]'


@pytest.mark.parametrize("size", [1, 10_000])
def test_other_openings_and_ids_of_calls_are_read(size: int) -> None:
    known = replace(MISTRAL_NAMED, id_open="[CALL_ID]")
    for middle in ("", "[CALL_ID]abcdef123"):
        text = f"[TOOL_CALLS]search_2{middle}[ARGS]{{}}[TOOL_CALLS]clock.now-utc{middle}[ARGS] {{}}</s>"
        assert parsed(known, pieces(text, size)).calls == [("search_2", "{}"), ("clock.now-utc", "{}")]
    text = f"<tool_call>[{CALL}]<|end_of_text|>"
    assert parsed(GRANITE3, pieces(text, size)).values == [("search_2", {"city": "x"})]


@pytest.mark.parametrize("size", [1, 10_000])
def test_a_call_of_glm_4_begins_an_answer(size: int) -> None:
    prompt = "<|user|>\nsearch_2\n{}<|assistant|>"
    for before in ("", "\n"):
        found = parsed(GLM4, pieces(before + 'search_2 \n{"city": "x"}<|observation|>', size), prompt)
        assert (found.values, found.content) == ([("search_2", {"city": "x"})], "")
    assert parsed(GLM4, pieces("\nHi.\nsearch_2\n{}", size), prompt).content == "Hi.\nsearch_2\n{}"
    thinking = tool_format_of(SOURCES["glm4"] + "{# </think> #}", "")
    found = parsed(thinking, pieces("Hm.\n</think>\nsearch_2\n{}", size), prompt + "\n<think>")
    assert (found.reasoning, found.calls, found.content) == ("Hm.", [("search_2", "{}")], "")
