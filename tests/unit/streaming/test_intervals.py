"""Sets of time, against sets of whole numbers."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from graphcore.streaming.timeline import minus, total, union

TICKS = st.integers(0, 30)
INTERVALS = st.lists(st.tuples(TICKS, TICKS), max_size=12)


def ticks(intervals: list[tuple[float, float]]) -> set[int]:
    """Return the whole numbers t whose [t, t + 1) is covered."""
    return {tick for begin, end in intervals for tick in range(int(begin), int(end))}


def is_disjoint(intervals: list[tuple[float, float]]) -> bool:
    """Return whether each interval is not empty and ends before the next begins."""
    edges = [edge for interval in intervals for edge in interval]
    return all(a < b for a, b in itertools.pairwise(edges))


def test_union_merges_what_overlaps_and_what_touches() -> None:
    assert union([(7, 8), (0, 3), (2, 5), (5, 6), (9, 9)]) == [(0, 6), (7, 8)]


def test_minus_cuts_holes_heads_and_tails() -> None:
    assert minus([(0, 5), (7, 8), (10, 12)], [(1, 2), (4, 7.5), (10, 13)]) == [(0, 1), (2, 4), (7.5, 8)]


@given(INTERVALS)
def test_union_covers_what_any_interval_covers(intervals: list[tuple[float, float]]) -> None:
    merged = union(intervals)
    assert ticks(merged) == ticks(intervals)
    assert is_disjoint(merged)
    assert total(merged) == len(ticks(intervals))


@given(INTERVALS, INTERVALS)
def test_minus_leaves_what_the_others_do_not_cover(
    these: list[tuple[float, float]], others: list[tuple[float, float]]
) -> None:
    left = minus(union(these), union(others))
    assert ticks(left) == ticks(these) - ticks(others)
    assert is_disjoint(left)
