"""How rows of token ids are cut into pieces, and which pieces run in one pass.

row 0   ====|====|=       borders are every `chunk` tokens, so they depend on the row alone
row 1   ==|
pass    0    1    2       a pass takes the next piece of as many rows as there is room for, first rows first
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


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
