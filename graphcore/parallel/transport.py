"""How the residual stream goes from one rank to another.

CPU ranks                        gloo                                      HostTransport
GPU ranks, of which some share   device -> pinned memory -> gloo ->        StagedTransport
a GPU, or lack NCCL              pinned memory -> device
every rank has its own GPU       NCCL, on the device, beside the steps     NCCLTransport (nccl_transport.py)
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed
from torch import Tensor

Noticing = Callable[..., AbstractContextManager[None]]
"""`ProcessGroup._noticing`: a block in which an error of torch.distributed becomes a ParallelError."""


class Transport(ABC):
    """A way of the residual stream between ranks."""

    runs_ahead = False  # True if the pass enqueues nothing but captured steps, so that no note is waited for meanwhile

    @abstractmethod
    def send(self, hidden: Tensor, target: int, tag: int) -> None:
        """Begin to send numbers to a rank; `hidden` may change at once.

        Args:
            tag: number of the program among those of the pass.
        """

    @abstractmethod
    def receive(self, hidden: Tensor, source: int, tag: int) -> None:
        """Have the next numbers that a rank sends with this tag in `hidden`, for all work enqueued afterwards."""

    def settle(self) -> None:  # noqa: B027  # nothing is under way between passes on most transports
        """Wait until the hand-overs of the pass are done, at its end."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until all that was sent has arrived."""

    def connect(self, owners: Sequence[int], is_over: Callable[[], bool]) -> None:  # noqa: B027  # gloo has done so
        """Connect the pairs of ranks between which the stream of such layers goes.

        Args:
            owners: rank of each layer.
            is_over: function that returns True when another rank has failed, so that this one stops connecting.

        Raises:
            RuntimeError: a pair cannot be connected.
        """

    @abstractmethod
    def close(self, *, is_lost: bool) -> None:
        """Drop what is under way; if a rank was lost, also what never ends by itself."""


class HostTransport(Transport):
    """gloo between the memory of CPUs: sends are asynchronous, because two ranks may send to each other at once."""

    def __init__(self, noticing: Noticing) -> None:
        self._noticing = noticing
        self._sent: list[tuple[Tensor, Any]] = []

    def send(self, hidden: Tensor, target: int, tag: int) -> None:
        """Send a copy."""
        copied = self._copied(hidden)
        with self._noticing(f"rank {target} takes nothing any more"):
            self._sent.append((copied, torch.distributed.isend(copied, target, tag=tag)))

    def receive(self, hidden: Tensor, source: int, tag: int) -> None:
        """Wait for the numbers."""
        with self._noticing(f"rank {source} sends nothing any more"):
            torch.distributed.recv(hidden, source, tag=tag)

    def finish(self) -> None:
        """Wait for all sends, so that their copies can go."""
        with self._noticing("a rank takes nothing any more"):
            for _, work in self._sent:
                work.wait()
        self._sent.clear()

    def close(self, *, is_lost: bool) -> None:
        """Drop the copies."""
        self._sent.clear()

    def _copied(self, hidden: Tensor) -> Tensor:
        return hidden.clone(memory_format=torch.contiguous_format)


class StagedTransport(HostTransport):
    """gloo between GPUs, through pinned memory: the host waits for the device before it sends."""

    def __init__(self, noticing: Noticing, device: torch.device) -> None:
        super().__init__(noticing)
        self._device = device

    def receive(self, hidden: Tensor, source: int, tag: int) -> None:
        """Wait for the numbers, and enqueue their copy to the device."""
        place = self._place(hidden)
        super().receive(place, source, tag)
        hidden.copy_(place, non_blocking=True)  # torch's pinned memory is not given to others before the copy is done

    def _copied(self, hidden: Tensor) -> Tensor:
        place = self._place(hidden)
        place.copy_(hidden, non_blocking=True)
        mark = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch does not type it
        mark.record(torch.cuda.current_stream(self._device))
        mark.synchronize()
        return place

    def _place(self, hidden: Tensor) -> Tensor:
        return torch.empty(hidden.shape, dtype=hidden.dtype, pin_memory=hidden.device.type == "cuda", device="cpu")
