"""Sets of time as sorted, disjoint, half-open intervals [begin, end).

    union   [0, 3) [2, 5) [7, 8)             ->  [0, 5) [7, 8)
    minus   [0, 5) [7, 8)  minus  [1, 2)     ->  [0, 1) [2, 5) [7, 8)

Nothing here knows what the times are of.
"""

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the times that any of the intervals covers, sorted, disjoint and not touching; empty ones cover none."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def minus(these: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return the times of `these` that `others` do not cover; both as `union` returns them."""
    left: list[Interval] = []
    at = 0
    for begin, end in these:
        while at < len(others) and others[at][1] <= begin:
            at += 1
        while at < len(others) and others[at][0] < end:
            if others[at][0] > begin:
                left.append((begin, others[at][0]))
            begin = others[at][1]
            if begin >= end:  # it may reach into the next of these
                break
            at += 1
        if begin < end:
            left.append((begin, end))
    return left


def total(intervals: Iterable[Interval]) -> float:
    """Return the summed lengths."""
    return sum((end - begin for begin, end in intervals), start=0.0)
