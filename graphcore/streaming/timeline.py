"""What happened when, while weights moved: the raw material of reports and pictures.

copy     a job's bytes on their way from the tier below into a slot     (worker threads, lanes side by side)
read     the same into a host slot, from where a device's copy goes on  (worker threads, too)
stall    the caller waited for a group's bytes; on a device, the device did
compute  a step ran
"""

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Literal, Protocol

Lane = Literal["copy", "read", "stall", "compute"]
LIMIT = 200_000  # events that are kept: the newest; about 20 MB
LATE_LIMIT = 4096  # events that may wait to be settled: a device keeps a timer for each end of them


@dataclass(frozen=True)
class Event:
    """Something that took time.

    Attributes:
        group: whose weights.
        begin, end: seconds of time.perf_counter.
        nbytes: moved; 0 where nothing was.
        worker: which of the lane's threads.
    """

    lane: Lane
    group: int
    begin: float
    end: float
    nbytes: int = 0
    worker: int = 0


class Late(Protocol):
    """An event whose times are known some time after it."""

    @property
    def is_over(self) -> bool:
        """Whether its times can be read without waiting."""

    def settled(self) -> Event:
        """Return it; it is over."""


class Stopwatch(Protocol):
    """Something that is taking time."""

    def stop(self) -> None:
        """It ends now. What is never stopped is never an event."""

    def then(self, lane: Lane, group: int) -> "Stopwatch":
        """It ends now, and something else begins."""


class Watch(Protocol):
    """Times what the caller does, by whatever clock holds for it."""

    def start(self, lane: Lane, group: int) -> Stopwatch:
        """Begin to time something."""


@dataclass(frozen=True)
class HostStopwatch:
    """Something that takes the calling thread's time."""

    timeline: "Timeline"
    lane: Lane
    group: int
    began: float

    def stop(self) -> None:
        """It ends now."""
        self.timeline.add(Event(self.lane, self.group, self.began, time.perf_counter()))

    def then(self, lane: Lane, group: int) -> "HostStopwatch":
        """It ends now, and something else begins."""
        self.stop()
        return self.timeline.start(lane, group)


@dataclass
class Timeline:
    """Events, about in the order in which they ended; safe to add to from any thread. A `Watch` by the host's clock."""

    events: deque[Event] = field(default_factory=lambda: deque(maxlen=LIMIT))
    _late: deque[Late] = field(default_factory=deque)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, lane: Lane, group: int) -> HostStopwatch:
        """Begin to time something that the calling thread does."""
        return HostStopwatch(self, lane, group, time.perf_counter())

    def add(self, event: Event) -> None:
        """Append an event."""
        with self._lock:
            self.events.append(event)

    def add_late(self, event: Late) -> None:
        """Append an event whose times are read when somebody asks for them, or when there are very many."""
        with self._lock:
            self._late.append(event)
            if len(self._late) > LATE_LIMIT and self._settled(self._late[0]):
                self._late.popleft()

    def since(self, begin: float) -> list[Event]:
        """Return the events that ended after `begin`, seconds of time.perf_counter, and are over."""
        with self._lock:
            self._late = deque([late for late in self._late if not self._settled(late)])
            return [event for event in self.events if event.end > begin]

    def _settled(self, late: Late) -> bool:
        """Read the times of a late event, unless it would have to be waited for; return whether it was over."""
        if late.is_over:
            self.events.append(late.settled())
            return True
        return False
