"""Prints a text while its ids arrive one by one.

Decoding each id alone is wrong three ways: a character may be spread over ids (half of it decodes to U+FFFD), the first
space of a SentencePiece text is dropped and no other, and a run of byte tokens (`<0xE4>`) is text only as a whole. So a
window of the last few ids is decoded, and what was printed of it is counted:

    ids seen   ... a b c | d e f g          | dropped from the window, window kept
    its text             "..printed..|new"   a last U+FFFD may yet become a character and waits
"""

import re

from graphcore.tokenizer.tokenizer import Tokenizer

_UNDECIDED = "\ufffd"
_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
_LONGEST_WINDOW = 12
_KEPT = 3
"""Ids that stay when the window is cut: an unfinished character is at most three bytes, so at most three ids."""


class IncrementalDecoder:
    """Yields, id by id, pieces of text whose concatenation is `tokenizer.decode` of all ids.

    Args:
        tokenizer: whose ids.
        skip_special_tokens: as in `Tokenizer.decode`.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._window: list[int] = []
        self._printed = 0  # characters of the window's text that were returned already

    def push(self, token_id: int) -> str:
        """Take one id and return the text that is now certain, often empty."""
        piece = self._tokenizer.id_to_piece(token_id)
        if not piece or token_id in self._skipped:
            return ""
        self._window.append(token_id)
        if _BYTE_PIECE.fullmatch(piece):
            return ""  # the run of bytes may go on, and an invalid end changes how its beginning decodes
        text = self._text()
        certain = text[self._printed :].removesuffix(_UNDECIDED)
        self._printed += len(certain)
        if len(self._window) > _LONGEST_WINDOW:
            waiting = len(text) - self._printed
            del self._window[:-_KEPT]
            self._printed = len(self._text()) - waiting
        return certain

    def flush(self) -> str:
        """Return what still waits, an unfinished character as U+FFFD; the next id starts a new text."""
        rest = self._text()[self._printed :]
        self._window.clear()
        self._printed = 0
        return rest

    def _text(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)
