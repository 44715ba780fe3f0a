"""Calls by name: f[ARGS]{"a": 1} of Mistral, f and a fenced object of DeepSeek, f and an object of GLM 4 0414."""

import re
from collections.abc import Container

from graphcore.serving.tool_formats.call_reader import StreamingCallReader
from graphcore.serving.tool_formats.part_writer import PartWriter

_NAME = re.compile(r"[a-zA-Z0-9_.-]*")
_MOST_NAME = 200  # characters


class NamedCallReader(StreamingCallReader):
    """Parses a call that is a name, then its arguments, which are streamed as they arrive. The call's id is dropped.

    Args:
        tools: names of the tools.
        opened: the text that opened the call.
        close: tag after the call; empty if there is none.
        name_end: text between the name and the arguments.
        id_open: text that may follow the name, before an id; empty if there is none.
    """

    def __init__(
        self, writer: PartWriter, tools: Container[str], opened: str, close: str, name_end: str, id_open: str = ""
    ) -> None:
        super().__init__(writer, opened, close.strip())
        self._tools = tools
        self._name_end = name_end.strip()
        self._id_open = id_open
        self._name = self._word = ""

    def _begin(self, text: str, at: int) -> int:
        if text[at].isspace():
            return at + 1
        self._phase = self._read_name
        return at

    def _read_name(self, text: str, at: int) -> int:
        end = self._read_word(text, at)
        if end < len(text):
            if self._word in self._tools:
                self._follow(self._id_open, self._name_end)
            else:
                self._break()
        return end

    def _read_word(self, text: str, at: int) -> int:
        """Take letters of a name or an id, and return the position of what follows."""
        match = _NAME.match(text, at, at + _MOST_NAME)
        assert match is not None, "a run of no characters matches, too"
        self._word += match[0]
        if len(self._word) >= _MOST_NAME:
            self._break()
        return match.end()

    def _follow(self, *texts: str) -> None:
        """Go on with what may follow the name or the id."""
        known = [text for text in texts if text]
        if known:
            self._expect(self._followed, *known)
        else:
            self._expect(self._argued, "{")

    def _followed(self, found: str) -> None:
        if found == self._id_open:
            self._name, self._word = self._word, ""
            self._phase = self._read_id
        else:
            self._expect(self._argued, "{")

    def _read_id(self, text: str, at: int) -> int:
        end = self._read_word(text, at)
        if end < len(text):
            self._word = self._name
            self._follow(self._name_end)
        return end

    def _argued(self, brace: str) -> None:
        self._writer.begin(self._word)
        self._writer.arguments(brace)
        self._written()
        self._scanner.scan(brace)
        self._phase = self._stream_arguments
