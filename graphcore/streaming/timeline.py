"""What happened when, while weights moved: the raw material of reports and pictures.

copy     a job's bytes on their way from the tier below into a slot     (worker threads, lanes side by side)
stall    the caller waited for a group's bytes
compute  a step ran
"""

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

Lane = Literal["copy", "stall", "compute"]
LIMIT = 200_000  # events that are kept: the newest; about 20 MB


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


@dataclass
class Timeline:
    """Events in the order in which they ended; safe to add to from any thread."""

    events: deque[Event] = field(default_factory=lambda: deque(maxlen=LIMIT))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, event: Event) -> None:
        """Append an event."""
        with self._lock:
            self.events.append(event)

    def since(self, begin: float) -> list[Event]:
        """Return the events that ended after `begin`, seconds of time.perf_counter."""
        with self._lock:
            return [event for event in self.events if event.end > begin]
