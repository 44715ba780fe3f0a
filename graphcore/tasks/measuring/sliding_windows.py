"""Sliding windows over the tokens of a text: each scores the tokens that no earlier window scored.

    window of 8, stride 4      text: 0 1 2 3 4 5 6 7 8 9 10 11
                               [. s s s s s s s]                  first: all but the text's first token
                                       [. . . . s s s  s]         then: the last `stride` tokens

Source: transformers' guide "Perplexity of fixed-length models". Where the tokenizer puts a BOS before a text, every
window starts with it: models that were trained with a BOS predict text badly without it (Gemma above all).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from graphcore.errors import ConfigError
from graphcore.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class Window:
    """A window: tokens begin .. end - 1 of the text, of which first .. end - 1 are scored."""

    begin: int
    end: int
    first: int


@dataclass(frozen=True)
class TokenizedText:
    """A text as token ids.

    Attributes:
        prefix: ids that the tokenizer puts before a text: a BOS, or none.
        token_ids: ids of the text itself.
    """

    prefix: list[int]
    token_ids: list[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, text: str) -> "TokenizedText":
        """Return the text's token ids, without the EOS that the tokenizer may put after it."""
        plain = tokenizer.encode(text, add_special_tokens=False)
        marked = tokenizer.encode(text)
        ends = range(len(marked) - len(plain) + 1)
        start = next((at for at in ends if marked[at : at + len(plain)] == plain), 0)
        return cls(marked[:start], plain)

    @property
    def num_scored(self) -> int:
        """Number of tokens that are scored: those with a token before them."""
        return len(self.token_ids) - (not self.prefix)

    def ids_of(self, window: Window) -> tuple[list[int], int]:
        """Return the ids that run in a window, and the index of the first one that is scored."""
        ids = [*self.prefix, *self.token_ids[window.begin : window.end]]
        return ids, len(self.prefix) + window.first - window.begin


def cut_windows(text: TokenizedText, length: int, stride: int) -> Sequence[Window]:
    """Return the windows of a text.

    Args:
        length: most tokens in a window, prefix included.
        stride: tokens from one window's beginning to the next one's.

    Raises:
        ConfigError: the first scored token of a window would have no token before it.
    """
    room, end = length - len(text.prefix), len(text.token_ids)
    most = min(room, length - 1)
    if not 1 <= stride <= most:
        raise ConfigError(
            f"task.stride={stride} does not go with task.window={length}; a window moves by 1 to {most} tokens, so "
            "that each scored token has one before it"
        )
    windows = [Window(0, min(room, end), 0 if text.prefix else 1)]
    while windows[-1].end < end:
        begin = windows[-1].begin + stride
        windows.append(Window(begin, min(begin + room, end), windows[-1].end))
    return windows
