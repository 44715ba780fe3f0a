"""Text from ids that arrive one by one: whole characters, up to the first stop string.

Decoding each id alone is wrong in three ways: a character may be spread over ids (half of it decodes to U+FFFD), only
the first space of a SentencePiece text is dropped, and a run of byte tokens (`<0xE4>`) is text only as a whole. So a
window of the last few ids is decoded, and the part of its text that was already printed is counted:

    ids seen   ... a b c | d e f g          | dropped from the window, window kept
    its text             "..printed..|new"   a last U+FFFD may still become a character and waits
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from graphcore.errors import ConfigError
from graphcore.tokenizer.tokenizer import PieceKind, Tokenizer

_UNDECIDED = "\ufffd"
_LONGEST_WINDOW = 12
_KEPT = 3
"""Ids that stay when the window is cut: an unfinished character is at most three bytes, so at most three ids."""


class IncrementalDecoder:
    """Yields, id by id, pieces of text whose concatenation is `tokenizer.decode` of all ids.

    Args:
        tokenizer: tokenizer of the ids.
        skip_special_tokens: as in `Tokenizer.decode`.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._window: list[int] = []
        self._printed = 0  # characters of the window's text that were already returned

    def push(self, token_id: int) -> str:
        """Append one id and return the text that has become final, which is often empty."""
        kind = self._tokenizer.kind_of_piece(token_id)
        if kind is PieceKind.NONE or token_id in self._skipped:
            return ""
        self._window.append(token_id)
        if kind is PieceKind.BYTE:
            return ""  # the run of bytes may continue, and an invalid end changes how its beginning decodes
        text = self._text()
        certain = text[self._printed :].removesuffix(_UNDECIDED)
        self._printed += len(certain)
        if len(self._window) > _LONGEST_WINDOW:
            waiting = len(text) - self._printed
            del self._window[:-_KEPT]
            self._printed = len(self._text()) - waiting
        return certain

    def flush(self) -> str:
        """Return the text still held back, with an unfinished character as U+FFFD; the next id starts a new text."""
        rest = self._text()[self._printed :]
        self._window.clear()
        self._printed = 0
        return rest

    def _text(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)


class StopResult(NamedTuple):
    """The text that may be printed, and whether a stop string ended it."""

    text: str
    is_stopped: bool


class StopCondition(Protocol):
    """What ends one answer's text.

    Attributes:
        found: the stop string that ended the text; None before.
        is_armed: whether the text that is pushed may end the answer; an answer of `min_tokens` sets it.
    """

    found: str | None
    is_armed: bool

    def push(self, text: str) -> StopResult:
        """Append the next piece of text and return the text that has become final."""

    def flush(self) -> str:
        """Return the text that is held back, at the answer's end."""


class StopStrings:
    """Ends a text at the first stop string, even if it arrives in pieces.

    Text that could be the beginning of a stop string is held back until it is known not to be one, so that no part of a
    stop string is ever printed. The text ends where a stop string is first completed, which does not depend on how it
    was cut into pieces.

    Args:
        stops: texts that end the generation and are not part of it.

    Attributes:
        found: the stop string that ended the text; None before.
        is_armed: whether text is looked at; False passes it on.

    Raises:
        ConfigError: a stop string is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise ConfigError("stop holds an empty string, which would end every text at once; leave it out")
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None
        self.is_armed = True

    def push(self, text: str) -> StopResult:
        """Append the next piece of text and return the text that has become final."""
        if not self._stops or not self.is_armed:
            return StopResult(text, False)
        seen = self._held + text
        found = [(seen.find(stop) + len(stop), seen.find(stop), stop) for stop in self._stops if stop in seen]
        if found:
            self._held = ""
            _, begin, self.found = min(found)
            return StopResult(seen[:begin], True)
        held = max((_overlap(seen, stop) for stop in self._stops), default=0)
        self._held = seen[len(seen) - held :]
        return StopResult(seen[: len(seen) - held], False)

    def flush(self) -> str:
        """Return the text that was held back but turned out not to begin a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of the text are the beginning of the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
