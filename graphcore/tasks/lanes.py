"""Lanes of a timeline from top to bottom: what ran, what was waited for, each worker that copied, or read before."""

from collections.abc import Sequence

from graphcore.streaming.timeline import Event, Lane

ORDER: tuple[Lane, ...] = ("compute", "stall", "copy", "read")

LaneKey = tuple[Lane, int]  # with the worker's number


def lanes_of(events: Sequence[Event]) -> list[LaneKey]:
    """Return the lanes that have events, from top to bottom."""
    found = {(event.lane, event.worker) for event in events}
    return sorted(found, key=lambda lane: (ORDER.index(lane[0]), lane[1]))


def lane_name(lane: LaneKey, lanes: Sequence[LaneKey]) -> str:
    """Return "copy", or "copy 2" where there are several."""
    kind, worker = lane
    is_alone = sum(other == kind for other, _ in lanes) == 1
    return kind if is_alone else f"{kind} {worker}"
