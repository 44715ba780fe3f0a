"""Checks JSON while it is written, so that arguments can be passed on before they are whole."""

import json
import re

_SPACE = " \t\n\r"
_STRING_RUN = re.compile(r'[^"\\\x00-\x1f]*')
_SPACE_RUN = re.compile(r"[ \t\n\r]*")
_HEX = frozenset("0123456789abcdefABCDEF")
_MOST_LEVELS = 200  # readers of JSON that call themselves for each level fail at about 1,000

# What a number may continue with: a digit 1 to 9 is "d" here. States of _WHOLE end a number.
_NUMBER = {
    "minus": {"0": "zero", "d": "integer"},
    "zero": {".": "point", "e": "exponent"},
    "integer": {"0": "integer", "d": "integer", ".": "point", "e": "exponent"},
    "point": {"0": "fraction", "d": "fraction"},
    "fraction": {"0": "fraction", "d": "fraction", "e": "exponent"},
    "exponent": {"0": "digits", "d": "digits", "+": "sign", "-": "sign"},
    "sign": {"0": "digits", "d": "digits"},
    "digits": {"0": "digits", "d": "digits"},
}
_WHOLE = ("zero", "integer", "fraction", "digits")
_CLASSES = {**dict.fromkeys("123456789", "d"), "0": "0", ".": ".", "e": "e", "E": "e", "+": "+", "-": "-"}


class JsonScanner:
    """Scans one JSON value whose text comes in pieces (RFC 8259); linear in its length.

    Attributes:
        is_whole: whether the value has ended. A number ends before the character that follows it.
        is_broken: whether the text is no JSON.
    """

    def __init__(self) -> None:
        self.is_whole = False
        self.is_broken = False
        self._state = "value"
        self._open: list[str] = []  # the closing bracket of each array and object that is open
        self._rest = ""  # rest of a literal such as "true"
        self._hex_left = 0
        self._is_key = False

    def scan(self, text: str, at: int = 0) -> int:
        """Take text from a position on.

        Returns:
            Position after the last character that belongs to the value.
        """
        while at < len(text) and not self.is_whole and not self.is_broken:
            if self._state == "string":
                at = self._scan_string(text, at)
            elif self._state in _NUMBER:
                at = self._scan_number(text, at)
            elif self._state in ("escape", "hex", "literal"):
                at = self._scan_word(text[at], at)
            elif text[at] in _SPACE:
                match = _SPACE_RUN.match(text, at)
                assert match is not None, "a run of no characters matches, too"
                at = match.end()
            else:
                at = self._scan_structure(text[at], at)
        return at

    def _scan_string(self, text: str, at: int) -> int:
        match = _STRING_RUN.match(text, at)
        assert match is not None, "a run of no characters matches, too"
        at = match.end()
        if at == len(text):
            return at
        if text[at] == "\\":
            self._state = "escape"
        elif text[at] != '"':
            return self._break(at)
        elif self._is_key:
            self._state, self._is_key = "colon", False
        else:
            self._end_value()
        return at + 1

    def _scan_number(self, text: str, at: int) -> int:
        while at < len(text):
            after = _NUMBER[self._state].get(_CLASSES.get(text[at], ""))
            if after is None:
                if self._state not in _WHOLE:
                    return self._break(at)
                self._end_value()
                return at
            self._state = after
            at += 1
        return at

    def _scan_word(self, letter: str, at: int) -> int:
        """Take a character of an escape or of true, false or null."""
        if self._state == "literal":
            if letter != self._rest[0]:
                return self._break(at)
            self._rest = self._rest[1:]
            if not self._rest:
                self._end_value()
        elif self._state == "hex":
            if letter not in _HEX:
                return self._break(at)
            self._hex_left -= 1
            self._state = "hex" if self._hex_left else "string"
        elif letter == "u":
            self._state, self._hex_left = "hex", 4
        elif letter in '"\\/bfnrt':
            self._state = "string"
        else:
            return self._break(at)
        return at + 1

    def _scan_structure(self, letter: str, at: int) -> int:
        """Take a character between values, or the first of one."""
        state = self._state
        if state == "colon" and letter == ":":
            self._state = "value"
        elif state == "after" and letter == ",":
            self._state = "key" if self._open[-1] == "}" else "value"
        elif self._open and letter == self._open[-1] and state in ("after", "first key", "first value"):
            self._open.pop()
            self._end_value()
        elif state in ("key", "first key") and letter == '"':
            self._state, self._is_key = "string", True
        elif state in ("value", "first value") and self._begin_value(letter):
            pass
        else:
            return self._break(at)
        return at + 1

    def _begin_value(self, letter: str) -> bool:
        """Return whether a value begins with the character, and begin it."""
        if letter == '"':
            self._state = "string"
        elif letter in "{[" and len(self._open) < _MOST_LEVELS:
            self._open.append("}" if letter == "{" else "]")
            self._state = "first key" if letter == "{" else "first value"
        elif letter in "tfn":
            self._state, self._rest = "literal", {"t": "rue", "f": "alse", "n": "ull"}[letter]
        elif letter == "-":
            self._state = "minus"
        elif letter in _CLASSES and letter.isdigit():
            self._state = "zero" if letter == "0" else "integer"
        else:
            return False
        return True

    def _end_value(self) -> None:
        self._state = "after"
        self.is_whole = not self._open

    def _break(self, at: int) -> int:
        self.is_broken = True
        return at


def is_json(text: str) -> bool:
    """Return whether a text is one JSON value, with white space around it or not."""
    scanner = JsonScanner()
    end = scanner.scan(text + " ")
    return scanner.is_whole and not text[end:].strip(_SPACE)


def json_string(text: str) -> str:
    """Return a text as JSON; characters beyond ASCII stay, except halves of pairs, which no UTF-8 has."""
    whole = json.dumps(text, ensure_ascii=False)
    return whole if whole.isascii() or not re.search("[\ud800-\udfff]", whole) else json.dumps(text)
