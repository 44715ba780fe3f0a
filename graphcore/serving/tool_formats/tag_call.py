r"""Calls as tags, as Qwen 3 Coder, 3.5 and 3.6, and GLM 4.5 to 4.7 write them.

    <tool_call><function=f><parameter=a>1</parameter></function></tool_call>
    <tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>

A value ends at its closing tag where another parameter or the call's end follows, so that it may hold tags itself.
Models leave tags out, so it also ends where its closing tag is missing, at
  - a line that begins with the tag of a parameter which the schema names and the call does not have yet,
  - </function> on a line of its own where the call ends behind it, </tool_call> on such a line where another call of a
    known function begins behind it, and either where the answer ends behind it.
What only the text behind a call can tell waits for it. An answer that a limit has cut off is not completed.

transformers' template for the first is not used: it strips the white space around a value, so that a program loses its
first indentation, and its patterns take 10 s for a value with 50,000 spaces. Here one line break at either end of a
value is left out where the chat template adds them.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

from graphcore.serving.tool_formats.call_reader import BodyCallReader
from graphcore.serving.tool_formats.json_scanner import json_string
from graphcore.serving.tool_formats.part_writer import PartWriter
from graphcore.serving.tool_formats.schema_types import json_of, property_schema, resolved, types_of
from graphcore.serving.tool_formats.tool_format import CallTags

_BARE_NAME_END = re.compile(r"[<\n]")
_SPACE = re.compile(r"\s*")
_MOST_NAME = 200  # characters
_MOST_SPACE = 16  # characters between two tags
_LAST = 64  # characters at the end of a call that are looked at
_MOST_ENDS = 8  # tags in a call that may have been its end


class TagCallReader(BodyCallReader):
    """Reads a call in tags; it is written when its last tag has come.

    Args:
        schemas: JSON schema of each tool's parameters, by name.
        opened: the text that opened the call.
        tag, close: tags before and after the call.
        tags: the tags within it.
    """

    def __init__(
        self,
        writer: PartWriter,
        schemas: Mapping[str, Mapping[str, Any]],
        opened: str,
        tag: str,
        close: str,
        tags: CallTags,
    ) -> None:
        super().__init__(writer, opened, close, [tags.end, close])
        self._schemas = schemas
        self._tags = tags
        self._name = ""
        self._closes: list[int] = []  # positions of closing tags in the body that have not ended the call
        self._num_checked = 0  # those behind which no other call begins
        self._patterns = _patterns(tag, tags)

    def _begin(self, text: str, at: int) -> int:
        if self._tags.name_open:
            self._expect(lambda found: self._read_name(self._named, self._tags.name_close), self._tags.name_open)
        elif text[at].isspace():
            return at + 1
        else:
            self._read_name(self._named, "")
        return at

    def _read_name(self, then: Callable[[str], None], close: str) -> None:
        """Go on with a name up to a text, or to a tag or a line's end if that is empty; then call a function."""
        begun = ""

        def phase(text: str, at: int) -> int:
            nonlocal begun
            before, begun = len(begun), begun + text[at : at + _MOST_NAME]
            match = None if close else _BARE_NAME_END.search(begun)
            end = begun.find(close) if close else match.start() if match else -1
            name = begun if end < 0 else begun[:end]
            if len(name) >= _MOST_NAME or (close and "\n" in name):
                self._break()
            elif end >= 0:
                then(name.strip())
                return at + end + len(close) - before
            return at + len(begun) - before

        self._phase = phase

    def _named(self, name: str) -> None:
        self._name = name
        if name in self._schemas:
            self._expect(self._in_function, *filter(None, (self._tags.key_open, self._tags.end, self._close)))
        else:
            self._break()

    def _in_function(self, found: str) -> None:
        if found == self._tags.key_open:
            self._body.append(found)
            self._phase = self._read_body
        elif found == self._tags.end:
            self._write_call(self._name, "{}")
            self._await_close()
        else:
            self._write_call(self._name, "{}")

    def _await_close(self) -> None:
        """Go on with the call's closing tag, behind </function>."""
        self.is_done = False
        self._end()

    def _end_at(self, literal: str) -> bool:
        if self._num_checked < len(self._closes) and self._end_before_next(literal):
            return True
        last, is_function_end = self._body_end(_LAST), literal == self._tags.end
        if is_function_end or not self._tags.end:
            if self._patterns.closed_value.search(last):
                body = self._body_text() + (literal if is_function_end else "")
                members = self._members(body)
                if members is None:
                    self._break()
                else:
                    self._write_call(self._name, members)
                    if is_function_end:
                        self._await_close()
                return True
        elif self._patterns.function_end.search(last) and (members := self._members(self._body_text())) is not None:
            self._write_call(self._name, members)
            return True
        if not is_function_end and len(self._closes) < _MOST_ENDS:
            self._closes.append(len(self._body_text()))
        return False

    def _end_before_next(self, literal: str) -> bool:
        """End the call at the last closing tag, if another call of a known function begins behind it."""
        close, body = self._closes[-1], self._body_text()
        self._num_checked = len(self._closes)
        behind = close + len(self._close)
        found = self._patterns.next_call.match(body, behind)
        if found is None or found[1] not in self._schemas:
            return False
        members = self._members(body[:close], is_lenient=True, is_closed=True)
        if members is None:
            return False
        self._write_call(self._name, members, body[behind:] + literal)
        return True

    def finish(self, is_cut: bool) -> None:
        """Take the end of the answer, which completes a call that lacks its last tags."""
        if is_cut or self.is_complete or not self._body:
            return
        body = self._body_text()
        ends = [(close, close + len(self._close), True) for close in self._closes]
        if self._tags.end:
            lines = islice(self._patterns.function_line.finditer(body), _MOST_ENDS)
            ends += [(line.end(), line.end(), False) for line in lines]
        for end, behind, is_closed in [*ends, (len(body), len(body), False)]:
            members = self._members(body[:end], is_lenient=True, is_closed=is_closed)
            if members is not None:
                self._write_call(self._name, members, body[behind:])
                return

    def _members(self, body: str, is_lenient: bool = False, is_closed: bool = False) -> str | None:
        """Return the arguments in a text from the first parameter to the call's end; None if it does not end there.

        Args:
            is_lenient: whether the last closing tags may be missing.
            is_closed: whether the call's closing tag follows, so that all tags within it may be missing at the end.
        """
        tags, root, at = self._tags, self._schemas[self._name], 0
        keys: list[str] = []
        members: list[str] = []
        while True:
            at = _behind_space(body, at)
            if tags.end and body.startswith(tags.end, at):
                break
            if at == len(body) and (is_lenient or not tags.end):
                break
            key_end = body.find(tags.key_close, at)
            key = body[at + len(tags.key_open) : key_end]
            if not body.startswith(tags.key_open, at) or not 0 <= key_end < at + _MOST_NAME or "\n" in key:
                return None
            start = key_end + len(tags.key_close)
            if tags.value_open:
                start = _behind_space(body, start)
                if not body.startswith(tags.value_open, start):
                    return None
                start += len(tags.value_open)
            keys.append(key.strip())
            end = self._value_end(body, start, keys, is_lenient, is_closed)
            if end is None:
                return None
            value_end, at, is_tagged = end
            value = body[start:value_end]
            if tags.pads_values:
                value = value.removeprefix("\n")
                value = value.removesuffix("\n") if is_tagged else value
            types = types_of(property_schema(root, keys[-1], root), root)
            members.append(f"{json_string(keys[-1])}: {json_of(value, types)}")
        return "{" + ", ".join(members) + "}"

    def _value_end(
        self, body: str, start: int, keys: Sequence[str], is_lenient: bool, is_closed: bool
    ) -> tuple[int, int, bool] | None:
        """Return where a value ends, where the next tag begins, and whether a closing tag ends it.

        Args:
            keys: parameters that the call has so far.
        """
        tags, root = self._tags, self._schemas[self._name]
        known = resolved(root, root).get("properties")
        close = body.find(tags.value_close, start)
        for found in self._patterns.value_ends[is_lenient].finditer(body, start):
            end, key = found.start(), found["key"]
            if found["close"]:
                return end, found.end(), True
            if 0 <= close < end:  # the value holds a closing tag, so none is missing
                continue
            if key is None and (found["line"] or "\n" not in body[start:end].removeprefix("\n")):
                return None if self._has_call(body[start:end]) else (end, found.end(), False)
            if key is not None and key not in keys and isinstance(known, Mapping) and key in known:
                return None if self._has_call(body[start:end]) else (end, found.end(), False)
        value = body[start:].rstrip(" \t")
        if not is_closed or close >= 0 or (tags.end and tags.end in value) or self._has_call(value):
            return None
        if value.endswith("\n"):
            return start + len(value) - 1, len(body), False
        return None if "\n" in value.removeprefix("\n") else (len(body), len(body), False)

    def _has_call(self, value: str) -> bool:
        """Return whether a call of a known function begins in a text; it is no value whose closing tag is missing."""
        return any(name in self._schemas for name in self._patterns.any_call.findall(value))


def _behind_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None, "a run of no characters matches, too"
    return match.end()


class _Patterns(NamedTuple):
    """Patterns of a family's tags.

    Attributes:
        next_call: another call, at the text's beginning, and its name.
        any_call: the beginning of a call anywhere, and its name.
        closed_value: a value's closing tag at the text's end.
        function_end: </function> at the text's end.
        function_line: </function> on a line of its own.
        value_ends: what may end a value, by whether the tags behind it may be missing.
    """

    next_call: re.Pattern[str]
    any_call: re.Pattern[str]
    closed_value: re.Pattern[str]
    function_end: re.Pattern[str]
    function_line: re.Pattern[str]
    value_ends: Mapping[bool, re.Pattern[str]]


@cache
def _patterns(tag: str, tags: CallTags) -> _Patterns:
    """Return the patterns of a family, whose calls begin with a tag."""
    opened, space = re.escape(tag), rf"\s{{0,{_MOST_SPACE}}}"
    name = rf"{re.escape(tags.name_open)}([^\s<>]{{1,{_MOST_NAME}}})"
    key_open, key_close = re.escape(tags.key_open), re.escape(tags.key_close)
    value_close, end = re.escape(tags.value_close), re.escape(tags.end)
    line = r"\n[ \t]*" if tags.line_break else ""
    known_key = rf"{line}(?={key_open}(?P<key>[^<>\n]{{1,{_MOST_NAME}}}){key_close})"
    own_line = rf"(?P<line>\n[ \t]*)?(?={end}\s*\Z)" if tags.end else r"(?P<line>\Z)(?!)"
    follows = "|".join([key_open, end] if tags.end else [key_open, r"\Z"])
    return _Patterns(
        next_call=re.compile(rf"\s*{opened}\s*{name}"),
        any_call=re.compile(name if tags.name_open else rf"{opened}\s*{name}"),
        closed_value=re.compile(rf"{value_close}{space}\Z"),
        function_end=re.compile(rf"{end}{space}\Z"),
        function_line=re.compile(rf"\n[ \t]*{end}[ \t]*(?=\n)"),
        value_ends={
            is_lenient: re.compile(rf"(?P<close>{value_close}){space}(?={follows}{more})|{known_key}|{own_line}")
            for is_lenient, more in ((False, ""), (True, r"|\Z"))
        },
    )
