"""Cumulative counters of weight streaming, for monitoring that polls them."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from graphcore.streaming.timeline import Event, Interval, Lane, Timeline, minus, shared_part, split, total, union

RECENT_SECONDS = 30.0  # a longer event may be counted twice where it overlaps others
MOST_RECENT = 2000  # intervals; beyond that, the older half is summed up early


@dataclass(frozen=True)
class Movement:
    """Cumulative counters since the weights were loaded.

    Attributes:
        nbytes: bytes that arrived in slots.
        copy_seconds: time in which at least one copy or read was running.
        hidden_seconds: part of `copy_seconds` in which no step waited.
        hidden_by_drafts_seconds: part of `hidden_seconds` in which a draft model ran.
        stall_seconds: time in which steps waited for weights.
    """

    nbytes: int = 0
    copy_seconds: float = 0.0
    hidden_seconds: float = 0.0
    hidden_by_drafts_seconds: float = 0.0
    stall_seconds: float = 0.0


class MovementTotals:
    """Cumulative counters of a timeline's events; each event is counted once.

    Copies of several workers overlap, and an event is recorded when it ends. So recent times are kept as intervals and
    merged with later events; of older ones only the sums are kept.

    Args:
        timeline: timeline of the events.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline, self._lock = timeline, threading.Lock()
        self._seen, self._summed = 0, Movement()
        self._copies: list[Interval] = []
        self._stalls: list[Interval] = []
        self._drafts: list[Interval] = []

    def now(self) -> Movement:
        """Return the counters of all finished events."""
        with self._lock:
            events, self._seen = self._timeline.after(self._seen)
            self._add(events)
            return _sum(self._summed, self._copies, self._stalls, self._drafts)

    def _add(self, events: Sequence[Event]) -> None:
        def times(*lanes: Lane) -> list[Interval]:
            return [(event.begin, event.end) for event in events if event.lane in lanes]

        nbytes = sum(event.nbytes for event in events if event.lane == "copy")
        self._copies = union([*self._copies, *times("copy", "read")])
        self._stalls = union([*self._stalls, *times("stall")])
        self._drafts = union([*self._drafts, *times("draft")])
        known = [*self._copies, *self._stalls, *self._drafts]
        if known:
            cut = max(end for _, end in known) - RECENT_SECONDS
            if len(known) > MOST_RECENT:
                cut = max(cut, sorted(end for _, end in known)[len(known) // 2])
            copies, self._copies = split(self._copies, cut)
            stalls, self._stalls = split(self._stalls, cut)
            drafts, self._drafts = split(self._drafts, cut)
            self._summed = _sum(self._summed, copies, stalls, drafts, nbytes)


def _sum(
    before: Movement,
    copies: Sequence[Interval],
    stalls: Sequence[Interval],
    drafts: Sequence[Interval],
    nbytes: int = 0,
) -> Movement:
    """Add intervals, sorted and disjoint as `union` returns them, to counters."""
    hidden = minus(copies, stalls)
    return Movement(
        before.nbytes + nbytes,
        before.copy_seconds + total(copies),
        before.hidden_seconds + total(hidden),
        before.hidden_by_drafts_seconds + total(shared_part(hidden, drafts)),
        before.stall_seconds + total(stalls),
    )
