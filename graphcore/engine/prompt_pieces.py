"""How rows of token ids are cut into pieces, and which pieces run in one pass.

row 0   ====|====|=       borders are every `chunk` tokens, so they depend on the row alone
row 1   ==|
pass    0    1    2       a pass takes the next piece of as many rows as there is room for, first rows first
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

BLOCK = 64  # tokens that are compared at once


@dataclass(frozen=True)
class Chunks:
    """Where a prompt's chunks begin and end, and from where it may go on with the bits of a whole one.

    Attributes:
        size: most tokens of a chunk; borders lie at its multiples.
        alike: fewest tokens of a chunk whose rows have the same bits in any longer chunk.
    """

    size: int
    alike: int

    def end(self, begin: int, length: int) -> int:
        """Return where the chunk ends that begins at a position of a prompt of that length."""
        return min(begin // self.size * self.size + self.size, length)

    def start_within(self, position: int, length: int) -> int:
        """Return the last position up to this one from which a prompt can go on without another choice of kernels."""
        border = position // self.size * self.size
        last = self.end(position, length) - self.alike
        return max(border, min(position, last))

    def sure(self, length: int) -> int:
        """Return how many of a prompt's first tokens have the bits that they have in every longer prompt."""
        border = length // self.size * self.size
        return length if length - border >= self.alike else border


@dataclass(frozen=True)
class RowPiece:
    """Some tokens of a row that run together.

    Attributes:
        row: index of the row.
        begin: index of its first token in the row.
        end: index after its last one.
        is_last: bool, whether the row ends with it.
    """

    row: int
    begin: int
    end: int
    is_last: bool

    @property
    def tokens(self) -> int:
        """Number of its tokens."""
        return self.end - self.begin


def pieces_of(lengths: Sequence[int], chunk: int, most: int) -> Iterator[list[RowPiece]]:
    """Yield the pieces of each pass.

    Args:
        lengths: tokens of each row.
        chunk: most tokens of a piece.
        most: tokens in one pass, those of pieces of one token apart; one piece runs even if it is longer.
    """
    done = [0] * len(lengths)
    while any(begin < length for begin, length in zip(done, lengths, strict=True)):
        pieces, left = list[RowPiece](), most
        for row, length in enumerate(lengths):
            piece = RowPiece(row, done[row], min(done[row] + chunk, length), done[row] + chunk >= length)
            if piece.tokens == 1:
                pieces.append(piece)
            elif piece.tokens > 1 and (left == most or piece.tokens <= left):
                pieces.append(piece)
                left -= piece.tokens
        for piece in pieces:
            done[piece.row] = piece.end
        yield pieces


def common(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Return how many first tokens are the same."""
    most, at = min(len(tokens), len(others)), 0
    while at < most and tokens[at : at + BLOCK] == others[at : at + BLOCK]:  # a block at a time is compared in C
        at += BLOCK
    return next((place for place in range(at, most) if tokens[place] != others[place]), most)
