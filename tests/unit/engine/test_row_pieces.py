"""Rows are cut where they would be cut alone, and a pass has no more tokens than there is room for."""

from hypothesis import given
from hypothesis import strategies as st

from graphcore.engine.row_pieces import RowPiece, pieces_of

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=6)


def test_a_pass_takes_the_next_piece_of_as_many_rows_as_there_is_room_for() -> None:
    passes = list(pieces_of([5, 4, 2], chunk=4, most=6))
    assert passes == [
        [RowPiece(0, 0, 4, is_last=False), RowPiece(2, 0, 2, is_last=True)],
        [RowPiece(0, 4, 5, is_last=True), RowPiece(1, 0, 4, is_last=True)],  # a token of a decode step takes no room
    ]


@given(LENGTHS, st.integers(2, 16), st.integers(1, 60))
def test_every_token_runs_once_in_pieces_that_depend_on_its_row_alone(
    lengths: list[int], chunk: int, most: int
) -> None:
    passes = list(pieces_of(lengths, chunk, most))
    for row, length in enumerate(lengths):
        alone = [(piece.begin, piece.end, piece.is_last) for (piece,) in pieces_of([length], chunk, chunk)]
        mine = [(one.begin, one.end, one.is_last) for pieces in passes for one in pieces if one.row == row]
        assert mine == alone
        assert sum(end - begin for begin, end, _ in mine) == length
    for pieces in passes:
        chunks = [piece.tokens for piece in pieces if piece.tokens > 1]
        assert pieces
        assert len(chunks) == 1 or sum(chunks) <= most
