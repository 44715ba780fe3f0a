"""Calls as Gemma 4 writes them: call:f{a:1,b:<|"|>text<|"|>,c:[true,{d:null}]}.

transformers' template for them is not used: it takes no name with a dot or hyphen, and turns bare words in braces that
are within a text's quotes into keys.
"""

import re
from collections.abc import Mapping
from typing import Any

from graphcore.serving.tool_formats.call_reader import CallReader
from graphcore.serving.tool_formats.json_scanner import is_json
from graphcore.serving.tool_formats.part_writer import PartWriter
from graphcore.serving.tool_formats.schema_types import json_of, json_string, property_schema, resolved, types_of

QUOTE = '<|"|>'
_MARK = re.compile(r'<\|"\|>|[{}\[\]]')
_MOST_NAME = 200  # characters
_MOST_LEVELS = 100
_BARE = re.compile(r"[^,{}\[\]]*")
_KEY = re.compile(r"[^:,{}\[\]]*")
_ANYTHING: Mapping[str, Any] = {}
_WORDS = {"None": "null", "True": "true", "False": "false"}


class GemmaCallReader(CallReader):
    """Reads a call in Gemma's syntax; it is written when its last brace has come.

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
        self._body: list[str] = []
        self._tail = ""  # end of the body so far, if it may begin a quote
        self._is_quoted = False
        self._open = ["}"]  # the closing bracket of each that is open

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

    def _read_body(self, text: str, at: int) -> int:
        window, start = (self._tail + text[at:], 0) if self._tail else (text, at)
        begun = start
        while match := _MARK.search(window, start):
            start = match.end()
            self._count(match[0])
            if not self._open:
                self._body.append(window[begun : match.start()])
                self._write()
            if self.is_broken or not self._open:
                return len(text) - (len(window) - start)
        kept = next((size for size in range(len(QUOTE) - 1, 0, -1) if window.endswith(QUOTE[:size], start)), 0)
        self._body.append(window[begun : len(window) - kept])
        self._tail = window[len(window) - kept :]
        return len(text)

    def _count(self, mark: str) -> None:
        if mark == QUOTE:
            self._is_quoted = not self._is_quoted
        elif self._is_quoted:
            pass
        elif mark in "{[" and len(self._open) < _MOST_LEVELS:
            self._open.append("}" if mark == "{" else "]")
        elif mark == self._open[-1]:
            self._open.pop()
        else:
            self._break()

    def _write(self) -> None:
        arguments = gemma_arguments("".join(self._body), self._schemas[self._name])
        if arguments is None:
            self._break()
            return
        self._writer.begin(self._name)
        self._writer.arguments(arguments)
        self._end()


def gemma_arguments(body: str, schema: Mapping[str, Any]) -> str | None:
    """Return the JSON of a call's arguments; None if they are not in Gemma's syntax.

    Args:
        body: text between the outermost braces; its brackets are balanced and at most 100 deep.
        schema: JSON schema of the tool's parameters.
    """
    return _Arguments(body + "}", schema).whole()


class _Arguments:
    def __init__(self, text: str, root: Mapping[str, Any]) -> None:
        self._text = text
        self._root = root
        self._at = 0
        self._types: dict[int, frozenset[str]] = {}  # by the identity of a schema within the root

    def whole(self) -> str | None:
        try:
            found = self._object(self._root)
        except _SyntaxError:
            return None
        return found if self._at == len(self._text) else None

    def _value(self, schema: object) -> str:
        self._skip_space()
        types = self._types.get(id(schema))
        if types is None:
            types = self._types[id(schema)] = types_of(schema, self._root)
        if self._take(QUOTE):
            quoted = self._quoted()
            return json_string(quoted) if not types or "string" in types else json_of(quoted, types)
        if self._take("{"):
            return self._object(schema)
        if self._take("["):
            return self._array(resolved(schema, self._root).get("items", _ANYTHING))
        match = _BARE.match(self._text, self._at)
        assert match is not None, "a run of no characters matches, too"
        self._at = match.end()
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

    def _object(self, schema: object) -> str:
        members: list[str] = []
        self._skip_space()
        while not self._take("}"):
            if members and not self._take(","):
                raise _SyntaxError
            key = self._key()
            members.append(f"{json_string(key)}: {self._value(property_schema(schema, key, self._root))}")
            self._skip_space()
        return "{" + ", ".join(members) + "}"

    def _array(self, schema: object) -> str:
        items: list[str] = []
        self._skip_space()
        while not self._take("]"):
            if items and not self._take(","):
                raise _SyntaxError
            items.append(self._value(schema))
            self._skip_space()
        return "[" + ", ".join(items) + "]"

    def _key(self) -> str:
        self._skip_space()
        if self._take(QUOTE):
            key = self._quoted()
            self._skip_space()
        else:
            match = _KEY.match(self._text, self._at)
            assert match is not None, "a run of no characters matches, too"
            self._at, key = match.end(), match[0].strip()
            if not key:
                raise _SyntaxError
        if not self._take(":"):
            raise _SyntaxError
        return key

    def _quoted(self) -> str:
        end = self._text.find(QUOTE, self._at)
        if end < 0:
            raise _SyntaxError
        start, self._at = self._at, end + len(QUOTE)
        return self._text[start:end]

    def _skip_space(self) -> None:
        while self._text[self._at : self._at + 1].isspace():
            self._at += 1

    def _take(self, mark: str) -> bool:
        is_here = self._text.startswith(mark, self._at)
        self._at += len(mark) if is_here else 0
        return is_here


class _SyntaxError(Exception):
    """The text is not in Gemma's syntax."""
