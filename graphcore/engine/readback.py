"""Tokens that a device chose, read by a host that is a few steps behind.

    device   step 0 | copy | step 1 | copy | step 2 | copy | ...          copies go to locked memory, a slot for each
    host     ask 0, 1, 2     read 0, ask 3     read 1, ask 4     ...      reading waits for the mark behind the copy

So the device never waits for the host, and a stop that only the host sees costs at most LAG steps.
"""

import torch
from torch import Tensor

LAG = 2  # steps that the host is behind


class Readback:
    """Copies of one tensor on the device, in the order in which it asked for them; allocated once.

    Args:
        source: on the device; its values are copied, again and again.
        most: copies that may be under way.
    """

    def __init__(self, source: Tensor, most: int) -> None:
        self._source = source
        is_pinned = source.device.type == "cuda"
        places = torch.empty(most, *source.shape, dtype=source.dtype, pin_memory=is_pinned)
        self._places = places.unbind(0)
        self._values = [place.numpy() for place in self._places]  # the same memory
        self._marks = [torch.cuda.Event() for _ in range(most)]  # type: ignore[no-untyped-call]
        self._sent = self._taken = 0

    @property
    def num_waiting(self) -> int:
        """Copies that nobody has read yet."""
        return self._sent - self._taken

    def send(self) -> None:
        """Ask for a copy of what the source will hold when all that was enqueued so far is done."""
        assert self.num_waiting < len(self._places), "every place holds a copy that nobody has read"
        index = self._sent % len(self._places)
        self._places[index].copy_(self._source, non_blocking=True)
        self._marks[index].record(torch.cuda.current_stream(self._source.device))
        self._sent += 1

    def take(self) -> list[list[float]]:
        """Return the oldest copy that nobody has read, waiting for it."""
        assert self.num_waiting > 0, "nothing was sent"
        index = self._taken % len(self._places)
        self._marks[index].synchronize()
        self._taken += 1
        values: list[list[float]] = self._values[index].tolist()
        return values
