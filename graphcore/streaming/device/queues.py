"""The two work queues of a device that streaming uses: one for copies, one for compute.

    copy      | 1 ==== * | wait | 3 ==== * |       the work in a queue runs in order, asynchronously to the host
    compute   | wait | ##1## *  | wait | ##2## *   *: a mark, which is over when all earlier work in its queue is done

The queues are independent, except that one can be held until a mark of the other is over. On a GPU a queue is a CUDA
stream and a mark is an event. The current stream computes; a separate stream copies.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from graphcore.errors import StreamingError

HOP_SECONDS = 10.0  # elapsed_time is a float32 in milliseconds: exact to about a microsecond up to 10 s

QueueName = Literal["copy", "compute"]


class Mark(Protocol):
    """A point in a queue: it is over when all work enqueued before it is done."""

    @property
    def is_over(self) -> bool:
        """Whether all work before the mark is done."""

    @property
    def seconds(self) -> float:
        """Time at which the mark was over, on the clock of time.perf_counter. The mark must be over and timed."""

    def hold(self, queue: QueueName) -> None:
        """Make all later work in the queue wait until this mark is over. The host does not wait."""

    def wait(self) -> None:
        """Block the calling thread until the mark is over. Any thread may call this."""


class Queues(Protocol):
    """The queues of a device. One thread enqueues; calls raise RuntimeError when the device has failed."""

    def mark(self, queue: QueueName, is_timed: bool = True) -> Mark:
        """Put a mark behind all work that is enqueued in a queue.

        Args:
            is_timed: True if the mark's `seconds` will be read; a mark without a time is cheaper.
        """

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Enqueue a copy in the copy queue.

        Args:
            source: [nbytes] uint8 in RAM, unchanged until the copy is done.
            target: [nbytes] uint8 on the device.
        """

    def run(self, work: Callable[[], None], target: Tensor) -> None:
        """Enqueue work of the device in the copy queue.

        Args:
            work: function that enqueues the work in the current queue and allocates nothing on the device.
            target: tensor on the device that the work writes to.
        """


@contextmanager
def device_faults(group: int | None) -> Iterator[None]:
    """Turn a RuntimeError of the device inside the block into a StreamingError.

    Args:
        group: number of the group that was being moved; None if it was no single group.
    """
    try:
        yield
    except StreamingError:
        raise
    except RuntimeError as error:  # torch.AcceleratorError, torch.OutOfMemoryError
        what = "weights" if group is None else f"weights of group {group}"
        reason = str(error).strip().partition("\n")[0]
        raise StreamingError(f"{what} could not be moved to the device: {reason}; load the model again") from error


def new_event(is_timed: bool) -> torch.cuda.Event:
    """Return a CUDA event, with a time if `is_timed`. A thread that waits for it sleeps instead of spinning."""
    return torch.cuda.Event(enable_timing=is_timed, blocking=True)  # type: ignore[no-untyped-call]  # not typed


@dataclass
class CudaClock:
    """A conversion of a device's event times to the host's clock.

    Attributes:
        anchor: reference event, which is over.
        seconds: float, time of the anchor on the clock of time.perf_counter.
    """

    anchor: torch.cuda.Event
    seconds: float

    @classmethod
    def start(cls, stream: torch.cuda.Stream) -> "CudaClock":
        """Return a clock whose anchor is now, after waiting for the stream."""
        anchor = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # not typed; waits without sleeping
        anchor.record(stream)
        anchor.synchronize()
        return cls(anchor, time.perf_counter())

    def at(self, event: torch.cuda.Event) -> float:
        """Return the time of an event that is over, in seconds on the clock of time.perf_counter."""
        seconds = self.seconds + float(self.anchor.elapsed_time(event)) / 1e3
        if seconds - self.seconds > HOP_SECONDS:
            self.anchor, self.seconds = event, seconds
        return seconds


@dataclass(frozen=True, eq=False)
class CudaMark:
    """A mark that is a CUDA event, already recorded in one of the streams.

    Each mark has its own event: about 6 for each group. A timeline keeps a bounded number of them.
    """

    queues: "CudaQueues"
    event: torch.cuda.Event

    @property
    def is_over(self) -> bool:
        """Whether all work before the mark is done."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]  # as above

    @property
    def seconds(self) -> float:
        """Time at which the mark was over, on the clock of time.perf_counter. The mark must be over and timed."""
        return self.queues.clock.at(self.event)

    def hold(self, queue: QueueName) -> None:
        """Make all later work in the queue wait until this mark is over."""
        self.queues.stream(queue).wait_event(self.event)

    def wait(self) -> None:
        """Block the calling thread until the mark is over."""
        self.event.synchronize()


@dataclass
class CudaQueues:
    """The CUDA streams of one device.

    The copy stream has a high priority so that it is not shared. Torch hands out streams round-robin from a pool of 32
    per priority; a stream of normal priority might be one that other code captures or computes on.
    """

    device: torch.device
    clock: CudaClock = field(init=False)

    def __post_init__(self) -> None:
        self._copying = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]  # torch does not type it
        self.clock = CudaClock.start(self._copying)

    def stream(self, queue: QueueName) -> torch.cuda.Stream:
        """Return a queue's CUDA stream: for compute, the current stream."""
        return self._copying if queue == "copy" else torch.cuda.current_stream(self.device)

    def mark(self, queue: QueueName, is_timed: bool = True) -> Mark:
        """Record an event in a queue's stream."""
        event = new_event(is_timed)
        event.record(self.stream(queue))
        return CudaMark(self, event)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Enqueue a copy. If the source is not locked, it goes through the driver's buffer and the host waits."""
        with torch.cuda.stream(self._copying):
            target.copy_(source, non_blocking=True)
        # The allocator assigns the slots to the compute stream: without this it could reuse them during a copy.
        target.record_stream(self._copying)

    def run(self, work: Callable[[], None], target: Tensor) -> None:
        """Enqueue kernels in the copy stream."""
        with torch.cuda.stream(self._copying):
            work()
        target.record_stream(self._copying)  # as for a copy
