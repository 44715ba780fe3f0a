"""Calls in JSON: {"name": "f", "arguments": {"a": 1}}, or a list of such.

transformers' ResponseParser gives the arguments of a region when it closes, and closes it at the first text that looks
like the closing tag, even inside a string. Here the arguments are scanned as JSON and passed on as they come.
"""

import json
from collections.abc import Callable, Container

from graphcore.serving.tool_formats.call_reader import StreamingCallReader
from graphcore.serving.tool_formats.json_scanner import JsonScanner, is_json
from graphcore.serving.tool_formats.part_writer import PartWriter

_ARGUMENTS = ("arguments", "parameters")
_IGNORED = ("type", "id")  # some models add them
_OPENED = ("{", "[")
_BETWEEN = (",", "]")  # after an object of a list


class JsonCallReader(StreamingCallReader):
    """Reads calls in JSON.

    The name must be that of a tool. The arguments are written from their first brace on if the name came before them,
    else when the name has come. Arguments in a string, as some models write them, are written when it ends.

    Args:
        tools: names of the tools.
        opened: the text that opened the call.
        close: tag after the call; empty if there is none.
        takes_list: whether a list of calls may stand in place of one.
        is_parallel: whether such a list may have several calls; the text of a second one breaks the call otherwise.
    """

    def __init__(
        self,
        writer: PartWriter,
        tools: Container[str],
        opened: str,
        close: str,
        takes_list: bool,
        is_parallel: bool = True,
    ) -> None:
        super().__init__(writer, opened, close)
        self._tools = tools
        self._takes_list = takes_list
        self._is_parallel = is_parallel
        self._is_list = False
        self._forget()

    def _forget(self) -> None:
        self._name: str | None = None
        self._arguments: str | None = None  # whole, and not written
        self._has_arguments = False
        self._key = ""
        self._scanner = JsonScanner()
        self._held: list[str] = []

    def _begin(self, text: str, at: int) -> int:
        self._expect(self._opened, *(_OPENED if self._takes_list else _OPENED[:1]))
        return at

    def _opened(self, bracket: str) -> None:
        if bracket == "[":
            self._is_list = True
            self._expect(self._opened, "{")
        else:
            self.is_complete = False
            self._forget()
            self._expect(self._in_object, '"', "}")

    def _in_object(self, found: str) -> None:
        if found == "}":
            self._end_object()
        elif found == ",":
            self._expect(self._in_object, '"')
        else:
            self._hold(self._keyed, begun='"')

    def _keyed(self, raw: str) -> None:
        self._key = json.loads(raw)
        is_new = {"name": self._name is None, **dict.fromkeys(_ARGUMENTS, not self._has_arguments)}
        if is_new.get(self._key, self._key in _IGNORED):
            self._expect(self._valued, ":")
        else:
            self._break()

    def _valued(self, colon: str) -> None:
        if self._key == "name":
            self._hold(self._named)
        elif self._key in _IGNORED:
            self._hold(lambda raw: self._go_on())
        elif self._name is None:
            self._hold(self._argued)
        else:
            self._phase = self._begin_arguments

    def _begin_arguments(self, text: str, at: int) -> int:
        if text[at].isspace():
            return at + 1
        if text[at] != "{":
            self._hold(self._argued)
        else:
            self._write_begin()
            self._scanner = JsonScanner()
            self._phase = self._stream_arguments
        return at

    def _end_arguments(self) -> None:
        self._go_on()

    def _hold(self, then: Callable[[str], None], begun: str = "") -> None:
        """Go on with a value that is kept; then call a function with its text."""
        self._scanner, self._held = JsonScanner(), [begun]
        self._scanner.scan(begun)

        def phase(text: str, at: int) -> int:
            end = self._scanner.scan(text, at)
            self._held.append(text[at:end])
            if self._scanner.is_broken:
                self._break()
            elif self._scanner.is_whole:
                then("".join(self._held).strip())
            return end

        self._phase = phase

    def _named(self, raw: str) -> None:
        name = json.loads(raw) if raw.startswith('"') else None
        if name not in self._tools:
            self._break()
            return
        self._name = name
        if self._arguments is not None:
            self._write_whole(self._arguments)
        self._go_on()

    def _argued(self, raw: str) -> None:
        text = json.loads(raw) if raw.startswith('"') else "{}" if raw == "null" else raw
        if not text.strip().startswith("{") or not is_json(text):
            self._break()
            return
        self._has_arguments = True
        if self._name is None:
            self._arguments = text
        else:
            self._write_whole(text)
        self._go_on()

    def _go_on(self) -> None:
        self._expect(self._in_object, ",", "}")

    def _write_begin(self) -> None:
        assert self._name is not None, "a call begins when its name is known"
        self._writer.begin(self._name)
        self._written()
        self._has_arguments = True

    def _write_whole(self, text: str) -> None:
        self._write_begin()
        self._writer.arguments(text)

    def _end_object(self) -> None:
        if self._name is None:
            self._break()
            return
        if not self._has_arguments:
            self._write_whole("{}")
        if self._is_list:
            self._written()
            self.is_complete = True
            self._expect(self._between, *(_BETWEEN if self._is_parallel else _BETWEEN[-1:]))
        else:
            self._end()

    def _between(self, found: str) -> None:
        if found == ",":
            self.is_complete = False
            self._expect(self._opened, "{")
        else:
            self._end()
