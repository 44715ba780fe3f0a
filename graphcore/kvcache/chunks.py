"""Chunk boundaries of a prompt, and the positions from which it can continue with the same bits as from its start."""

from collections.abc import Sequence
from dataclasses import dataclass

BLOCK = 64  # tokens that are compared at once


@dataclass(frozen=True)
class Chunks:
    """The chunk boundaries of prompts.

    Attributes:
        size: most tokens of a chunk; boundaries lie at its multiples.
        min_invariant: fewest tokens of a chunk that is batch-invariant: rows have the same bits in any longer one. It
            is `size` where the length of a chunk may choose how it is multiplied: only whole chunks are then alike.
    """

    size: int
    min_invariant: int

    def end(self, begin: int, length: int) -> int:
        """Return the end of the chunk that begins at a position of a prompt of `length` tokens."""
        return min(begin // self.size * self.size + self.size, length)

    def start_within(self, position: int, length: int) -> int:
        """Return the last position up to this one from which a prompt can continue with the same bits as from 0."""
        border = position // self.size * self.size
        last = self.end(position, length) - self.min_invariant
        return max(border, min(position, last))

    def invariant_length(self, length: int) -> int:
        """Return how many of a prompt's first tokens have the same bits in every longer prompt."""
        border = length // self.size * self.size
        return length if length - border >= self.min_invariant else border


def common(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Return the length of the common prefix of two token sequences."""
    most, at = min(len(tokens), len(others)), 0
    while at < most and tokens[at : at + BLOCK] == others[at : at + BLOCK]:  # a block at a time is compared in C
        at += BLOCK
    return next((place for place in range(at, most) if tokens[place] != others[place]), most)
