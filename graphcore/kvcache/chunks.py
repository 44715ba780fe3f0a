"""Chunk boundaries of a prompt, and the positions from which it can continue with the bits of a whole one."""

from collections.abc import Sequence
from dataclasses import dataclass

BLOCK = 64  # tokens that are compared at once


@dataclass(frozen=True)
class Chunks:
    """Where a prompt's chunks begin and end, and from where it may go on with the bits of a whole one.

    Attributes:
        size: most tokens of a chunk; borders lie at its multiples.
        min_invariant: fewest tokens of a chunk that is batch-invariant: rows have the same bits in any longer one.
    """

    size: int
    min_invariant: int

    def end(self, begin: int, length: int) -> int:
        """Return where the chunk ends that begins at a position of a prompt of that length."""
        return min(begin // self.size * self.size + self.size, length)

    def start_within(self, position: int, length: int) -> int:
        """Return the last position up to this one from which a prompt can go on without another choice of kernels."""
        border = position // self.size * self.size
        last = self.end(position, length) - self.min_invariant
        return max(border, min(position, last))

    def invariant_length(self, length: int) -> int:
        """Return how many of a prompt's first tokens have the bits that they have in every longer prompt."""
        border = length // self.size * self.size
        return length if length - border >= self.min_invariant else border


def common(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Return how many first tokens are the same."""
    most, at = min(len(tokens), len(others)), 0
    while at < most and tokens[at : at + BLOCK] == others[at : at + BLOCK]:  # a block at a time is compared in C
        at += BLOCK
    return next((place for place in range(at, most) if tokens[place] != others[place]), most)
