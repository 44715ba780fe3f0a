"""A timeline of events while weights move, from which reports and pictures are made.

copy     a job's bytes move from the tier below into a slot             (worker threads, or a device's copy queue)
read     bytes are read into a host slot, to be copied to a device      (worker threads)
stall    the caller, or the device's compute queue, waits for the bytes of a group
compute  a step runs
draft    a draft model runs, between two passes over the weights

Sets of times are sorted, disjoint, half-open intervals [begin, end):

    union   [0, 3) [2, 5) [7, 8)             ->  [0, 5) [7, 8)
    minus   [0, 5) [7, 8)  minus  [1, 2)     ->  [0, 1) [2, 5) [7, 8)
    split   [0, 5) [7, 8)  at  3             ->  [0, 3)  and  [3, 5) [7, 8)
"""

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, Protocol

Interval = tuple[float, float]

Lane = Literal["copy", "read", "stall", "compute", "draft"]
LIMIT = 200_000  # number of the newest events that are kept; about 20 MB
JOINED_SECONDS = 50e-6  # longest gap between two copies that `join_copies` merges
LATE_LIMIT = 4096  # number of events whose times are not read yet; each holds two timers of a device


@dataclass(frozen=True)
class Event:
    """One interval of activity in a lane.

    Attributes:
        group: number of the group that the weights belong to; 0 in the lane of the draft model.
        begin, end: times in seconds of time.perf_counter.
        nbytes: bytes moved; 0 if none were.
        worker: number of the thread within the lane.
    """

    lane: Lane
    group: int
    begin: float
    end: float
    nbytes: int = 0
    worker: int = 0


class Late(Protocol):
    """An event whose times can be read only after it is over."""

    @property
    def is_over(self) -> bool:
        """Whether the times can be read without waiting."""

    def settled(self) -> Event:
        """Return the event with its times. It must be over."""


class Stopwatch(Protocol):
    """A running measurement of one event."""

    def stop(self) -> None:
        """End the measurement now and record the event. Without this call there is no event."""

    def then(self, lane: Lane, group: int) -> "Stopwatch":
        """End this measurement and begin another at the same time."""


class Watch(Protocol):
    """A clock that times the caller's work: the host's or a device's."""

    def start(self, lane: Lane, group: int) -> Stopwatch:
        """Begin a measurement."""


@dataclass(frozen=True)
class HostStopwatch:
    """A running measurement of the calling thread."""

    timeline: "Timeline"
    lane: Lane
    group: int
    began: float

    def stop(self) -> None:
        """End the measurement now and record the event."""
        self.timeline.add(Event(self.lane, self.group, self.began, time.perf_counter()))

    def then(self, lane: Lane, group: int) -> "HostStopwatch":
        """End this measurement and begin another."""
        self.stop()
        return self.timeline.start(lane, group)


@dataclass
class Timeline:
    """A thread-safe list of events, roughly in the order in which they ended; also a `Watch` with the host's clock."""

    events: deque[Event] = field(default_factory=lambda: deque(maxlen=LIMIT))
    _late: deque[Late] = field(default_factory=deque)
    _num_recorded: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, lane: Lane, group: int) -> HostStopwatch:
        """Begin a measurement of the calling thread."""
        return HostStopwatch(self, lane, group, time.perf_counter())

    def add(self, event: Event) -> None:
        """Append an event."""
        with self._lock:
            self._record(event)

    def add_late(self, event: Late) -> None:
        """Append an event whose times are read later: when events are requested, or when too many are waiting."""
        with self._lock:
            self._late.append(event)
            if len(self._late) > LATE_LIMIT and self._settled(self._late[0]):
                self._late.popleft()

    def since(self, begin: float) -> list[Event]:
        """Return the finished events that ended after `begin`, in seconds of time.perf_counter."""
        with self._lock:
            self._settle()
            return [event for event in self.events if event.end > begin]

    def after(self, seen: int) -> tuple[list[Event], int]:
        """Return the events that were recorded after the first `seen` ones, and how many have been recorded by now.

        A reader that passes the number on gets each event once, but for those that are no longer kept.
        """
        with self._lock:
            self._settle()
            count = min(self._num_recorded - seen, len(self.events))
            return list(islice(reversed(self.events), count))[::-1], self._num_recorded

    def newest(self, count: int) -> list[Event]:
        """Return the newest events, at most `count`."""
        with self._lock:
            self._settle()
            return list(islice(reversed(self.events), count))[::-1]

    def _record(self, event: Event) -> None:
        self.events.append(event)
        self._num_recorded += 1

    def _settle(self) -> None:
        """Record the late events that are over."""
        self._late = deque([late for late in self._late if not self._settled(late)])

    def _settled(self, late: Late) -> bool:
        """Record a late event if it is over. Return whether it was."""
        if late.is_over:
            self._record(late.settled())
            return True
        return False


def join_copies(events: Iterable[Event]) -> list[Event]:
    """Merge consecutive copies or reads of the same group by the same worker, and return all events sorted by begin.

    A group is copied in many small jobs; timelines show one bar for them.
    """
    found: list[Event] = []
    newest: dict[tuple[Lane, int], int] = {}  # index of the last event of each worker
    for event in sorted(events, key=lambda event: event.begin):
        key = event.lane, event.worker
        at = newest.get(key)
        last = None if at is None else found[at]
        is_next = last is not None and last.group == event.group and event.begin - last.end <= JOINED_SECONDS
        if at is not None and last is not None and is_next and event.lane in ("copy", "read"):
            end, nbytes = max(last.end, event.end), last.nbytes + event.nbytes
            found[at] = Event(last.lane, last.group, last.begin, end, nbytes, last.worker)
        else:
            newest[key] = len(found)
            found.append(event)
    return found


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals: sorted, disjoint, non-adjacent and non-empty."""
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
    """Return the parts of `these` that `others` do not cover. Both must be in the form that `union` returns."""
    left: list[Interval] = []
    at = 0
    for begin, end in these:
        while at < len(others) and others[at][1] <= begin:
            at += 1
        while at < len(others) and others[at][0] < end:
            if others[at][0] > begin:
                left.append((begin, others[at][0]))
            begin = others[at][1]
            if begin >= end:  # this one may also overlap the next of `these`
                break
            at += 1
        if begin < end:
            left.append((begin, end))
    return left


def shared_part(these: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return the parts of `these` that `others` cover. Both must be in the form that `union` returns."""
    return minus(these, minus(these, others))


def split(intervals: Sequence[Interval], at: float) -> tuple[list[Interval], list[Interval]]:
    """Split intervals at a time; return the parts before and after it."""
    before = [(begin, min(end, at)) for begin, end in intervals if begin < at]
    return before, [(max(begin, at), end) for begin, end in intervals if end > at]


def total(intervals: Iterable[Interval]) -> float:
    """Return the sum of the intervals' lengths."""
    return sum((end - begin for begin, end in intervals), start=0.0)
