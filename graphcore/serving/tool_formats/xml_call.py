"""Calls as tags: <function=f><parameter=a>1</parameter></function>, as Qwen 3 Coder, 3.5 and 3.6 write them.

transformers' template for them is not used: it strips the white space around a value, so that a program loses its
first indentation, and its patterns take 10 s for a value with 50,000 spaces. Here one line break at either end of a
value is left out, which the chat templates add.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from graphcore.serving.tool_formats.call_reader import CallReader
from graphcore.serving.tool_formats.part_writer import PartWriter
from graphcore.serving.tool_formats.schema_types import json_of, json_string, property_schema, types_of

_PARAMETER, _FUNCTION_END, _PARAMETER_END = "<parameter=", "</function>", "</parameter>"
_NEXT = (_PARAMETER, _FUNCTION_END)
_SPACES = re.compile(r"\s{0,16}")
_LONGEST_END = len(_PARAMETER_END) + 16 + len(_PARAMETER)  # an end of a value, and what must follow it
_MOST_NAME = 200  # characters


class XmlCallReader(CallReader):
    """Reads a call in tags; it is written when `</function>` has come.

    A value ends at a `</parameter>` that another parameter or the call's end follows, so that it may hold tags itself.

    Args:
        schemas: JSON schema of each tool's parameters, by name.
        opened: the text that opened the call.
        close: tag after the call.
    """

    def __init__(self, writer: PartWriter, schemas: Mapping[str, Mapping[str, Any]], opened: str, close: str) -> None:
        super().__init__(opened, close)
        self._writer = writer
        self._schemas = schemas
        self._name = ""
        self._key = ""
        self._value: list[str] = []
        self._tail = ""  # end of the value so far, if it may begin the value's end
        self._members: list[str] = []

    def _begin(self, text: str, at: int) -> int:
        self._expect(lambda found: self._read_name(self._named), "<function=")
        return at

    def _read_name(self, then: Callable[[str], None]) -> None:
        """Go on with a name up to `>`; then call a function with it."""
        begun: list[str] = []

        def phase(text: str, at: int) -> int:
            end = text.find(">", at, at + _MOST_NAME)
            begun.append(text[at : end if end >= 0 else at + _MOST_NAME])
            name = "".join(begun)
            if len(name) >= _MOST_NAME or "\n" in name:
                self._break()
            elif end >= 0:
                then(name)
                return end + 1
            return at + len(begun[-1])

        self._phase = phase

    def _named(self, name: str) -> None:
        self._name = name
        if name in self._schemas:
            self._expect(self._in_function, *_NEXT)
        else:
            self._break()

    def _in_function(self, found: str) -> None:
        if found == _PARAMETER:
            self._read_name(self._keyed)
        else:
            self._write()

    def _keyed(self, key: str) -> None:
        self._key, self._value, self._tail = key, [], ""
        self._phase = self._read_value

    def _read_value(self, text: str, at: int) -> int:
        held = self._tail
        window = held + text[at:] if held else text
        start = 0 if held else at
        while (found := window.find(_PARAMETER_END, start)) >= 0:
            self._value.append(window[start:found])
            after = _SPACES.match(window, found + len(_PARAMETER_END))
            assert after is not None, "a run of no characters matches, too"
            followed = next((tag for tag in _NEXT if window.startswith(tag, after.end())), None)
            if followed:
                self._end_value()
                self._in_function(followed)
                return self._position(text, window, after.end() + len(followed))
            rest = window[after.end() : found + _LONGEST_END]
            if after.end() + len(rest) == len(window) and any(tag.startswith(rest) for tag in _NEXT):
                self._tail = window[found:]
                return len(text)
            self._value.append(window[found : found + 1])
            start = found + 1
        kept = next(
            (size for size in range(len(_PARAMETER_END) - 1, 0, -1) if _ends_with_start(window, start, size)), 0
        )
        self._value.append(window[start : len(window) - kept])
        self._tail = window[len(window) - kept :]
        return len(text)

    def _position(self, text: str, window: str, end: int) -> int:
        """Return the position in the text of one in the window, which ends where the text ends."""
        return len(text) - (len(window) - end)

    def _end_value(self) -> None:
        value = "".join(self._value).removeprefix("\n").removesuffix("\n")
        root = self._schemas[self._name]
        types = types_of(property_schema(root, self._key, root), root)
        self._members.append(f"{json_string(self._key)}: {json_of(value, types)}")

    def _write(self) -> None:
        self._writer.begin(self._name)
        self._writer.arguments("{" + ", ".join(self._members) + "}")
        self._end()


def _ends_with_start(window: str, start: int, size: int) -> bool:
    """Return whether a window ends with the first characters of a value's end, at or after a position."""
    return len(window) - start >= size and window.endswith(_PARAMETER_END[:size])
