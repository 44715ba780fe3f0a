"""Running totals of what a stream of weights has moved, for readers that ask again and again."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from graphcore.streaming.timeline import Event, Interval, Timeline, minus, split, total, union

OPEN_SECONDS = 30.0  # an event that lasts longer may be counted twice where it overlaps others
MOST_OPEN = 2000  # intervals, beyond which the older half is closed sooner


@dataclass(frozen=True)
class Movement:
    """What has moved since the weights were loaded.

    Attributes:
        nbytes: bytes that arrived in slots.
        copy_seconds: time in which at least one copy or read was running.
        hidden_seconds: part of `copy_seconds` in which no step waited.
        stall_seconds: time in which steps waited for weights.
    """

    nbytes: int = 0
    copy_seconds: float = 0.0
    hidden_seconds: float = 0.0
    stall_seconds: float = 0.0


class MovementTotals:
    """Adds up the events of a timeline, each once.

    Events overlap, and one that began early may be recorded late. So the newest times stay intervals, to which further
    events are united; those before them are closed: only their lengths are kept.

    Args:
        timeline: timeline of the events.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline, self._lock = timeline, threading.Lock()
        self._seen, self._closed = 0, Movement()
        self._copies: list[Interval] = []
        self._stalls: list[Interval] = []

    def now(self) -> Movement:
        """Return the totals of all events that are over."""
        with self._lock:
            events, self._seen = self._timeline.after(self._seen)
            self._add(events)
            return _sum(self._closed, self._copies, self._stalls)

    def _add(self, events: Sequence[Event]) -> None:
        nbytes = sum(event.nbytes for event in events if event.lane == "copy")
        moving = [(event.begin, event.end) for event in events if event.lane in ("copy", "read")]
        waiting = [(event.begin, event.end) for event in events if event.lane == "stall"]
        self._copies, self._stalls = union([*self._copies, *moving]), union([*self._stalls, *waiting])
        known = [*self._copies, *self._stalls]
        if known:
            close_at = max(end for _, end in known) - OPEN_SECONDS
            if len(known) > MOST_OPEN:
                close_at = max(close_at, sorted(end for _, end in known)[len(known) // 2])
            copies, self._copies = split(self._copies, close_at)
            stalls, self._stalls = split(self._stalls, close_at)
            self._closed = _sum(self._closed, copies, stalls, nbytes)


def _sum(before: Movement, copies: Sequence[Interval], stalls: Sequence[Interval], nbytes: int = 0) -> Movement:
    """Return totals with further intervals, in the form that `union` returns."""
    return Movement(
        before.nbytes + nbytes,
        before.copy_seconds + total(copies),
        before.hidden_seconds + total(minus(copies, stalls)),
        before.stall_seconds + total(stalls),
    )
