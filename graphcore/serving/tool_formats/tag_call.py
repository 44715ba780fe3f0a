"""Calls as tags, as Qwen 3 Coder, 3.5 and 3.6, and GLM 4.5 to 4.7 write them.

    <tool_call><function=f><parameter=a>1</parameter></function></tool_call>
    <tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>

transformers' template for the first is not used: it strips the white space around a value, so that a program loses its
first indentation, and its patterns take 10 s for a value with 50,000 spaces. Here one line break at either end of a
value is left out where the chat template adds them.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from graphcore.serving.tool_formats.call_reader import CallReader
from graphcore.serving.tool_formats.part_writer import PartWriter
from graphcore.serving.tool_formats.schema_types import json_of, json_string, property_schema, types_of
from graphcore.serving.tool_formats.tool_format import CallTags

_SPACES = re.compile(r"\s{0,16}")
_BARE_NAME_END = re.compile(r"[<\n]")
_MOST_NAME = 200  # characters


class TagCallReader(CallReader):
    """Reads a call in tags; it is written when its last tag has come.

    A value ends at a closing tag that another parameter or the call's end follows, so that it may hold tags itself.

    Args:
        schemas: JSON schema of each tool's parameters, by name.
        opened: the text that opened the call.
        close: tag after the call.
        tags: the tags within it.
    """

    def __init__(
        self, writer: PartWriter, schemas: Mapping[str, Mapping[str, Any]], opened: str, close: str, tags: CallTags
    ) -> None:
        super().__init__(opened, close if tags.end else "")
        self._writer = writer
        self._schemas = schemas
        self._tags = tags
        self._next = (tags.key_open, tags.end or close)
        self._longest_end = len(tags.value_close) + 16 + max(map(len, self._next))  # and what must follow it
        self._name = ""
        self._key = ""
        self._value: list[str] = []
        self._tail = ""  # end of the value so far, if it may begin the value's end
        self._members: list[str] = []

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
            self._expect(self._in_function, *self._next)
        else:
            self._break()

    def _in_function(self, found: str) -> None:
        if found == self._tags.key_open:
            self._read_name(self._keyed, self._tags.key_close)
        else:
            self._write()

    def _keyed(self, key: str) -> None:
        self._key, self._value, self._tail = key, [], ""
        if self._tags.value_open:
            self._expect(self._valued, self._tags.value_open)
        else:
            self._phase = self._read_value

    def _valued(self, found: str) -> None:
        self._phase = self._read_value

    def _read_value(self, text: str, at: int) -> int:
        held, close = self._tail, self._tags.value_close
        window = held + text[at:] if held else text
        start = 0 if held else at
        while (found := window.find(close, start)) >= 0:
            self._value.append(window[start:found])
            after = _SPACES.match(window, found + len(close))
            assert after is not None, "a run of no characters matches, too"
            followed = next((tag for tag in self._next if window.startswith(tag, after.end())), None)
            if followed:
                self._end_value()
                self._in_function(followed)
                return self._position(text, window, after.end() + len(followed))
            rest = window[after.end() : found + self._longest_end]
            if after.end() + len(rest) == len(window) and any(tag.startswith(rest) for tag in self._next):
                self._tail = window[found:]
                return len(text)
            self._value.append(window[found : found + 1])
            start = found + 1
        sizes = range(min(len(close) - 1, len(window) - start), 0, -1)
        kept = next((size for size in sizes if window.endswith(close[:size])), 0)
        self._value.append(window[start : len(window) - kept])
        self._tail = window[len(window) - kept :]
        return len(text)

    def _position(self, text: str, window: str, end: int) -> int:
        """Return the position in the text of one in the window, which ends where the text ends."""
        return len(text) - (len(window) - end)

    def _end_value(self) -> None:
        value = "".join(self._value)
        if self._tags.pads_values:
            value = value.removeprefix("\n").removesuffix("\n")
        root = self._schemas[self._name]
        types = types_of(property_schema(root, self._key, root), root)
        self._members.append(f"{json_string(self._key)}: {json_of(value, types)}")

    def _write(self) -> None:
        self._writer.begin(self._name)
        self._writer.arguments("{" + ", ".join(self._members) + "}")
        self._end()
