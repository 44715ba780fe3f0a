"""Grammars under which a model's calls are valid: a known function, arguments under its JSON schema.

    auto:                        thoughts? text (<tool_call> a valid call </tool_call>)*
    required, or one by name:    thoughts? (<tool_call> a valid call </tool_call>)+
    auto beside a grammar:       thoughts? (the grammar's text | (<tool_call> a valid call </tool_call>)+)

The markup is that of the families' tables, which the parsers read, too.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from graphcore.errors import ConfigError
from graphcore.serving.tool_formats.argument_rules import GemmaRules, PythonRules, TagRules, definitions_of
from graphcore.serving.tool_formats.channel_rules import channel_answer, channel_call
from graphcore.serving.tool_formats.lark_rules import (
    TEXT,
    LarkRules,
    choice_of,
    escaped,
    inline_json,
    markup,
    quoted_literal,
)
from graphcore.serving.tool_formats.prompt_state import is_at_start, is_reasoning_closed, is_reasoning_open
from graphcore.serving.tool_formats.tool_format import CallSyntax, ToolFormat

_SPACE = r"[ \t\r\n]{0,8}"  # of JSON; \s would have spaces of other scripts, too
_ANY_OBJECT = {"type": "object"}
_ANSWER = "@answer"  # what a grammar allows as the answer's text
TRIAL_SECONDS = 60.0  # in which the schemas of a request's tools are tried; each may take seconds of a processor
_CALL_KEYS = "name|type|id|arguments|parameters"


def tool_grammar(
    format: ToolFormat,
    tools: Sequence[Mapping[str, Any]],
    tool_choice: str,
    tool_name: str | None,
    has_parallel_tools: bool,
    prompt_tail: str = "",
    special_ids: Mapping[str, int] = MappingProxyType({}),
    is_bound: bool = False,
    *,
    schema_problem: Callable[[Mapping[str, Any]], str],
) -> str | None:
    """Return a Lark grammar, as llguidance reads it, for an answer that may or must call tools.

    With "auto" only tools with `strict` have their arguments under their schema; the others have any object. With
    "required" or a name every tool has, unless llguidance does not know its schema. In tags and in Gemma's syntax, a
    string has no bounds but those of `enum` and `const`.

    Args:
        tools: functions as in `ChatCall.tools`, which `check_tools` has accepted.
        tool_choice: "auto", "none" or "required".
        tool_name: the one function that must be called; None if any may be. With "required".
        has_parallel_tools: whether the answer may have several calls; it may not, either, if the family cannot.
        prompt_tail: end of the prompt's text, from the header of the model's turn on.
        special_ids: id of each special token of the vocabulary, by its spelling.
        schema_problem: function that returns why a JSON schema cannot be kept to; empty if it can.
        is_bound: whether a grammar binds the answer's text. With "auto", `@answer` stands for it in this one.

    Returns:
        The grammar; None if the answer is free: no tools, "none", or "auto" without a strict tool or a grammar, so that
        an answer costs no masks where nobody asked for more than the model's own calls.

    Raises:
        ConfigError: no tool has the name, the schema of a strict tool is one that llguidance does not know, or the
            schemas take too long to compile.
    """
    must_call = tool_choice == "required" or tool_name is not None
    is_strict = any(tool["function"].get("strict") for tool in tools)
    if not tools or not format.knows_tools or tool_choice == "none" or not (must_call or is_strict or is_bound):
        return None
    if tool_name is not None and tool_name not in (tool["function"]["name"] for tool in tools):
        raise ConfigError(f"tool_choice: no tool is named '{tool_name:.70}'")
    schemas: dict[str, dict[str, Any] | None] = {}
    until = time.monotonic() + TRIAL_SECONDS
    for index, tool in enumerate(tools):
        if tool_name not in (None, tool["function"]["name"]):
            continue
        if time.monotonic() > until:
            raise ConfigError(
                f"tools: the schemas of the first {index} take longer than {TRIAL_SECONDS:g} s to compile; send fewer "
                "tools, or simpler schemas"
            )
        schemas[tool["function"]["name"]] = _schema(tool["function"], index, must_call, schema_problem)
    is_parallel, text = has_parallel_tools and format.is_parallel, _ANSWER if is_bound else TEXT
    return _AnswerRules(format, prompt_tail, "" if must_call else text, is_parallel, special_ids).whole(schemas)


def answer_frame(format: ToolFormat, prompt_tail: str, special_ids: Mapping[str, int] = MappingProxyType({})) -> str:
    """Return a Lark grammar of a whole answer, thoughts included, in which `@answer` stands for its content.

    Args:
        prompt_tail, special_ids: as for `tool_grammar`.

    Returns:
        The grammar; empty if nothing can come before the content.
    """
    may_reason = format.knows_reasoning and not is_reasoning_closed(format, prompt_tail)
    if not may_reason or not (is_reasoning_open(format, prompt_tail) or is_at_start(format, prompt_tail)):
        return ""
    return _AnswerRules(format, prompt_tail, _ANSWER, is_parallel=False, special_ids=special_ids).whole({})


def _schema(
    function: Mapping[str, Any], index: int, must_call: bool, schema_problem: Callable[[Mapping[str, Any]], str]
) -> dict[str, Any] | None:
    """Return the schema of a function's arguments; None if they may be any object."""
    is_strict = bool(function.get("strict"))
    if not (is_strict or must_call):
        return None
    schema = {**_ANY_OBJECT, **(function.get("parameters") or {})}
    problem = schema_problem(schema)
    if problem and is_strict:
        raise ConfigError(f"tools[{index}].function.parameters: {problem}; or leave out 'strict'")
    return None if problem else schema


class _AnswerRules:
    """The rules of a whole answer.

    Args:
        text: element for the answer's text; empty if it must call.
        is_parallel: whether it may have several calls.
    """

    def __init__(
        self,
        known: ToolFormat,
        prompt_tail: str,
        text: str,
        is_parallel: bool,
        special_ids: Mapping[str, int],
    ) -> None:
        self._format = known
        self._special_ids = special_ids
        self._rules = LarkRules()
        self._text = text
        self._is_parallel = is_parallel
        self._is_reasoning_open = is_reasoning_open(known, prompt_tail)
        self._space_name = ""
        self._may_reason = known.knows_reasoning and not is_reasoning_closed(known, prompt_tail)

    def whole(self, schemas: Mapping[str, dict[str, Any] | None]) -> str:
        """Return the grammar of answers that may call functions with these schemas; without any, of texts alone."""
        if self._format.syntax is CallSyntax.CHANNELS:
            calls = [channel_call(name, inline_json(schema or _ANY_OBJECT)) for name, schema in schemas.items()]
            return self._rules.whole(channel_answer(calls, self._text, self._is_reasoning_open))
        call = self._rules.add(choice_of(self._calls(schemas))) if schemas else ""
        if self._text == _ANSWER:
            called = f"{self._space()}? {self._called(call)}" if call else ""
            said = self._rules.add(choice_of(filter(None, [_ANSWER, called])))
            if self._is_reasoning_open:
                return self._rules.whole(f"{self._thoughts_end()} {self._space()}? {said}")
            return self._rules.whole(f"({self._thoughts()} {self._space()}?)? {said}" if self._may_reason else said)
        text = self._text
        if text and self._format.begins_bare:
            text = self._rules.add_terminal(f"{TEXT} & ~{self._beginnings(schemas)}")
        if self._is_reasoning_open:
            return self._rules.whole(f"{self._thoughts_end()} {self._said(call, text)}")
        if not self._may_reason:
            return self._rules.whole(self._said(call, text))
        said = self._said(call, self._no_thoughts(text) if text else "")
        return self._rules.whole(f"{self._thoughts()} {self._said(call, text)} | {said}")

    def _calls(self, schemas: Mapping[str, dict[str, Any] | None]) -> list[str]:
        """Return the elements for a call of each function, without the tags around it."""
        known = self._format
        if known.syntax is CallSyntax.TAGS:
            assert known.tags is not None, "a family with tags names them"
            tags = TagRules(self._rules, known.tags)
            return [tags.call(name, schema) for name, schema in schemas.items()]
        if known.syntax is CallSyntax.PYTHON:
            python = PythonRules(self._rules)
            return [python.call(name, schema) for name, schema in schemas.items()]
        if known.syntax is CallSyntax.GEMMA:
            gemma = GemmaRules(self._rules)
            return [gemma.call(name, schema) for name, schema in schemas.items()]
        if known.syntax is CallSyntax.NAMED:
            return [self._named_call(name, schema) for name, schema in schemas.items()]
        return [self._json_call(name, schema) for name, schema in schemas.items()]

    def _named_call(self, name: str, schema: dict[str, Any] | None) -> str:
        """Return the element for a name and a JSON object; some models write an id between them."""
        known, call_id = self._format, ""
        if known.id_open:
            call_id = f"({self._tag(known.id_open)} {self._rules.add_terminal('/[a-zA-Z0-9]{1,40}/')})?"
        return f"{quoted_literal(name)} {call_id} {self._tag(known.name_end)} {inline_json(schema or _ANY_OBJECT)}"

    def _json_call(self, name: str, schema: dict[str, Any] | None) -> str:
        """Return the element for a call in JSON; some models write its type first, or an id last."""
        if self._format.begins_bare and self._text == _ANSWER:
            return self._whole_json_call(name, schema or _ANY_OBJECT)
        kind = rf'("type"{_SPACE}:{_SPACE}"function"{_SPACE},{_SPACE})?'
        key = rf'"name"{_SPACE}:{_SPACE}"{escaped(name)}"{_SPACE},{_SPACE}"{self._format.arguments_key}"'
        head = self._rules.add_terminal(rf"/{_SPACE}\{{{_SPACE}{kind}{key}{_SPACE}:{_SPACE}/")
        id_length = self._format.messages.id_length
        call_id = rf'({_SPACE},{_SPACE}"id"{_SPACE}:{_SPACE}"[a-zA-Z0-9]{{{id_length}}}")?' if id_length else ""
        space = _SPACE if self._format.call_close else ""
        tail = self._rules.add_terminal(rf"/{call_id}{_SPACE}\}}{space}/")
        return f"{head} {inline_json(schema or _ANY_OBJECT)} {tail}"

    def _whole_json_call(self, name: str, schema: Mapping[str, Any]) -> str:
        """Return the element for a call as one JSON object, beside a text that may be one.

        A terminal for the call's beginning would swallow the text's first brace: llguidance's lexer takes the longest.
        """
        members = {"name": {"const": name}, self._format.arguments_key: schema}
        rules = {"type": "object", "properties": members, "required": list(members), "additionalProperties": False}
        return inline_json({**definitions_of(schema), **rules})

    def _called(self, call: str) -> str:
        """Return the element for the calls of an answer, without what is before them."""
        known = self._format
        if known.begins_bare:
            return f"{self._tag(known.call_open)}? {call}" if known.call_open else call
        opened, rest = self._calls_in_tags(call)
        return f"{self._tag(opened)} {rest}"

    def _said(self, call: str, text: str) -> str:
        """Return the element for what follows thoughts: a text that calls may follow, or calls alone if it is empty."""
        known = self._format
        if not text:
            return f"({self._space()}? {self._called(call)})"
        if known.begins_bare:
            return choice_of([text, self._called(call)])
        opened, rest = self._calls_in_tags(call)
        before = f"{text} {self._tag(opened)}" if known.has_tag_tokens else self._rules.up_to(opened, text)
        return choice_of([text, f"{before} {rest}"])

    def _calls_in_tags(self, call: str) -> tuple[str, str]:
        """Return the tag with which calls begin, and the element for what follows it."""
        known = self._format
        body = f"{call} {self._tag(known.call_close)}"
        if known.list_marks:
            opened, separator, closed = map(quoted_literal, known.list_marks)
            more = f"({separator} {call})*" if self._is_parallel else ""
            whole = f"{self._space()}? {opened} {call} {more} {self._space()}? {closed}"
            close = f"{self._space()}? {self._tag(known.call_close)}" if known.call_close else ""
            return known.call_open, f"{whole} {close}"
        more = f"({self._space()}? {self._tag(known.call_open)} {body})*" if self._is_parallel else ""
        if not known.calls_open:
            return known.call_open, f"{body} {more}"
        close = f"{self._space()}? {self._tag(known.calls_close)}"
        return known.calls_open, f"{self._tag(known.call_open)} {body} {more} {close}"

    def _space(self) -> str:
        """Return the name of the terminal for white space between tags."""
        if not self._space_name:
            self._space_name = self._rules.add_terminal(r"/[ \t\r\n]{1,8}/")
        return self._space_name

    def _tag(self, text: str) -> str:
        return markup(text, self._special_ids) if self._format.has_tag_tokens else quoted_literal(text)

    def _thoughts_end(self) -> str:
        """Return the element for thoughts that are open already."""
        close = self._format.reasoning_close
        if not self._format.has_reasoning_tokens:
            return self._rules.up_to(close)
        return f"{TEXT} {markup(close, self._special_ids)}"

    def _thoughts(self) -> str:
        """Return the element for thoughts from their opening tag on."""
        opened = self._format.reasoning_open
        if self._format.has_reasoning_tokens:
            return f"{markup(opened, self._special_ids)} {self._thoughts_end()}"
        return self._rules.up_to(
            self._format.reasoning_close, self._rules.add_terminal(rf"/(?s:\s*{escaped(opened)}.*)/")
        )

    def _no_thoughts(self, text: str) -> str:
        """Return the name of a terminal for text that does not begin with thoughts."""
        opened = self._format.reasoning_open
        if self._format.has_reasoning_tokens:
            return text
        return self._rules.add_terminal(rf"{text} & ~/(?s:\s*{escaped(opened)}.*)/")

    def _beginnings(self, names: Iterable[str]) -> str:
        """Return the expression for texts that begin like a call without a tag."""
        if self._format.syntax is CallSyntax.NAMED:
            beginning = f"({'|'.join(map(escaped, names))}){escaped(self._format.name_end)}"
        else:
            beginning = rf'\{{\s*"({_CALL_KEYS})"'
        return rf"/(?s:\s*{beginning}.*)/"
