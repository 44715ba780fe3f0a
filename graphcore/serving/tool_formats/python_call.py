"""Calls as Python writes them: f(a=1, b="text", c=[True, {"d": None}]), one or several.

LFM2 puts them in a list, and OLMo 3 on a line each. Their templates quote a text without escaping what is in it, so
that a quote counts as the end of an argument's text only where an argument, or the call, can end.
"""

import json
import re
from collections.abc import Callable, Container

from graphcore.serving.tool_formats.call_reader import CallReader
from graphcore.serving.tool_formats.json_scanner import is_json
from graphcore.serving.tool_formats.literal_search import LiteralSearch
from graphcore.serving.tool_formats.part_writer import PartWriter
from graphcore.serving.tool_formats.schema_types import json_string

_SPACE = re.compile(r"[\s,]*")
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
_KEY = re.compile(r"\s*([^\W\d][\w.-]{0,199})\s*=\s*")
_QUOTED = {quote: re.compile(rf"[^{quote}\\]*(?:\\.[^{quote}\\]*)*{quote}", re.DOTALL) for quote in "'\""}
_ARGUMENT_END = re.compile(r"\s*(?:,?\s*\)|,\s*[^\W\d][\w.-]{0,199}\s*=)")
_NUMBER = re.compile(r"[+-]?(?:\d[\d_]*)?\.?\d*(?:[eE][+-]?\d+)?")
_WORD = re.compile(r"[A-Za-z]+")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPE = re.compile(r"\\(\n|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.)", re.DOTALL)
_ESCAPED = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\\": "\\", "'": "'", '"': '"',
    "/": "/", "\n": "",
}  # fmt: skip
_MOST_LEVELS = 100
_MOST_CLOSES = 8  # closing tags that may stand within texts


class PythonCallReader(CallReader):
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
        super().__init__(opened, close)
        self._writer = writer
        self._tools = tools
        self._is_parallel = is_parallel
        self._search = LiteralSearch([close])
        self._body: list[str] = []
        self._tail = ""  # end of the body so far, if it may begin the closing tag
        self._num_closes = 0

    def _begin(self, text: str, at: int) -> int:
        window, start = (self._tail + text[at:], 0) if self._tail else (text, at)
        found, close = self._search.search(window, start)
        if not close:
            found -= self._search.held(window, start)
        self._body.append(window[start:found])
        self._tail = "" if close else window[found:]
        if close:
            self._num_closes += 1
            if not self._write("".join(self._body)):
                self._body.append(close)
            return len(text) - (len(window) - found - len(close))
        return len(text)

    def finish(self) -> None:
        """Take the end of the answer: a call needs no closing tag."""
        self._num_closes = _MOST_CLOSES
        self._write("".join(self._body) + self._tail)

    def _write(self, body: str) -> bool:
        """Write the calls of a text, and return whether the text is over: it is not if it ends within quotes."""
        try:
            calls = python_calls(body)
        except _OpenTextError:
            if self._num_closes < _MOST_CLOSES:
                return False
            calls = []
        if not calls or any(name not in self._tools for name, _ in calls) or (len(calls) > 1 and not self._is_parallel):
            self._break()
            return True
        for name, arguments in calls:
            self._writer.begin(name)
            self._writer.arguments(arguments)
        self._written()
        self.is_complete = self.is_done = True
        return True


def python_calls(body: str) -> list[tuple[str, str]]:
    """Return the name and the arguments, as JSON, of each call in a text; none if the text is no list of calls."""
    text = body.strip()
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    try:
        return _Calls(text).whole()
    except _OpenTextError:
        raise
    except _SyntaxError:
        return []


class _Calls:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def whole(self) -> list[tuple[str, str]]:
        found = []
        self._match(_SPACE)
        while self._at < len(self._text):
            name = self._match(_NAME)
            if not name or not self._take("("):
                raise _SyntaxError
            found.append((name, self._arguments()))
            self._match(_SPACE)
        return found

    def _arguments(self) -> str:
        return "{" + ", ".join(self._items(")", self._argument)) + "}"

    def _argument(self) -> str:
        key = _KEY.match(self._text, self._at)
        if key is None:
            raise _SyntaxError
        self._at = key.end()
        return f"{json_string(key[1])}: {self._value(0, is_argument=True)}"

    def _items(self, closed: str, read: Callable[[], str]) -> list[str]:
        """Return what stands up to a bracket, with a comma after the last item or not."""
        items: list[str] = []
        while not self._take(closed):
            if items and not self._take(","):
                raise _SyntaxError
            if items and self._take(closed):
                break
            items.append(read())
        return items

    def _value(self, level: int, is_argument: bool = False) -> str:
        if level > _MOST_LEVELS:
            raise _SyntaxError
        for quote in "'\"":
            if self._take(quote):
                return json_string(self._quoted(quote, is_argument))
        if self._take("{"):
            return "{" + ", ".join(self._items("}", lambda: self._member(level + 1))) + "}"
        for opened, closed in ("[]", "()"):
            if self._take(opened):
                return "[" + ", ".join(self._items(closed, lambda: self._value(level + 1))) + "]"
        return self._scalar()

    def _quoted(self, quote: str, is_argument: bool) -> str:
        start = self._at
        while match := _QUOTED[quote].match(self._text, self._at):
            self._at = match.end()
            if not is_argument or _ARGUMENT_END.match(self._text, self._at):
                return _ESCAPE.sub(_unescaped, self._text[start : self._at - 1])
        raise _OpenTextError

    def _member(self, level: int) -> str:
        key = self._value(level)
        if not key.startswith('"') or not self._take(":"):
            raise _SyntaxError
        return f"{key}: {self._value(level)}"

    def _scalar(self) -> str:
        self._take("")
        word = self._match(_WORD)
        if word:
            return _WORDS.get(word) or self._fail()
        number = self._match(_NUMBER).replace("_", "")
        return _json_number(number) or self._fail()

    def _fail(self) -> str:
        raise _SyntaxError

    def _match(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._at)
        self._at = self._at if match is None else match.end()
        return "" if match is None else match[0]

    def _take(self, mark: str) -> bool:
        """Skip white space, and return whether the mark follows, which is taken then."""
        while self._text[self._at : self._at + 1].isspace():
            self._at += 1
        is_here = self._text.startswith(mark, self._at)
        self._at += len(mark) if is_here else 0
        return is_here


def _json_number(text: str) -> str:
    """Return a number of Python as JSON; empty if it is none."""
    bare = text.removeprefix("+")
    if is_json(bare):
        return bare
    for kind in (int, float):
        try:
            return json.dumps(kind(bare), allow_nan=False)
        except ValueError:
            pass
    return ""


def _unescaped(match: re.Match[str]) -> str:
    code = match[1]
    if code in _ESCAPED:
        return _ESCAPED[code]
    if code[0] in "xuU" and len(code) > 1:
        value = int(code[1:], 16)
        return chr(value) if value < 0x110000 else match[0]
    return chr(int(code, 8)) if code.isdigit() else match[0]


class _SyntaxError(Exception):
    """The text is not in Python's syntax."""


class _OpenTextError(_SyntaxError):
    """The text ends within quotes."""
