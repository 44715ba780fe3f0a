"""Measurement of a GPU's free memory: what a run really takes, and a fence that limits how much a run can take.

    total  = driver's context and others | what a run takes, and has given back | free
                                         before                            lowest

Free memory is what CUDA reports (cudaMemGetInfo). Its drop includes everything: weights, slots and caches, and also
graphs' pools and executables, kernels' code, libraries' workspaces, and memory that torch's allocator keeps. The
driver's context is taken before a run begins; other users of the device count, too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from graphcore.errors import PlanError

GRAIN = 2 << 20  # bytes; CUDA allocates memory in multiples of it
LEAST_BALLAST = 10 << 20  # torch takes 20 MiB for 1 to 10; c10/cuda/CUDACachingAllocator.cpp, kMinLargeAlloc


@dataclass
class FreeMemory:
    """A device's free bytes at some moments, and the lowest of them.

    Torch's allocator returns memory only before it captures a graph, so the free bytes at the end of a phase are about
    the lowest of that phase.

    Attributes:
        total: bytes of the device.
        before: free bytes when the record began, with the driver's context already made.
        moments: free bytes at later moments, by their names.
        lowest: lowest free bytes of all looks.
    """

    device: torch.device
    total: int
    before: int
    moments: dict[str, int] = field(default_factory=dict)
    lowest: int = 0

    @classmethod
    def begin(cls, device: torch.device) -> "FreeMemory":
        """Return a new record of a GPU's free memory; makes the driver's context."""
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        return cls(device, total, free, lowest=free)

    def look(self, moment: str | None = None) -> int:
        """Read how many bytes are free, record them, and return them.

        Args:
            moment: name of the look in the record; None if it only counts for the lowest.
        """
        free = torch.cuda.mem_get_info(self.device)[0]
        self.lowest = min(self.lowest, free)
        if moment is not None:
            self.moments[moment] = free
        return free

    @property
    def drop(self) -> int:
        """The most bytes taken since the record began."""
        return self.before - self.lowest

    @property
    def context(self) -> int:
        """Bytes already taken when the record began: the driver's context, and other users' memory."""
        return self.total - self.before


@contextmanager
def device_fence(device: torch.device, nbytes: int) -> Iterator[int]:
    """Leave only `nbytes` of a GPU free inside the block; larger allocations fail, in torch or in CUDA itself.

    The other memory is really allocated, so that the fence also limits memory outside torch's allocator: graphs'
    executables, kernels' code, libraries' workspaces (torch.cuda.set_per_process_memory_fraction would miss them).

    Args:
        nbytes: bytes that can be taken inside, besides the driver's context, which exists already.

    Yields:
        The bytes that are really free, up to 10 MiB more.

    Raises:
        PlanError: fewer bytes are free.
    """
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    if free < nbytes:
        raise PlanError(
            f"a fence of {nbytes} bytes on {device} needs as many free, {free} of {total} are; end what else uses it"
        )
    ballast = (free - nbytes) // GRAIN * GRAIN
    held = torch.empty(ballast if ballast >= LEAST_BALLAST else 0, dtype=torch.uint8, device=device)
    try:
        yield torch.cuda.mem_get_info(device)[0]
    finally:
        del held
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
