"""Calls as Python writes them: f(a=1, b="text", c=[True, {"d": None}]), one or several.

LFM2 puts them in a list, and OLMo 3 on a line each. Their templates quote a text without escaping what is in it, so
that a quote counts as the end of an argument's text only where an argument, or the call, can end.
"""

import re
from collections.abc import Container

from graphcore.serving.tool_formats.call_reader import BodyCallReader
from graphcore.serving.tool_formats.json_scanner import json_string
from graphcore.serving.tool_formats.part_writer import PartWriter
from graphcore.serving.tool_formats.python_literal import OpenTextError, PythonSyntaxError, PythonText

_SPACE = re.compile(r"[\s,]*")
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
_KEY = re.compile(r"\s*([^\W\d][\w.-]{0,199})\s*=\s*")
_ARGUMENT_END = re.compile(r"\s*(?:,?\s*\)|,\s*[^\W\d][\w.-]{0,199}\s*=)")
_MOST_CLOSES = 8  # closing tags that may stand within texts


class PythonCallReader(BodyCallReader):
    """Reads calls in Python's syntax; they are written when the tag that closes them has come.

    Args:
        tools: names of the tools.
        opened: the text that opened the calls.
        close: tag after the calls.
        is_parallel: whether there may be several.
    """

    def __init__(
        self, writer: PartWriter, tools: Container[str], opened: str, close: str, is_parallel: bool = True
    ) -> None:
        super().__init__(writer, opened, close, [close])
        self._tools = tools
        self._is_parallel = is_parallel
        self._num_closes = 0

    def _begin(self, text: str, at: int) -> int:
        return self._read_body(text, at)

    def _end_at(self, literal: str) -> bool:
        self._num_closes += 1
        return self._write(self._body_text())

    def finish(self, is_cut: bool) -> None:
        """Take the end of the answer: a call needs no closing tag."""
        self._num_closes = _MOST_CLOSES
        self._write(self._body_text())

    def _write(self, body: str) -> bool:
        """Write the calls of a text, and return whether the text is over: it is not if it ends within quotes."""
        try:
            calls = python_calls(body)
        except OpenTextError:
            if self._num_closes < _MOST_CLOSES:
                return False
            calls = []
        if not calls or any(name not in self._tools for name, _ in calls) or (len(calls) > 1 and not self._is_parallel):
            self._break()
            return True
        for name, arguments in calls:
            self._write_call(name, arguments)
        return True


def python_calls(body: str) -> list[tuple[str, str]]:
    """Return the name and the arguments, as JSON, of each call in a text; none if the text is no list of calls.

    Raises:
        OpenTextError: the text ends within quotes.
    """
    text = body.strip()
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    reader, found = PythonText(text), []

    def argument() -> str:
        key = _KEY.match(text, reader.at)
        if key is None:
            raise PythonSyntaxError
        reader.at = key.end()
        quote = next((quote for quote in "'\"" if reader.take(quote)), "")
        value = json_string(reader.quoted(quote, _ARGUMENT_END)) if quote else reader.value()
        return f"{json_string(key[1])}: {value}"

    try:
        reader.match(_SPACE)
        while reader.at < len(text):
            name = reader.match(_NAME)
            if not name or not reader.take("("):
                raise PythonSyntaxError
            found.append((name, "{" + ", ".join(reader.items(")", argument)) + "}"))
            reader.match(_SPACE)
    except OpenTextError:
        raise
    except PythonSyntaxError:
        return []
    return found
