"""Calls that models damage, in quotations and in thoughts, and stop strings: what is a call, and with which arguments.

Each answer is parsed whole, character by character and in random pieces, with the same events.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tool_texts import PARAMETERS, SOURCES, SPECIAL, TOOLS, format_named, rendered, turn
from test_rendered_calls import arguments, texts_in

from graphcore.serving.chat_call import Content, Part, Reasoning, ToolCallArguments, ToolCallBegin
from graphcore.serving.tool_formats.answer_parser import AnswerParser, AnswerStops, split_stops
from graphcore.serving.tool_formats.families import (
    DEEPSEEK_V3,
    GEMMA4,
    GLM45,
    GLM47,
    GPT_OSS,
    GRANITE3,
    HERMES,
    LFM2,
    LLAMA3,
    MISTRAL_LIST,
    QWEN_XML,
    tool_format_of,
)
from graphcore.serving.tool_formats.tool_format import ToolFormat

QUOTE = '<|"|>'
Events = list[tuple[str, str]]


def events_of(parts: Sequence[Part]) -> Events:
    """Return parts in their order, neighbouring pieces of one text as one."""
    found: Events = []
    for part in parts:
        match part:
            case ToolCallBegin(name=name):
                found.append(("call", name))
            case Reasoning(text=text) | Content(text=text) | ToolCallArguments(text=text):
                kind = type(part).__name__
                if found and found[-1][0] == kind:
                    found[-1] = kind, found[-1][1] + text
                else:
                    found.append((kind, text))
            case _:
                raise AssertionError(part)
    return found


def cut_at_random(text: str, seed: int) -> list[str]:
    generator = random.Random(f"{seed} {text}")
    cuts = sorted(generator.randint(0, len(text)) for _ in range(generator.randint(1, 8)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def read(
    known: ToolFormat, text: str, prompt: str = "", stops: Sequence[str] = (), is_cut: bool = False, **more: Any
) -> tuple[Events, AnswerParser]:
    """Return the events of an answer, which are the same however its text is cut, and its parser."""
    found: list[tuple[Events, AnswerParser]] = []
    for pieces in ([text], list(text), *(cut_at_random(text, seed) for seed in range(3))):
        parser = AnswerParser(known, TOOLS, prompt, stops=stops, **more)
        parts = [part for piece in pieces for part in parser.push(piece)]
        found.append((events_of([*parts, *parser.finish(is_cut)]), parser))
    for events, parser in found:
        assert events == found[0][0], text
        assert parser.stopped_by == found[0][1].stopped_by, text
    return found[0]


def in_short(events: Events) -> tuple[list[tuple[str, Any]], str, str]:
    """Return calls with their arguments as values, the content and the thoughts."""
    texts = {kind: "".join(text for one, text in events if one == kind) for kind in ("Content", "Reasoning")}
    calls = [(name, json.loads(events[at + 1][1])) for at, (kind, name) in enumerate(events) if kind == "call"]
    return calls, texts["Content"], texts["Reasoning"]


def xml(*members: str, end: str = "</function>\n</tool_call>", name: str = "search_2") -> str:
    return f"<tool_call>\n<function={name}>\n{''.join(members)}{end}"


CITY, COUNT = "<parameter=city>\nx\n</parameter>\n", "<parameter=count>\n5\n</parameter>\n"
OPEN_CITY = "<parameter=city>\nx\n"
X, BOTH = {"city": "x"}, {"city": "x", "count": 5}
CALL = '{"name": "search_2", "arguments": {"city": "x"}}'
GLM = "<tool_call>search_2\n<arg_key>city</arg_key>\n<arg_value>x"

# Of each damaged answer: the arguments of its calls of search_2, and its content. None: all of it is content.
DAMAGED: list[tuple[ToolFormat, str, list[Any], str | None]] = [
    # tags in tags that are left out
    (QWEN_XML, xml(OPEN_CITY, COUNT), [BOTH], ""),
    (QWEN_XML, xml("<parameter=city>x\n", COUNT), [BOTH], ""),
    (QWEN_XML, xml("<parameter=city>\nx\n  ", COUNT), [BOTH], ""),
    (QWEN_XML, xml("<parameter=city>\n\n", COUNT), [{"city": "", "count": 5}], ""),
    (QWEN_XML, xml(OPEN_CITY), [X], ""),
    (QWEN_XML, xml(CITY, end="</tool_call>"), [X], ""),
    (QWEN_XML, xml(OPEN_CITY, end="</tool_call>"), [X], ""),
    (QWEN_XML, xml(CITY, end="</function>"), [X], ""),
    (QWEN_XML, xml(CITY, end=""), [X], ""),
    (QWEN_XML, xml(OPEN_CITY, end="</function>"), [X], ""),
    (QWEN_XML, xml(OPEN_CITY, end="</function>\nDone."), [X], "\nDone."),
    (QWEN_XML, xml("<parameter=city>x", end="</function></tool_call>"), [X], ""),
    (QWEN_XML, xml(end="</tool_call>"), [{}], ""),
    (QWEN_XML, xml(CITY)[len("<tool_call>\n") :], [X], ""),
    (QWEN_XML, "So:\n" + xml(CITY, end="</function>")[len("<tool_call>\n") :] + "\nDone.", [X], "So:\nDone."),
    (QWEN_XML, (xml(CITY, end="</function>\n") * 2).replace("<tool_call>\n", ""), [X, X], ""),
    # with another call behind
    (QWEN_XML, xml(OPEN_CITY) + "\n" + xml(COUNT), [X, {"count": 5}], ""),
    (QWEN_XML, xml(CITY, end="</tool_call>\n") + xml(COUNT), [X, {"count": 5}], ""),
    (QWEN_XML, xml(OPEN_CITY, end="</tool_call>\n") + xml(COUNT), [X, {"count": 5}], ""),
    (QWEN_XML, xml(CITY, end="</function>\n") + xml(COUNT), [X, {"count": 5}], ""),
    (QWEN_XML, xml(OPEN_CITY, end="") + xml(name="clock.now-utc"), [], None),  # where the first ends, nobody can say
    # what is no damage: tags of a value's own
    (
        QWEN_XML,
        xml("<parameter=city>\na\n<parameter=town>\nb\n</parameter>\n"),
        [{"city": "a\n<parameter=town>\nb"}],
        "",
    ),
    (
        QWEN_XML,
        xml("<parameter=city>\na\n<parameter=city>\nb\n</parameter>\n"),
        [{"city": "a\n<parameter=city>\nb"}],
        "",
    ),
    (QWEN_XML, xml("<parameter=city>\na <parameter=count>\n</parameter>\n"), [{"city": "a <parameter=count>"}], ""),
    (QWEN_XML, xml("<parameter=city>\na\n</function>\nb\n</parameter>\n"), [{"city": "a\n</function>\nb"}], ""),
    (QWEN_XML, xml("<parameter=city>\na\n</tool_call>\nb\n</parameter>\n"), [{"city": "a\n</tool_call>\nb"}], ""),
    (QWEN_XML, xml("<parameter=city>\nif </parameter> x:\n</parameter>\n"), [{"city": "if </parameter> x:"}], ""),
    # what is none, or not whole
    (QWEN_XML, xml(OPEN_CITY, end=""), [], None),
    (QWEN_XML, xml(CITY, "or so", end="</function>\n</tool_call>"), [], None),
    (QWEN_XML, "<function=nobody>\n" + CITY + "</function>", [], None),
    (QWEN_XML, "See <function=search_2>\n" + CITY + "</function>", [], None),
    # Python's literals, where the schema says array or object
    (
        QWEN_XML,
        xml("<parameter=items>\n['a, b', \"it's\", True]\n</parameter>\n"),
        [{"items": ["a, b", "it's", True]}],
        "",
    ),
    (
        QWEN_XML,
        xml("<parameter=limits>\n{'k': None, \"l\": [1,]}\n</parameter>\n"),
        [{"limits": {"k": None, "l": [1]}}],
        "",
    ),
    (QWEN_XML, xml("<parameter=city>\n['a']\n</parameter>\n"), [{"city": "['a']"}], ""),
    (QWEN_XML, xml("<parameter=items>\n['a', b]\n</parameter>\n"), [{"items": "['a', b]"}], ""),
    (
        GLM45,
        GLM.replace("city", "items").replace(">x", ">['a']") + "</arg_value>\n</tool_call>",
        [{"items": ["a"]}],
        "",
    ),
    # numbers and words are what the schema says; other texts stay texts
    (QWEN_XML, xml("<parameter=exact>\nTrue\n</parameter>\n"), [{"exact": True}], ""),
    (QWEN_XML, xml('<parameter=count>\n"5"\n</parameter>\n'), [{"count": '"5"'}], ""),
    # GLM's tags
    (GLM45, GLM + "\n<arg_key>count</arg_key>\n<arg_value>5</arg_value>\n</tool_call>", [BOTH], ""),
    (GLM45, GLM + "</arg_value>", [X], ""),
    (GLM45, GLM + "\n</tool_call>", [X], ""),
    (GLM45, GLM + "</tool_call>", [X], ""),
    (GLM45, GLM + "\n</tool_call>\n" + GLM + "</arg_value>\n</tool_call>", [X, X], ""),
    (
        GLM45,
        GLM + "\n<arg_key>town</arg_key>\n</arg_value>\n</tool_call>",
        [{"city": "x\n<arg_key>town</arg_key>\n"}],
        "",
    ),
    (GLM45, GLM, [], None),
    (GLM47, GLM.replace("\n", "") + "<arg_key>count</arg_key><arg_value>5</arg_value></tool_call>", [BOTH], ""),
    # a call in JSON needs no closing tag, before another one, either
    (HERMES, f"<tool_call>{CALL}", [X], ""),
    (HERMES, f"<tool_call>{CALL}\n<tool_call>\n{CALL}\n</tool_call>", [X, X], ""),
    (HERMES, f"<tool_call> \n\n {CALL}   \n </tool_call> \n", [X], ""),
    (HERMES, f"<tool_call>{CALL[:-1]}</tool_call>", [X], "</tool_call>"),
    (MISTRAL_LIST, f"[TOOL_CALLS] [{CALL}", [X], ""),
    (GRANITE3, f"<|tool_call|>[{CALL}", [X], ""),
    # ... and is JSON; numbers in quotes stay texts
    (HERMES, "<tool_call>{'name': 'search_2', 'arguments': {'city': 'x'}}</tool_call>", [], None),
    (HERMES, '<tool_call>{"name": "search_2", "arguments": {"count": "5"}}</tool_call>', [{"count": "5"}], ""),
    (
        HERMES,
        '<tool_call>{"name": "search_2", "arguments": {"city": "\\u00fc</tool_call>}"}}',
        [{"city": "\u00fc</tool_call>}"}],
        "",
    ),
    (LLAMA3, "{'name': 'search_2', 'parameters': {}}", [], None),
    (DEEPSEEK_V3, DEEPSEEK_V3.call_open + 'search_2\n```json\n{"city": "x"}\n```', [X], ""),
    # a list of Python's calls ends with its bracket
    (LFM2, "<|tool_call_start|>[search_2(city='x')", [], None),
]
GEMMA: list[tuple[str, Any]] = [
    ('items:["a, b","c"]', {"items": ["a, b", "c"]}),
    ("items:['a, b', 'c}']", {"items": ["a, b", "c}"]}),
    ('"city":"x","count":5', BOTH),
    ("'city': 'x', 'count': 5", BOTH),
    ('city:"{[}\\"\\n\\u00fc"', {"city": '{[}"\n\u00fc'}),
    ("city:'it\\'s'", {"city": "it's"}),
    ("city:'it's',count:5", {"city": "it's", "count": 5}),
    ('city:"say "hi", then",count:5', None),  # a quote within the text that looks like its end
    ('city:"say "hi" now",count:5', {"city": 'say "hi" now', "count": 5}),
    ("city:'tis so,count:5", {"city": "'tis so", "count": 5}),
    ('count:"5",exact:"true",none:"null"', {"count": 5, "exact": True, "none": None}),
    ('limits:{"k":"}",\'l\':[]}', {"limits": {"k": "}", "l": []}}),
    (f"city:x{QUOTE}", X),
    (f"city:Bern, {{old}} [town]{QUOTE},count:5", {"city": "Bern, {old} [town]", "count": 5}),
    (f"count:5,city:Bern, the town{QUOTE}", {"count": 5, "city": "Bern, the town"}),
    (f"items:[a, b{QUOTE},{QUOTE}c{QUOTE}],city:x{QUOTE}", {"items": ["a, b", "c"], "city": "x"}),
    (f"city:{QUOTE}a{QUOTE},none:null,items:[{QUOTE}b{QUOTE}]", {"city": "a", "none": None, "items": ["b"]}),
    (f"limits:{{k:{QUOTE}</b> \"c\" 'd'{QUOTE}}}", {"limits": {"k": "</b> \"c\" 'd'"}}),
    (f"count:x{QUOTE}y", None),
    ("city:Bern, the town", None),
    (f"city:{QUOTE}x,count:5", None),
    ("city:x,count", None),
]


def test_damaged_calls_are_read_as_far_as_they_are_clear() -> None:
    for known, text, expected, content in DAMAGED:
        calls, said, _ = in_short(read(known, text)[0])
        assert [given for _, given in calls] == expected, text
        assert said == (text if content is None else content), text


def test_quotes_of_other_languages_and_lone_ones_are_read_in_gemmas_calls() -> None:
    for body, expected in GEMMA:
        for close in ("}<tool_call|>", "}", "}<tool_call|><turn|>", "}<|tool_call>call:clock.now-utc{}<tool_call|>"):
            text = f"<|tool_call>call:search_2{{{body}{close}"
            calls, content, _ = in_short(read(GEMMA4, text)[0])
            calls = [call for call in calls if call[0] == "search_2"]
            if expected is None:
                assert calls == [], text
                assert content.startswith(f"<|tool_call>call:search_2{{{body}"), text
            else:
                assert (calls, content) == ([("search_2", expected)], ""), text


def test_an_answer_that_a_limit_cuts_off_is_not_completed() -> None:
    for known, text in [(QWEN_XML, xml(CITY, end="")), (QWEN_XML, xml(OPEN_CITY, end="</function>")), (GLM45, GLM)]:
        for tag in ("", "</arg_value>") if known is GLM45 else ("",):
            assert in_short(read(known, text + tag, is_cut=True)[0])[:2] == ([], text + tag)
    assert in_short(read(QWEN_XML, xml(CITY, end="</function>"), is_cut=True)[0])[0] == [("search_2", X)]


def test_a_quoted_call_is_text_unless_the_answer_ends_with_it() -> None:
    bare = xml(CITY, end="</function>")[len("<tool_call>\n") :]
    for known, call in [(QWEN_XML, xml(CITY)), (QWEN_XML, bare), (HERMES, f"<tool_call>\n{CALL}\n</tool_call>")]:
        for quoted in (f"So:\n```xml\n{call}\n```\n", f"~~~\n{call}\n{call}\n~~~\n", f"So: `{call}`"):
            if quoted.startswith("So: `") and call is bare:
                continue  # does not begin a line
            text = quoted + "\nThat is how."
            assert in_short(read(known, text)[0])[:2] == ([], text), text
            calls, content, _ = in_short(read(known, quoted)[0])
            assert {name for name, _ in calls} == {"search_2"}, quoted
            assert content.strip("So:\nxml`~ ") == "", quoted
        closed = f"```\ncode\n```\n{call}\nDone."
        assert in_short(read(known, closed)[0]) == ([("search_2", X)], "```\ncode\n```\nDone.", ""), closed
    marked = '<|tool_call>call:search_2{city:<|"|>x<|"|>}<tool_call|>'
    assert in_short(read(GEMMA4, f"```\n{marked}\n```\nSo.")[0])[0] == [("search_2", X)], "no model quotes a token"


THINKING = {
    name: format_named(name) for name in ("qwen3", "qwen3_5", "gemma4", "mistral_named", "glm45", "glm47", "lfm2")
}


def open_thoughts(name: str) -> str:
    known = THINKING[name]
    return known.turn_starts[0] + known.reasoning_open


def call_text(name: str, given_arguments: dict[str, Any]) -> str:
    """Return a call as the family's template writes it."""
    text = rendered(name, turn(("search_2", given_arguments)))[1]
    known = THINKING[name]
    return text[text.index(known.call_open) : len(text)].split("<|im_end|>")[0].split("<turn|>")[0].removesuffix("</s>")


@pytest.mark.thorough
@pytest.mark.parametrize("name", THINKING)
def test_a_call_in_thoughts_is_one_if_they_are_not_closed(name: str) -> None:
    known, prompt = THINKING[name], open_thoughts(name)
    call, other = (call_text(name, {"city": city}).removesuffix("<|tool_response>") for city in "xy")
    close = known.reasoning_close
    for text, cities, thoughts, content in [
        (f"I look.\n\n{call}", "x", "I look.", ""),
        (f"{call}", "x", "", ""),
        (f"First {call} or\n{other}\n", "y", f"First {call} or", ""),
        (f"I look: {call} and so on", "x", f"I look: {call} and so on", ""),
        (f"I look: {call}{close}Hi", "", f"I look: {call}", "Hi"),
        (f"I look: {call}{close}{other}", "y", f"I look: {call}", ""),
        (f"I look: {call[:-12]}{close}Hi", "", f"I look: {call[:-12]}", "Hi"),
        (f"I look: {known.call_open} opens.", "", f"I look: {known.call_open} opens.", ""),
        (f"I look: {call.replace('search_2', 'nobody')}", "", f"I look: {call.replace('search_2', 'nobody')}", ""),
    ]:
        events, parser = read(known, text, prompt)
        calls, said, thought = in_short(events)
        assert [given_arguments["city"] for _, given_arguments in calls] == list(cities), text
        assert (said, thought.rstrip()) == (content, thoughts.rstrip()), text
        assert parser.calls_in_thoughts == (len(cities) if close not in text else 0), text
        assert in_short(read(known, text, prompt, is_cut=True)[0])[0] == (calls if close in text else []), text
    if known.is_parallel:
        calls, _, _ = in_short(read(known, f"Both: {call}\n{other}", prompt)[0])
        assert [given_arguments["city"] for _, given_arguments in calls] == ["x", "y"]
        one = replace(known, is_parallel=False)
        assert len(in_short(read(one, f"Both: {call}\n{other}", prompt)[0])[0]) == 1


def test_a_call_of_gpt_oss_stands_in_no_thoughts() -> None:
    """Its header opens a message of its own, whatever was open before."""
    text = "I look.<|start|>assistant<|channel|>commentary to=functions.search_2<|message|>{}<|call|>"
    for opened in ("<|start|>assistant<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>final<|message|>"):
        calls, content, thoughts = in_short(read(GPT_OSS, text, opened)[0])
        assert (calls, content + thoughts) == ([("search_2", {})], "I look.")


THINK = tool_format_of(SOURCES["qwen3"], "", SPECIAL)
OPENED = "<|im_start|>assistant\n<think>\n"
HERMES_CALL = f"<tool_call>\n{CALL}\n</tool_call>"


def test_stop_strings_end_content_alone() -> None:
    """Of an answer: the stop strings, then the content, the thoughts, the number of calls and what has ended it."""
    analysis = "<|channel|>analysis<|message|>a.\n\nb<|end|><|start|>assistant<|channel|>final<|message|>"
    for known, prompt, text, stops, expected in [
        (THINK, OPENED, "a.\n\nb\n</think>\n\nc.\n\nd", ["\n\n"], ("c.", "a.\n\nb", 0, "\n\n")),
        (THINK, OPENED, "a.\n\nb", ["\n\n", "b"], ("", "a.\n\nb", 0, None)),
        (THINK, OPENED, "a</think>\n\n c", [" c"], (" c", "a", 0, None)),  # white space before it is none of it
        (THINK, OPENED, "a</think>\n\n c", ["c"], (" ", "a", 0, "c")),
        (THINK, OPENED, f"a</think>\n{HERMES_CALL}\nx", ["x"], ("", "a", 1, "x")),
        (THINK, OPENED, f"a</think>Hi\n\n{HERMES_CALL}", ['"city"', "name"], ("Hi", "a", 1, None)),
        (THINK, OPENED, f"a</think>Hi\n{HERMES_CALL}\n{HERMES_CALL}", ["\n\n", "}"], ("Hi", "a", 2, None)),
        (THINK, OPENED, f"a</think>Hi\n{HERMES_CALL}\n{HERMES_CALL}", ["i\n"], ("H", "a", 0, "i\n")),
        (THINK, OPENED, f"a\n{HERMES_CALL}", ["search"], ("", "a", 1, None)),  # it ends within its thoughts
        (THINK, OPENED, "a</think>Hi <tool_call> b.", ["b"], ("Hi <tool_call> ", "a", 0, "b")),
        (THINK, "<|im_start|>assistant\n", "One.\nTwo", ["\n", "wo"], ("One.", "", 0, "\n")),
        (THINK, "<|im_start|>assistant\n", "One, t", ["two", " th"], ("One, t", "", 0, None)),
        (GEMMA4, "<|turn>model\n", "<|channel>thought\na\nb<channel|>c\nd", ["\n"], ("c", "a\nb", 0, "\n")),
        (GPT_OSS, "<|start|>assistant", analysis + "c.\n\nd<|return|>", ["\n\n"], ("c.", "a.\n\nb", 0, "\n\n")),
        (GPT_OSS, "<|start|>assistant", analysis + "c.\n<|return|>", ["\n\n"], ("c.\n", "a.\n\nb", 0, None)),
        (QWEN_XML, "", "Hi\n" + xml("<parameter=city>\na\n\nb\n</parameter>\n"), ["\n\n", "<"], ("Hi", "", 1, None)),
        (QWEN_XML, "", "Hi\n\n" + xml(CITY), ["\n\n"], ("Hi", "", 0, "\n\n")),
    ]:
        events, parser = read(known, text, prompt, stops)
        calls, content, thoughts = in_short(events)
        assert (content, thoughts, len(calls), parser.stopped_by) == expected, (text, stops)


def test_the_engine_ends_a_text_where_its_parser_ends_the_content() -> None:
    """Both see the same pieces. Strings that spell a tag count everywhere, and `min_tokens` disarms all of them."""
    text = "a.\n\nb\n</think>\n\nc.\n\nd"
    for stops, passed, found in [
        (["\n\n"], len(text) - 1, "\n\n"),
        (["</think>"], text.index("</think>"), "</think>"),
        (["\n</think>\n", "b"], text.index("\n</think>"), "\n</think>\n"),
        (["a"], len(text), None),
    ]:
        own, spelt = split_stops(THINK, stops)
        for pieces in ([text], list(text), cut_at_random(text, 1)):
            condition = AnswerStops(AnswerParser(THINK, TOOLS, OPENED, stops=own), spelt)
            got = ""
            for piece in pieces:
                result = condition.push(piece)
                got += result.text
                if result.is_stopped:
                    break
            got += "" if condition.found else condition.flush()
            assert condition.found == found, stops
            assert got.startswith(text[:passed]), stops
            assert len(got) == passed or pieces != list(text), stops
    late = AnswerStops(AnswerParser(THINK, TOOLS, OPENED, stops=["c", "d"]), ["</think>"])
    for letter in text:
        late.is_armed = letter == "d"
        assert late.push(letter).is_stopped == (letter == "d")
    assert late.found == "d"


def test_a_text_under_a_grammar_has_no_calls() -> None:
    """The grammar lets the answer be calls, or a text of which all is content."""
    text = '{"say": "' + xml(CITY) + '"}'
    assert in_short(read(QWEN_XML, text, is_bound=True)[0]) == ([], text, "")
    assert in_short(read(QWEN_XML, "\n" + xml(CITY), is_bound=True)[0])[0] == [("search_2", X)]


TAGS = ("<parameter=", "</parameter>", "<function=", "</function>", "tool_call>", "arg_key>", "arg_value>")


def written(kind: str, text: str) -> str:
    return {"gemma": f"{QUOTE}{text}{QUOTE}", "json": json.dumps(text), "python": repr(text)}[kind]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "gemma4", "glm45", "glm47"])
@given(data=st.data())
def test_any_arguments_are_read_from_damaged_calls(name: str, data: st.DataObject) -> None:
    """What the family's template writes, without some of the tags that may be missing, in other quotes."""
    found = data.draw(arguments)
    texts = texts_in(found)
    known, has_call_behind = format_named(name), data.draw(st.booleans())
    calls = [("search_2", found), *([("clock.now-utc", {})] if has_call_behind else [])]
    if name != "qwen3" and any(tag in text for text in texts for tag in (*TAGS, QUOTE)):
        return
    prompt, text = rendered(name, turn(*calls))
    text = text.split("<|im_end|>")[0]
    drops = st.booleans()
    if name == "qwen3":
        text = "".join(
            part if data.draw(drops) else part.removesuffix("\n</tool_call>")
            for part in text.replace("\n</tool_call>", "\n</tool_call>\0").split("\0")
        )
    elif name == "gemma4":
        parts = text.split(QUOTE)
        for at in range(1, len(parts), 2):
            parts[at] = written(data.draw(st.sampled_from(["gemma", "json", "python"])), parts[at])
        text = "".join(parts)
        lone = f"city:{QUOTE}"
        city = found["city"]
        if city == city.strip() != "" and not set(city) & set(":,'\"[{") and data.draw(drops):
            text = text.replace(lone, "city:")
    else:
        close, end = ("\n</parameter>", "\n</function>") if name == "qwen3_5" else ("</arg_value>", "")
        if name == "qwen3_5":
            for key in ("items", "limits"):
                if key in found and data.draw(drops):
                    text = text.replace(
                        f"={key}>\n{json.dumps(found[key], ensure_ascii=False)}", f"={key}>\n{found[key]!r}"
                    )
        pieces = text.split(close)
        last = len(pieces) - 2  # the last value's
        text = pieces[0]
        for at, piece in enumerate(pieces[1:]):
            may_drop = piece.lstrip("\n").startswith(("<parameter=", "<arg_key>")) or (
                at == last and not has_call_behind
            )
            # without its tag a last newline could be GLM's own: glm45 writes one before the next tag, glm47 does not
            is_clear = name == "qwen3_5" or not pieces[at].endswith("\n")
            text += piece if may_drop and is_clear and data.draw(drops) else close + piece
        if end and not has_call_behind and data.draw(drops):
            text = text.replace(end, "")
        elif end and data.draw(drops):
            text = text.replace("<tool_call>\n", "").replace("\n</tool_call>", "")
    assert in_short(read(known, text, prompt)[0])[:2] == (calls, ""), text
    assert set(found) <= set(PARAMETERS["properties"])
