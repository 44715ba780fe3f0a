"""A device's two lanes of work, as far as streaming sees them: one that copies, one that computes.

    copy      | 1 ==== * | wait | 3 ==== * |         what is enqueued in a lane runs in order, later than the host asked
    compute   | wait | ##1## *  | wait | ##2## *     *: a mark, which is over when all before it in its lane is done

Lanes know nothing of each other, except that a lane can be held until a mark of the other is over. On a GPU a lane is a
stream and a mark an event (cuda_lanes.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

from torch import Tensor

from graphcore.errors import StreamingError

LaneName = Literal["copy", "compute"]


class Mark(Protocol):
    """A place in a lane's work."""

    @property
    def is_over(self) -> bool:
        """Whether all work before it is done."""

    @property
    def seconds(self) -> float:
        """When it came to be over, in seconds of time.perf_counter; it is over, and was made to be timed."""

    def hold(self, lane: LaneName) -> None:
        """Have what is enqueued in the lane from now on wait until this is over; the host does not wait."""

    def wait(self) -> None:
        """Return when it is over; for any thread."""


class Lanes(Protocol):
    """Where work is enqueued, by one thread. Calls raise RuntimeError when the device has failed."""

    def mark(self, lane: LaneName, is_timed: bool = True) -> Mark:
        """Put a mark behind what has been enqueued in a lane.

        Args:
            is_timed: its `seconds` will be asked for; a mark that only orders is cheaper.
        """

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Enqueue a copy in the copy lane.

        Args:
            source: [nbytes] uint8 in RAM; it must not change before the copy is done.
            target: [nbytes] uint8 on the device.
        """


@contextmanager
def device_faults(group: int | None) -> Iterator[None]:
    """Turn what a device raises inside the block into a StreamingError.

    Args:
        group: that was on its way; None if no single one was.
    """
    try:
        yield
    except StreamingError:
        raise
    except RuntimeError as error:  # torch.AcceleratorError, torch.OutOfMemoryError
        what = "weights" if group is None else f"weights of group {group}"
        reason = str(error).strip().partition("\n")[0]
        raise StreamingError(f"{what} could not be moved to the device: {reason}; load the model again") from error
