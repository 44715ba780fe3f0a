"""Grammars for calls: what templates render is allowed, what is no valid call is not; by llguidance itself."""

import json
from collections.abc import Mapping
from copy import deepcopy
from functools import cache, partial
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from support.cases import in_case
from support.tool_texts import (
    CLOCK,
    ENDS,
    PARALLEL,
    PARAMETERS,
    SEARCH,
    SILENT,
    THINKING,
    TOOLS,
    format_named,
    parsed,
    rendered,
    special_ids,
    tokenizer,
    tokenizer_text,
    turn,
)
from support.tool_texts import SOURCES as ALL
from test_rendered_calls import HARD, arguments, can_be_written, texts_in

from graphcore.errors import ConfigError
from graphcore.serving import answering
from graphcore.serving.chat_call import ChatCall
from graphcore.serving.tool_formats import tool_grammar as tool_grammar_module
from graphcore.serving.tool_formats.families import PLAIN, tool_format_of
from graphcore.serving.tool_formats.tool_grammar import TRIAL_SECONDS, answer_frame
from graphcore.serving.tool_formats.tool_grammar import tool_grammar as grammar_of_tools
from graphcore.tokenizer.grammar import GrammarMask, llguidance_source

pytestmark = pytest.mark.thorough

SOURCES = tuple(name for name in ALL if name != "lfm2")  # whose template quotes as no JSON does; see "lfm2_first"


def schema_problem(schema: Mapping[str, Any]) -> str:
    return LLMatcher.validate_grammar(llguidance_source("json_schema", schema))


tool_grammar = partial(grammar_of_tools, special_ids=special_ids(), schema_problem=schema_problem)


def strict(tool: dict[str, Any]) -> dict[str, Any]:
    changed = deepcopy(tool)
    changed["function"]["strict"] = True
    return changed


STRICT = [strict(SEARCH), strict(CLOCK)]


@cache
def llguidance_tokens() -> LLTokenizer:
    return LLTokenizer(tokenizer_text(), eos_token=[0])


def refused_at(grammar: str | None, text: str) -> str | None:
    """Return the text up to the first token that a grammar does not allow; None if it allows the whole answer."""
    assert grammar is not None
    matcher = LLMatcher(llguidance_tokens(), LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    ids = encoded(text)
    taken = matcher.try_consume_tokens(ids)
    return None if taken == len(ids) and matcher.is_accepting() else decoded(ids[:taken])


def encoded(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False).ids


def decoded(ids: list[int]) -> str:
    return tokenizer().decode(ids, skip_special_tokens=False)


def answer_of(name: str, said: dict[str, Any]) -> tuple[str, str]:
    """Return the prompt and the answer without its end token."""
    prompt, text = rendered(name, said)
    for end in ENDS:
        text = text.removesuffix(end)
    return prompt, text


def test_a_rendered_call_is_allowed() -> None:
    for name, choice in product(SOURCES, ["auto", "required"]):
        with in_case(choice, name):
            hard = {**HARD, "city": HARD["city"].replace("<|im_start|>", "")}  # would be a special token in this test
            for said in [
                turn(("search_2", {**hard, "limits": {}})),
                turn(("search_2", hard)),
                turn(("clock.now-utc", {})),
            ]:
                if name == "qwen3_5" and "</parameter>" in str(said):
                    continue  # a value in tags ends at the tag
                prompt, text = answer_of(name, said)
                assert refused_at(tool_grammar(format_named(name), STRICT, choice, None, True, prompt), text) is None


@pytest.mark.parametrize("name", SOURCES)
@settings(max_examples=30)
@given(data=st.data())
def test_any_rendered_arguments_are_allowed(name: str, data: st.DataObject) -> None:
    found = data.draw(arguments.filter(lambda given: can_be_written(name, given)))
    assume(name != "qwen3_5" or "</parameter>" not in str(found))
    found = {key: found[key] for key in PARAMETERS["properties"] if key in found}  # a grammar has one order
    assume(not any(special in value for value in texts_in(found) for special in special_ids()))  # one token here
    prompt, text = answer_of(name, turn(("search_2", found)))
    assume(decoded(encoded(text)) == text)  # the vocabulary lacks some bytes
    assume("\x7f" not in text)  # llguidance wants it escaped in JSON
    grammar = tool_grammar(format_named(name), STRICT, "required", "search_2", False, prompt)
    assert refused_at(grammar, text) is None


@pytest.mark.parametrize("name", [name for name in SOURCES if name not in SILENT or name in THINKING])
def test_thoughts_and_text_before_a_call_are_allowed_under_auto(name: str) -> None:
    content = "" if name in ("gemma4", *SILENT) else "Let me look."  # Gemma's template writes the text behind the call
    thoughts = "One <tool_call> in thoughts." if name in THINKING else ""
    said = turn(("search_2", {"city": "x"}), content=content, thoughts=thoughts)
    prompt, text = answer_of(name, said)
    assert refused_at(tool_grammar(format_named(name), STRICT, "auto", None, True, prompt), text) is None


@pytest.mark.parametrize("name", [name for name in SOURCES if name in THINKING])
def test_thoughts_are_allowed_where_a_call_is_required(name: str) -> None:
    prompt, text = answer_of(name, turn(("search_2", {"city": "x"}), thoughts="One <tool_call> in thoughts."))
    assert refused_at(tool_grammar(format_named(name), STRICT, "required", None, True, prompt), text) is None


def free_answer(name: str, text: str) -> str:
    return f"<|channel|>final<|message|>{text}" if name == "gpt_oss" else text


def header(name: str) -> str:
    """Return the end of a prompt in which nothing is thought yet."""
    start = format_named(name).turn_starts[0]
    return start + "\n" if start == "<|im_start|>assistant" else start


@pytest.mark.parametrize("name", SOURCES)
def test_free_text_is_allowed_under_auto_alone(name: str) -> None:
    text = free_answer(name, 'Hello <world> {"a": 1}\n')
    assert refused_at(tool_grammar(format_named(name), STRICT, "auto", None, True, header(name)), text) is None
    required = tool_grammar(format_named(name), STRICT, "required", None, True, header(name))
    assert refused_at(required, text) is not None
    assert refused_at(required, "") == ""


def test_a_call_that_is_not_valid_is_not_allowed() -> None:
    cases = [
        ("search_2", "nobody"),
        ("12", "1.5"),
        ("12", "x"),
        ("Town", None),
        ("city", "town"),
    ]
    for (broken, instead), name in product(cases, SOURCES):
        with in_case(name, broken, instead):
            prompt, text = answer_of(name, turn(("search_2", {"city": "Town", "count": 12})))
            changed = text[: text.index(broken)] if instead is None else text.replace(broken, instead)
            assert changed != text
            for choice in ("auto", "required"):
                grammar = tool_grammar(format_named(name), STRICT, choice, None, True, prompt)
                is_text = (name, instead, choice) == (
                    "glm4",
                    "nobody",
                    "auto",
                )  # it has no tag that would make it a call
                assert refused_at(grammar, text) is None
                assert (refused_at(grammar, changed) is None) == is_text


@pytest.mark.parametrize("name", SOURCES)
def test_a_required_parameter_cannot_be_left_out(name: str) -> None:
    prompt, text = answer_of(name, turn(("search_2", {"count": 12})))
    assert refused_at(tool_grammar(format_named(name), STRICT, "auto", None, True, prompt), text) is not None
    assert refused_at(tool_grammar(format_named(name), [SEARCH], "required", None, True, prompt), text) is not None


@pytest.mark.parametrize("name", SOURCES)
def test_only_the_named_function_can_be_called(name: str) -> None:
    prompt, text = answer_of(name, turn(("clock.now-utc", {})))
    assert refused_at(tool_grammar(format_named(name), TOOLS, "required", "clock.now-utc", True, prompt), text) is None
    assert refused_at(tool_grammar(format_named(name), TOOLS, "required", "search_2", True, prompt), text) is not None
    with pytest.raises(ConfigError, match="tool_choice: no tool is named 'other'"):
        tool_grammar(format_named(name), TOOLS, "required", "other", True)


def test_several_calls_are_allowed_where_they_are_asked_for() -> None:
    for name, choice in product([name for name in PARALLEL if name in SOURCES], ["auto", "required"]):
        with in_case(choice, name):
            prompt, text = answer_of(
                name, turn(("search_2", {"city": "a"}), ("clock.now-utc", {}), ("search_2", {"city": "b"}))
            )
            assert refused_at(tool_grammar(format_named(name), STRICT, choice, None, True, prompt), text) is None
            assert refused_at(tool_grammar(format_named(name), STRICT, choice, None, False, prompt), text) is not None


@pytest.mark.parametrize("name", SOURCES)
def test_a_tool_that_is_not_strict_may_have_any_arguments_under_auto(name: str) -> None:
    prompt, text = answer_of(
        name, turn(("clock.now-utc", {"at": "x", "deep": {"k": [1, None, True]}, "exact": True, "none": None}))
    )
    open_clock = {"type": "function", "function": {"name": "clock.now-utc"}}
    assert (
        refused_at(tool_grammar(format_named(name), [strict(SEARCH), open_clock], "auto", None, True, prompt), text)
        is None
    )


def test_texts_of_an_enum_are_kept_to_in_every_syntax() -> None:
    schema = {
        "type": "object",
        "properties": {"unit": {"$ref": "#/$defs/Unit"}, "list": {"type": "array", "items": {"$ref": "#/$defs/Unit"}}},
        "required": ["unit"],
        "$defs": {"Unit": {"type": "string", "enum": ["C", "F"]}},
    }
    tool = {"type": "function", "function": {"name": "search_2", "parameters": schema, "strict": True}}
    for name in SOURCES:
        known = format_named(name)
        for unit, is_allowed in (("C", True), ("K", False)):
            for given_arguments in ({"unit": unit}, {"unit": "F", "list": ["F", unit]}):
                prompt, text = answer_of(name, turn(("search_2", given_arguments)))
                if name == "gemma4" and "list" in given_arguments:
                    text = (
                        f'<|tool_call>call:search_2{{list:[<|"|>F<|"|>,<|"|>{unit}<|"|>],unit:<|"|>F<|"|>}}<tool_call|>'
                    )
                grammar = tool_grammar(known, [tool], "required", None, True, prompt)
                assert (refused_at(grammar, text) is None) == is_allowed, (name, text)


@pytest.mark.parametrize("name", SOURCES)
def test_an_answer_under_a_grammar_is_parsed_as_a_call(name: str) -> None:
    """llguidance writes the answer: the tokens that it forces, else the first that it allows of a fixed order."""
    schema = {"type": "object", "properties": {"a": {"enum": ["x"]}, "b": {"const": 5}}, "required": ["a", "b"]}
    schema["additionalProperties"] = False
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    grammar = tool_grammar(format_named(name), [tool], "required", "f", False, header(name) + closed_thoughts(name))
    assert grammar is not None
    matcher = LLMatcher(llguidance_tokens(), LLMatcher.grammar_from_lark(grammar))
    ids: list[int] = []
    while not matcher.is_stopped() and not matcher.is_accepting() and len(ids) < 200:
        allowed = [at for at, bit in enumerate(bits_of(matcher)) if bit and at not in (0,)]
        printable = [at for at in allowed if not llguidance_tokens().decode_str([at]).isspace()]
        ids.append(min(printable or allowed, key=lambda at: len(llguidance_tokens().decode_str([at]))))
        assert matcher.consume_token(ids[-1])
    text = decoded(ids)
    assert parsed(format_named(name), [text], tools=[tool]).values == [("f", {"a": "x", "b": 5})], text


def closed_thoughts(name: str) -> str:
    thoughts = "<think>\n\n</think>\n\n"
    known = format_named(name)
    if not known.knows_reasoning or name == "gpt_oss":
        return ""
    return thoughts if known.reasoning_open == "<think>" else known.reasoning_open + known.reasoning_close


def bits_of(matcher: LLMatcher) -> list[int]:
    return [byte >> bit & 1 for byte in matcher.compute_bitmask() for bit in range(8)][: llguidance_tokens().vocab_size]


def test_an_answer_is_free_where_nothing_is_asked_for() -> None:
    known = format_named("qwen3")
    assert tool_grammar(known, TOOLS, "auto", None, True) is None
    assert tool_grammar(known, STRICT, "none", None, True) is None
    assert tool_grammar(known, [], "required", None, True) is None
    assert tool_grammar(PLAIN, STRICT, "required", None, True) is None


def test_a_schema_that_cannot_be_kept_to_is_refused_if_it_is_strict() -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": {"a": {"type": "nothing"}}},
        },
    }
    with pytest.raises(ConfigError, match=r"tools\[1\]\.function\.parameters: "):
        tool_grammar(format_named("qwen3"), [CLOCK, strict(tool)], "auto", None, True)
    prompt, text = answer_of("qwen3", turn(("f", {"a": "anything"})))
    assert refused_at(tool_grammar(format_named("qwen3"), [tool], "required", None, True, prompt), text) is None


@pytest.mark.parametrize("name", SOURCES)
def test_a_function_without_parameters_is_called_without_arguments(name: str) -> None:
    none = {"type": "object", "properties": {}, "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "clock.now-utc", "parameters": none, "strict": True}}
    for given_arguments, is_allowed in (({}, True), ({"at": "x"}, False)):
        prompt, text = answer_of(name, turn(("clock.now-utc", given_arguments)))
        grammar = tool_grammar(format_named(name), [tool], "auto", None, True, prompt)
        assert (refused_at(grammar, text) is None) == is_allowed


def test_thoughts_that_the_prompt_opened_come_first() -> None:
    prompts = {"gpt_oss": "<|channel|>analysis<|message|>", "qwen3_5": "<think>\n", "gemma4": "<|channel>thought\n"}
    for name, opened in prompts.items():
        _, text = answer_of(name, turn(("search_2", {"city": "x"}), thoughts="So."))
        rest = text[text.index("So.") :]
        prompt = header(name) + opened
        for choice in ("auto", "required"):
            assert refused_at(tool_grammar(format_named(name), STRICT, choice, None, True, prompt), rest) is None
            closed = tool_grammar(format_named(name), STRICT, choice, None, True, header(name) + closed_thoughts(name))
            assert choice == "auto" or refused_at(closed, rest) == ""


def test_tools_whose_schemas_take_too_long_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def slow_problem(_schema: Mapping[str, Any]) -> str:
        now[0] += TRIAL_SECONDS / 2
        return ""

    monkeypatch.setattr(tool_grammar_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    tools = [{"type": "function", "function": {"name": f"f{at}", "parameters": PARAMETERS}} for at in range(1024)]
    arguments = format_named("qwen3"), tools, "required", None, True
    with pytest.raises(ConfigError, match="tools: the schemas of the first 3 take longer than 60 s"):
        grammar_of_tools(*arguments, schema_problem=slow_problem)
    assert now[0] < 2 * TRIAL_SECONDS


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_an_answer_that_must_call_calls_beside_a_format_even_if_it_continues_a_text(
    choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "compiled_grammar", lambda _engine, grammar, frame="": grammar)
    served = SimpleNamespace(tool_format=format_named("qwen3"), special_ids=special_ids())
    engine = SimpleNamespace(schema_problem=schema_problem)
    call = ChatCall([], TOOLS, tool_choice=choice, grammar={"json_schema": PARAMETERS}, continues_last=True)
    found = cast("Any", answering.call_mask(cast("Any", served), cast("Any", engine), call, "It is "))
    assert list(found) == ["lark" if choice == "required" else "json_schema"]


def framed_at(name: str, prompt: str, text: str, frame: str | None = None) -> str | None:
    """Return the text up to the first token that a schema in a family's answer refuses; None if it allows the whole.

    Args:
        frame: grammar of the whole answer; None for that of one without tools.
    """
    frame = answer_frame(format_named(name), prompt, special_ids()) if frame is None else frame
    mask = GrammarMask(cast("Any", None), "json_schema", {"type": "object", "required": ["city"]}, frame)
    matcher = LLMatcher(llguidance_tokens(), mask.source())
    assert not matcher.is_error(), matcher.get_error()
    ids = encoded(text)
    taken = matcher.try_consume_tokens(ids)
    return None if taken == len(ids) and matcher.is_accepting() else decoded(ids[:taken])


@pytest.mark.parametrize("name", THINKING)
@pytest.mark.parametrize("thoughts", ["", 'One {"city": 1} or <tool_call>, and no answer yet.'])
def test_a_schema_binds_what_follows_the_thoughts_of_a_family(name: str, thoughts: str) -> None:
    prompt, good = answer_of(name, turn(content='{"city": "x"}', thoughts=thoughts))
    if name == "gemma4" and thoughts:  # its template leaves out the thoughts of an answer without calls
        good = f"<|channel>thought\n{thoughts}<channel|>{good}"
    assert thoughts in good
    assert framed_at(name, prompt, good) is None
    refused = framed_at(name, prompt, good.replace('{"city": "x"}', "no object"))
    assert refused is not None
    assert thoughts in refused


@pytest.mark.parametrize("name", SOURCES)
def test_beside_a_schema_an_answer_is_calls_or_the_schemas_text(name: str) -> None:
    """With tools that are strict and not, one call and several, behind thoughts that are open, closed or absent."""
    known, both = format_named(name), turn(("search_2", {"city": "a"}), ("clock.now-utc", {}))
    said = {"role": "assistant", "content": '{"city": "x"}'}
    for thoughts in ("", "One {<tool_call>} so.") if name in THINKING else ("",):
        more = {"reasoning_content": thoughts} if thoughts else {}
        for tools in (TOOLS, STRICT):
            prompt, call = answer_of(name, {**turn(("search_2", {"city": "a", "count": 5})), **more})
            if thoughts:
                assert thoughts in call, call
            frame = tool_grammar(known, tools, "auto", None, True, prompt, is_bound=True)
            assert frame is not None
            assert framed_at(name, prompt, call, frame) is None
            assert framed_at(name, prompt, call.replace("search_2", "nobody"), frame) is not None
            assert (framed_at(name, prompt, call.replace("5", "x5"), frame) is None) == is_any_text(name, tools)
            own, text = answer_of(name, {**said, **more})
            if name == "gemma4" and thoughts:  # its template leaves out the thoughts of an answer without calls
                text = f"<|channel>thought\n{thoughts}<channel|>{text}"
            if own != prompt:  # the template writes an answer without a call behind another beginning
                frame = tool_grammar(known, tools, "auto", None, True, own, is_bound=True)
            text = text.removeprefix("\n") if known.begins_line and not thoughts else text
            assert framed_at(name, own, text.strip(" "), frame) is None, text
            for wrong in ('{"city": "x"', '{"town": "x"}', "So be it.", '{"city": "x"} and'):
                assert framed_at(name, own, text.strip(" ").replace('{"city": "x"}', wrong), frame) is not None, wrong
            if name in PARALLEL:
                prompt, calls = answer_of(name, {**both, **more})
                for is_parallel in (True, False):
                    frame = tool_grammar(known, tools, "auto", None, is_parallel, prompt, is_bound=True)
                    assert (framed_at(name, prompt, calls, frame) is None) == is_parallel
            required = tool_grammar(known, tools, "required", None, True, prompt, is_bound=True)
            assert required is not None
            assert "@answer" not in required


def is_any_text(name: str, tools: object) -> bool:
    """Return whether the family's syntax types values by the schema alone, so that tools without `strict` take any."""
    return tools is TOOLS and name in ("qwen3_5", "glm45", "glm47")


def test_a_schema_binds_at_once_where_thoughts_are_over_or_an_answer_goes_on() -> None:
    for prompt in ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "<|im_start|>assistant\nI say"):
        assert answer_frame(format_named("qwen3"), prompt) == ""
    assert answer_frame(format_named("gpt_oss"), "<|start|>assistant<|channel|>final<|message|>I say") == ""
    assert answer_frame(PLAIN, "<|im_start|>assistant\n") == ""


def test_tags_of_thoughts_that_are_special_tokens_are_found_as_such() -> None:
    known = tool_format_of(ALL["qwen3"], "", {"<think>", "</think>", "<|im_end|>"})
    assert known.has_reasoning_tokens
    with_tags = json.loads(tokenizer_text())
    first = max(token["id"] for token in with_tags["added_tokens"])
    flags = {**with_tags["added_tokens"][-1], "special": True}
    with_tags["added_tokens"] += [{**flags, "id": first + 1, "content": "<think>"}]
    with_tags["added_tokens"] += [{**flags, "id": first + 2, "content": "</think>"}]
    text = json.dumps(with_tags)
    mask = GrammarMask(cast("Any", None), "regex", "[0-9]+", answer_frame(known, "<|im_start|>assistant\n"))
    matcher = LLMatcher(LLTokenizer(text, eos_token=[0]), mask.source())
    ids = tokenizers.Tokenizer.from_str(text).encode("<think>2 or three</think>17", add_special_tokens=False).ids
    assert (ids[0], first + 2 in ids) == (first + 1, True)
    assert matcher.try_consume_tokens(ids) == len(ids)
    assert matcher.is_accepting()
