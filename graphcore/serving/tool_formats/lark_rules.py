"""Rules of a Lark grammar as llguidance reads it, and the pieces that the grammars of all families share."""

import json
import re
from collections.abc import Iterable, Mapping

from graphcore.tokenizer.grammar import JSON_OPTIONS

TEXT = "TEXT"
"""Name of the terminal for any text without special tokens; `LarkRules` defines it."""

_SPECIAL = re.compile(r"(<[^<>]+>|\[[A-Z_/]+\])")
_PLAIN_LETTER = re.compile(r"[a-zA-Z0-9_ ]")


class LarkRules:
    """Rules of a grammar, in the order in which they were added."""

    def __init__(self) -> None:
        self._lines = ["%llguidance {}", f"{TEXT}: /(?s:.*)/"]
        self._num_rules = 0

    def add(self, body: str, options: str = "") -> str:
        """Add a rule, and return its name.

        Args:
            options: attributes of the rule, such as "[lazy]".
        """
        self._num_rules += 1
        name = f"rule_{self._num_rules}"
        self._lines.append(f"{name}{options}: {body}")
        return name

    def define(self, name: str, body: str) -> None:
        """Add a rule under a name of its own."""
        self._lines.append(f"{name}: {body}")

    def add_terminal(self, body: str) -> str:
        """Add a terminal, which is matched as one regular expression, and return its name."""
        self._num_rules += 1
        name = f"TERMINAL_{self._num_rules}"
        self._lines.append(f"{name}: {body}")
        return name

    def up_to(self, literal: str, text: str = TEXT) -> str:
        """Add a rule for a text up to the first occurrence of a literal, and return its name."""
        return self.add(f"{text} {quoted_literal(literal)}", "[lazy]")

    def whole(self, start: str) -> str:
        """Return the grammar."""
        return "\n".join([self._lines[0], f"start: {start}", *self._lines[1:]]) + "\n"


def quoted_literal(text: str) -> str:
    """Return a text as a string of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def markup(text: str, special_ids: Mapping[str, int]) -> str:
    """Return the elements for a text whose special tokens, such as <|channel|> and [ARGS], are single tokens.

    Args:
        special_ids: id of each special token, by which llguidance knows those that are not between angle brackets.
    """
    found = []
    for piece in filter(None, _SPECIAL.split(text)):
        if piece.startswith("<") and _SPECIAL.fullmatch(piece):
            found.append(piece)
        else:
            found.append(f"<[{special_ids[piece]}]>" if piece in special_ids else quoted_literal(piece))
    return " ".join(found)


def escaped(text: str) -> str:
    """Return a text for a regular expression between slashes."""
    return "".join(letter if _PLAIN_LETTER.match(letter) else f"\\x{{{ord(letter):x}}}" for letter in text)


def inline_json(schema: Mapping[str, object]) -> str:
    """Return the element for a value under a JSON schema."""
    return "%json " + json.dumps({"x-guidance": JSON_OPTIONS, **schema})


def choice_of(elements: Iterable[str]) -> str:
    """Return the element for one of several."""
    return "(" + " | ".join(elements) + ")"
