"""Copies of pages and recurrent states in host memory, which a GPU makes beside its computing.

    compute   | gather pages * |  next step  |  next step  |
    copy      |     wait       | === to locked memory === * |
    host      | goes on ...                            read waits for the last mark

The pages may be freed and written again at once: what the copy stream reads is gathered on the device before it, in the
stream that computes, and the allocator gives that memory to nobody until the copy is done.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Copies = tuple[Tensor, Tensor]
"""Copies from a layer's two buffers: of some pages, [n, K, G, ...] each, or of a sequence's recurrent state."""


@dataclass(frozen=True)
class HostCopies:
    """Copies in host memory, some of which a device may still be making.

    Attributes:
        parts: the copies; their values are those of the device once all events are over.
        events: CUDA events behind the copies; none where nothing has to be waited for.
    """

    parts: Sequence[Copies]
    events: tuple[torch.cuda.Event, ...] = ()

    def read(self) -> Sequence[Copies]:
        """Return the copies once they are made; the calling thread waits for them, which no stream does."""
        for event in self.events:
            event.synchronize()
        return self.parts

    def __add__(self, others: "HostCopies") -> "HostCopies":
        """Return these copies and then the others."""
        return HostCopies((*self.parts, *others.parts), (*self.events, *others.events))


ToHost = Callable[[Sequence[Copies]], HostCopies]
"""Starts copies to the host: `CopyStream.begin` on a GPU, `HostCopies` for tensors that are on the host already."""


class CopyStream:
    """A CUDA stream that copies to pinned memory while the main stream computes."""

    def __init__(self, device: torch.device) -> None:
        # Of high priority, so that it is no stream that other code captures or computes on.
        self._device, self._stream = device, torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]  # torch does not type it

    def begin(self, parts: Sequence[Copies]) -> HostCopies:
        """Enqueue the copies behind all work that is enqueued in the current stream, and return them at once."""
        if not parts:
            return HostCopies(())
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copied = [(self._copied(first), self._copied(second)) for first, second in parts]
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # as above
        event.record(self._stream)
        return HostCopies(copied, (event,))

    def _copied(self, tensor: Tensor) -> Tensor:
        target = locked_like(tensor)
        target.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        return target


def locked_like(tensor: Tensor) -> Tensor:
    """Return page-locked host memory for a tensor's values, to which a device copies while the host goes on."""
    try:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    except RuntimeError:  # the system locks no more: the copy goes through the driver's buffer, and the host waits
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
