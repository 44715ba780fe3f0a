"""Values as Python writes them: 'text', [True, None], {"a": 1.5}; as JSON, which is nearly a part of that syntax."""

import json
import re
from collections.abc import Callable

from graphcore.serving.tool_formats.json_scanner import is_json, json_string

_QUOTED = {quote: re.compile(rf"[^{quote}\\]*(?:\\.[^{quote}\\]*)*{quote}", re.DOTALL) for quote in "'\""}
_NUMBER = re.compile(r"[+-]?(?:\d[\d_]*)?\.?\d*(?:[eE][+-]?\d+)?")
_WORD = re.compile(r"[A-Za-z]+")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPE = re.compile(r"\\(\n|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.)", re.DOTALL)
_ESCAPED = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\\": "\\", "'": "'", '"': '"',
    "/": "/", "\n": "",
}  # fmt: skip
_MOST_LEVELS = 100


class PythonText:
    """Reads values of Python from a text, from its beginning on.

    Args:
        text: the text.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def value(self, level: int = 0) -> str:
        """Take a value and return it as JSON.

        Raises:
            PythonSyntaxError: there is none.
        """
        if level > _MOST_LEVELS:
            raise PythonSyntaxError
        for quote in "'\"":
            if self.take(quote):
                return json_string(self.quoted(quote))
        if self.take("{"):
            return "{" + ", ".join(self.items("}", lambda: self._member(level + 1))) + "}"
        for opened, closed in ("[]", "()"):
            if self.take(opened):
                return "[" + ", ".join(self.items(closed, lambda: self.value(level + 1))) + "]"
        return self._scalar()

    def quoted(self, quote: str, end: re.Pattern[str] | None = None) -> str:
        """Take a text up to its closing quote, and return it.

        Args:
            end: what must follow the closing quote, so that other quotes are part of the text; None for anything.

        Raises:
            OpenTextError: no quote closes it.
        """
        start = self.at
        while match := _QUOTED[quote].match(self.text, self.at):
            self.at = match.end()
            if end is None or end.match(self.text, self.at):
                return unescaped(self.text[start : self.at - 1])
        raise OpenTextError

    def items(self, closed: str, read: Callable[[], str]) -> list[str]:
        """Take what stands up to a bracket, with a comma after the last item or not, and return the items."""
        items: list[str] = []
        while not self.take(closed):
            if items and not self.take(","):
                raise PythonSyntaxError
            if items and self.take(closed):
                break
            items.append(read())
        return items

    def match(self, pattern: re.Pattern[str]) -> str:
        """Take what a pattern matches, and return it; empty if it matches nothing."""
        match = pattern.match(self.text, self.at)
        self.at = self.at if match is None else match.end()
        return "" if match is None else match[0]

    def take(self, mark: str) -> bool:
        """Skip white space, and return whether the mark follows, which is taken then."""
        while self.text[self.at : self.at + 1].isspace():
            self.at += 1
        is_here = self.text.startswith(mark, self.at)
        self.at += len(mark) if is_here else 0
        return is_here

    def _member(self, level: int) -> str:
        key = self.value(level)
        if not key.startswith('"') or not self.take(":"):
            raise PythonSyntaxError
        return f"{key}: {self.value(level)}"

    def _scalar(self) -> str:
        self.take("")
        word = self.match(_WORD)
        found = _WORDS.get(word, "") if word else _json_number(self.match(_NUMBER).replace("_", ""))
        if not found:
            raise PythonSyntaxError
        return found


class PythonSyntaxError(Exception):
    """The text is not in Python's syntax."""


class OpenTextError(PythonSyntaxError):
    """The text ends within quotes."""


def literal_json(text: str) -> str | None:
    """Return the JSON of a text that is one value of Python; None if it is not."""
    reader = PythonText(text)
    try:
        found = reader.value()
    except PythonSyntaxError:
        return None
    return None if text[reader.at :].strip() else found


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


def unescaped(text: str) -> str:
    """Return the text of what stands between quotes."""
    return _ESCAPE.sub(_unescaped, text)


def _unescaped(match: re.Match[str]) -> str:
    code = match[1]
    if code in _ESCAPED:
        return _ESCAPED[code]
    if code[0] in "xuU" and len(code) > 1:
        value = int(code[1:], 16)
        return chr(value) if value < 0x110000 else match[0]
    return chr(int(code, 8)) if code.isdigit() else match[0]
