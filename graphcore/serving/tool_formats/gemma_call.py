"""Calls as Gemma 4 writes them: call:f{a:1,b:<|"|>text<|"|>,c:[true,{d:null}]}.

Models also write the quotes of JSON and Python around texts and keys, and leave out the opening <|"|> of a text, which
then ends at the lone one behind it.

transformers' template for them is not used: it takes no name with a dot or hyphen, and turns bare words in braces that
are within a text's quotes into keys.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Collection, Mapping
from typing import Any

from graphcore.serving.tool_formats.call_reader import BodyCallReader
from graphcore.serving.tool_formats.json_scanner import is_json, json_string
from graphcore.serving.tool_formats.part_writer import PartWriter
from graphcore.serving.tool_formats.python_literal import unescaped
from graphcore.serving.tool_formats.schema_types import json_of, property_schema, resolved, types_of

QUOTE = '<|"|>'
_MOST_NAME = 200  # characters
_MOST_LEVELS = 100
_MOST_CLOSES = 8  # closing tags that may stand within texts
_BARE = re.compile(r"[^,{}\[\]]*")
_KEY = re.compile(r"[^:,{}\[\]]*")
_VALUE_END = re.compile(r"\s*[,}\]]")  # behind a closing quote
_KEY_END = re.compile(r"\s*:")
_MEMBER = re.compile(r"(?:^|[{,])\s*[\"']?([^\s:,{}\[\]\"']+)[\"']?\s*:\s*")
_BEFORE_VALUES = ("", ":", ",", "[", "{")
_BRACKETS = {"[": "array", "{": "object"}
_SPACE = re.compile(r"\s*")
_QUOTED = {quote: re.compile(rf"[^{quote}\\]*(?:\\.[^{quote}\\]*)*{quote}", re.DOTALL) for quote in "'\""}
_ANYTHING: Mapping[str, Any] = {}
_WORDS = {"None": "null", "True": "true", "False": "false"}


class GemmaCallReader(BodyCallReader):
    """Reads a call in Gemma's syntax; it is written when its closing tag has come, or what else ends it.

    Args:
        schemas: JSON schema of each tool's parameters, by name.
        opened: the text that opened the call.
        tag, close: tags before and after a call.
    """

    def __init__(
        self, writer: PartWriter, schemas: Mapping[str, Mapping[str, Any]], opened: str, tag: str, close: str
    ) -> None:
        super().__init__(writer, opened, close, [tag, close])
        self._schemas = schemas
        self._name = ""
        self._num_closes = 0

    def _begin(self, text: str, at: int) -> int:
        self._expect(self._called, "call:")
        return at

    def _called(self, found: str) -> None:
        self._phase = self._read_name

    def _read_name(self, text: str, at: int) -> int:
        end = text.find("{", at, at + _MOST_NAME)
        piece = text[at : end if end >= 0 else at + _MOST_NAME]
        self._name += piece
        if end < 0 and len(self._name) < _MOST_NAME and "\n" not in self._name:
            return at + len(piece)
        if self._name not in self._schemas or end < 0:
            self._break()
            return at + len(piece)
        self._phase = self._read_body
        return end + 1

    def _end_at(self, literal: str) -> bool:
        self._num_closes += 1
        return self._write(literal)

    def finish(self, is_cut: bool) -> None:
        """Take the end of the answer: a call needs no closing tag."""
        if self._phase == self._read_body:
            self._num_closes = _MOST_CLOSES
            self._write("")

    def _write(self, literal: str) -> bool:
        """Write the call, and return whether the text is over: it is not if it ends within quotes."""
        body = self._body_text()
        try:
            arguments, end = gemma_arguments(body, self._schemas[self._name])
        except _OpenTextError:
            if self._num_closes < _MOST_CLOSES:
                return False
            self._break(literal)
        except _SyntaxError:
            self._break(literal)
        else:
            is_closed = literal == self._close and not body[end:].strip()
            self._write_call(self._name, arguments, "" if is_closed else body[end:] + literal)
        return True


def gemma_arguments(body: str, schema: Mapping[str, Any]) -> tuple[str, int]:
    """Return the JSON of a call's arguments, and the position behind the brace that closes them.

    Args:
        body: text behind the outermost brace.
        schema: JSON schema of the tool's parameters.

    Raises:
        _SyntaxError: they are not in Gemma's syntax.
    """
    arguments = _Arguments(body, schema)
    return arguments.whole(), arguments.at


class _Arguments:
    def __init__(self, text: str, root: Mapping[str, Any]) -> None:
        self.at = 0
        self._text = text
        self._root = root
        self._types: dict[int, frozenset[str]] = {}  # by the identity of a schema within the root
        self._openings, self._lone = _quotes(text)
        names = _names_in(root) if self._lone else set()
        self._starts = [_start_of_text(text, lone, names) for lone in self._lone]
        self._endless: set[tuple[str, re.Pattern[str]]] = set()  # quotes that nothing closes from here on

    def whole(self) -> str:
        return self._object(self._root, 0)

    def _object(self, schema: object, level: int) -> str:
        members: list[str] = []
        while not self._take("}"):
            if members and not self._take(","):
                raise _SyntaxError
            key = self._key()
            members.append(f"{json_string(key)}: {self._value(property_schema(schema, key, self._root), level + 1)}")
        return "{" + ", ".join(members) + "}"

    def _array(self, schema: object, level: int) -> str:
        items: list[str] = []
        while not self._take("]"):
            if items and not self._take(","):
                raise _SyntaxError
            items.append(self._value(schema, level + 1))
        return "[" + ", ".join(items) + "]"

    def _value(self, schema: object, level: int) -> str:
        if level > _MOST_LEVELS:
            raise _SyntaxError
        types = self._types.get(id(schema))
        if types is None:
            types = self._types[id(schema)] = types_of(schema, self._root)
        quoted = self._quoted(_VALUE_END)
        if quoted is None:
            quoted = self._before_lone_quote(types)
        if quoted is not None:
            return json_string(quoted) if not types or "string" in types else json_of(quoted, types)
        if self._take("{"):
            return self._object(schema, level)
        if self._take("["):
            return self._array(resolved(schema, self._root).get("items", _ANYTHING), level)
        match = _BARE.match(self._text, self.at)
        assert match is not None, "a run of no characters matches, too"
        self.at = match.end()
        return self._bare(match[0].strip(), types)

    def _bare(self, word: str, types: frozenset[str]) -> str:
        """Return the JSON of a value without quotes: a number, true or the like, or a text that the schema allows."""
        if not word:
            raise _SyntaxError
        found = json_of(word, types)
        if not found.startswith('"') or types == {"string"}:
            return found
        known = _WORDS.get(word, word)
        if is_json(known):
            return known
        if "string" not in types:
            raise _SyntaxError
        return found

    def _key(self) -> str:
        quoted = self._quoted(_KEY_END)
        if quoted is None:
            match = _KEY.match(self._text, self.at)
            assert match is not None, "a run of no characters matches, too"
            self.at, quoted = match.end(), match[0].strip()
            if not quoted:
                raise _SyntaxError
        if not self._take(":"):
            raise _SyntaxError
        return quoted

    def _quoted(self, end: re.Pattern[str]) -> str | None:
        """Take a text in quotes of Gemma, JSON or Python; None if none is here.

        Args:
            end: what must follow the closing quote of JSON or Python.
        """
        if self._take(QUOTE):
            close = self._text.find(QUOTE, self.at)
            if close < 0:
                raise _OpenTextError
            start, self.at = self.at, close + len(QUOTE)
            return self._text[start:close]
        quote = self._text[self.at : self.at + 1]
        if quote not in _QUOTED or (quote, end) in self._endless:
            return None
        after = self.at + 1
        while match := _QUOTED[quote].match(self._text, after):
            after = match.end()
            if end.match(self._text, after):
                start, self.at = self.at, after
                return _without_quotes(self._text[start:after])
        self._endless.add((quote, end))  # further ones have no end, either
        return None

    def _before_lone_quote(self, types: frozenset[str]) -> str | None:
        """Take a text that has a closing quote alone; None if none is here."""
        nearest = bisect_left(self._lone, self.at)
        if nearest == len(self._lone) or self._starts[nearest] > self.at:
            return None
        lone, bracket = self._lone[nearest], self._text[self.at : self.at + 1]
        if bisect_left(self._openings, self.at) < bisect_left(self._openings, lone):  # another text comes first
            return None
        if bracket in _BRACKETS and (not types or _BRACKETS[bracket] in types):
            return None
        start, self.at = self.at, lone + len(QUOTE)
        return self._text[start:lone]

    def _take(self, mark: str) -> bool:
        """Skip white space, and return whether the mark follows, which is taken then."""
        match = _SPACE.match(self._text, self.at)
        assert match is not None, "a run of no characters matches, too"
        self.at = match.end()
        is_here = self._text.startswith(mark, self.at)
        self.at += len(mark) if is_here else 0
        return is_here


def _quotes(text: str) -> tuple[list[int], list[int]]:
    """Return the positions of the quotes that open a text, and of lone ones, which close one that none has opened."""
    openings: list[int] = []
    lone: list[int] = []
    is_open = False
    at = text.find(QUOTE)
    while at >= 0:
        before = at
        while before and text[before - 1].isspace():
            before -= 1
        if is_open:
            is_open = False
        elif text[before - 1 : before] in _BEFORE_VALUES or not _VALUE_END.match(text, at + len(QUOTE)):
            openings.append(at)
            is_open = True
        else:
            lone.append(at)
        at = text.find(QUOTE, at + len(QUOTE))
    return openings, lone


def _start_of_text(text: str, lone: int, names: Collection[str]) -> int:
    """Return the position at or behind which the text begins that a lone quote closes: behind the last known key."""
    start = text.rfind(QUOTE, 0, lone)
    start = 0 if start < 0 else start + len(QUOTE)
    for key in _MEMBER.finditer(text, start, lone):
        if not names or key[1] in names:
            start = key.end()
    return start


def _names_in(schema: object, level: int = 0) -> set[str]:
    """Return the names of all properties in a schema, at any depth."""
    found: set[str] = set()
    if isinstance(schema, Mapping) and level <= _MOST_LEVELS:
        for word, inner in schema.items():
            if word in ("properties", "$defs", "definitions") and isinstance(inner, Mapping):
                found |= set(inner) if word == "properties" else set()
                found = found.union(*(_names_in(one, level + 1) for one in inner.values()))
            elif isinstance(inner, list):
                found = found.union(*(_names_in(one, level + 1) for one in inner))
            else:
                found |= _names_in(inner, level + 1)
    return found


def _without_quotes(text: str) -> str:
    """Return a text that JSON or Python writes with its quotes."""
    if text[0] == '"' and is_json(text):
        return str(json.loads(text))
    return unescaped(text[1:-1])


class _SyntaxError(Exception):
    """The text is not in Gemma's syntax."""


class _OpenTextError(_SyntaxError):
    """The text ends within quotes."""
