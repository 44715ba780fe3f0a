"""Rows are cut where they would be cut alone and whole, and a pass has no more tokens than there is room for."""

from hypothesis import given
from hypothesis import strategies as st

from graphcore.engine.forward_pass import RowChunk, chunks_by_pass
from graphcore.kvcache.chunks import Chunks

ROWS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=6)


def test_a_pass_takes_the_next_chunk_of_as_many_rows_as_there_is_room_for() -> None:
    rows = [[1, 2, 3, 4, 5], [6, 7, 8, 9], [10, 11]]
    assert list(chunks_by_pass(rows, [0, 0, 0], Chunks(4, 4), most=6)) == [
        [RowChunk(0, [1, 2, 3, 4], 0, is_last=False), RowChunk(2, [10, 11], 0, is_last=True)],
        [RowChunk(0, [5], 4, is_last=True), RowChunk(1, [6, 7, 8, 9], 0, is_last=True)],  # one token takes no room
    ]


def test_a_row_that_starts_inside_a_chunk_is_cut_where_the_whole_row_is() -> None:
    found = [chunk for (chunk,) in chunks_by_pass([range(6, 13)], [6], Chunks(4, 4), most=4)]
    assert [(list(chunk.ids), chunk.start, chunk.is_last) for chunk in found] == [
        ([6, 7], 6, False),
        ([8, 9, 10, 11], 8, False),
        ([12], 12, True),
    ]


@given(ROWS, st.integers(2, 16), st.integers(1, 60))
def test_every_token_runs_once_in_chunks_that_depend_on_its_position_alone(
    spans: list[tuple[int, int]], size: int, most: int
) -> None:
    chunks, starts = Chunks(size, size), [start for start, _ in spans]
    rows = [range(start, start + length) for start, length in spans]
    passes = list(chunks_by_pass(rows, starts, chunks, most))
    for row, (start, length) in enumerate(spans):
        mine = [one for found in passes for one in found if one.row == row]
        assert [position for one in mine for position in one.ids] == [*range(start, start + length)]
        assert all(one.start == one.ids[0] for one in mine)
        assert [one.end % size for one in mine[:-1]] == [0] * (len(mine) - 1)
        assert all(one.start // size == (one.end - 1) // size for one in mine)
        assert [one.is_last for one in mine] == [False] * (len(mine) - 1) + [True] * (length > 0)
    for found in passes:
        several = [len(one.ids) for one in found if len(one.ids) > 1]
        assert found
        assert len(several) <= 1 or sum(several) <= most
