"""Lanes on a GPU: the current stream computes, a stream of our own copies. Not yet run on hardware."""

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from graphcore.streaming.lanes import LaneName, Mark

HOP_SECONDS = 10.0  # elapsed_time is a float32 of milliseconds: over 10 s it is good to a microsecond


def new_event(is_timed: bool) -> torch.cuda.Event:
    """Return an event that orders streams, and keeps the time if asked to; a thread that waits for it sleeps."""
    return torch.cuda.Event(enable_timing=is_timed, blocking=True)  # type: ignore[no-untyped-call]  # not typed


@dataclass
class CudaClock:
    """Turns a device's moments into the host's.

    Attributes:
        anchor: an event that is over.
        seconds: when it was, of time.perf_counter.
    """

    anchor: torch.cuda.Event
    seconds: float

    @classmethod
    def start(cls, stream: torch.cuda.Stream) -> "CudaClock":
        """Return a clock that is set now; waits for the stream."""
        anchor = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # not typed; nobody sleeps
        anchor.record(stream)
        anchor.synchronize()
        return cls(anchor, time.perf_counter())

    def at(self, event: torch.cuda.Event) -> float:
        """Return when an event came to be over, in seconds of time.perf_counter; it is over."""
        seconds = self.seconds + float(self.anchor.elapsed_time(event)) / 1e3
        if seconds - self.seconds > HOP_SECONDS:
            self.anchor, self.seconds = event, seconds
        return seconds


@dataclass(frozen=True, eq=False)
class CudaMark:
    """An event in one of the streams. It has been recorded, so it can be asked whether it is over.

    Events are made and given back as marks are: some 6 for each group, of which a timeline keeps a bounded number.
    """

    lanes: "CudaLanes"
    event: torch.cuda.Event

    @property
    def is_over(self) -> bool:
        """Whether all work before it is done."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]  # as above

    @property
    def seconds(self) -> float:
        """When it came to be over, in seconds of time.perf_counter; it is over, and was made to be timed."""
        return self.lanes.clock.at(self.event)

    def hold(self, lane: LaneName) -> None:
        """Have what is enqueued in the lane from now on wait until this is over."""
        self.lanes.stream(lane).wait_event(self.event)

    def wait(self) -> None:
        """Return when it is over."""
        self.event.synchronize()


@dataclass
class CudaLanes:
    """The streams of one device.

    The copy stream has a high priority, not because copies compete with kernels, but because torch deals streams out of
    one round of 32 for each priority: among the others it might be one that somebody else captures or computes on.
    """

    device: torch.device
    clock: CudaClock = field(init=False)

    def __post_init__(self) -> None:
        self._copying = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]  # torch does not type it
        self.clock = CudaClock.start(self._copying)

    def stream(self, lane: LaneName) -> torch.cuda.Stream:
        """Return a lane's stream; what computes is whatever stream is current."""
        return self._copying if lane == "copy" else torch.cuda.current_stream(self.device)

    def mark(self, lane: LaneName, is_timed: bool = True) -> Mark:
        """Record an event in a lane's stream."""
        event = new_event(is_timed)
        event.record(self.stream(lane))
        return CudaMark(self, event)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Enqueue a copy; from memory that is not page-locked it goes through the driver's own, and the host waits."""
        with torch.cuda.stream(self._copying):
            target.copy_(source, non_blocking=True)
        # The allocator knows the slots as the compute stream's: without this it could give them away under a copy.
        target.record_stream(self._copying)
