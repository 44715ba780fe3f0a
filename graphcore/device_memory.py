"""A GPU's free memory: what a run really takes, seen from outside, and a fence that leaves only so much of it.

    total  = driver's context and others | what a run takes, and has given back | free
                                         before                            lowest

Free memory is what CUDA says it is (cudaMemGetInfo). Its drop has everything in it: weights, slots and caches, and also
graphs' pools and executables, kernels' code, libraries' workspaces, and what torch's allocator keeps. What the driver's
context takes is gone before a run begins; who else uses the device is seen, too. Not yet run on hardware.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from graphcore.errors import PlanError

GRAIN = 2 << 20  # bytes that CUDA gives out memory in
LEAST_BALLAST = 10 << 20  # torch takes 20 MiB for 1 to 10; c10/cuda/CUDACachingAllocator.cpp, kMinLargeAlloc


@dataclass
class FreeMemory:
    """A device's free bytes at some moments, of which one may be the lowest.

    Torch's allocator gives nothing back between two looks, but before it captures a graph: so a look at the end of a
    phase sees about the most that the phase took.

    Attributes:
        total: bytes of the device.
        before: free when the record began, the driver's context made already.
        moments: free at named moments since.
        lowest: of all looks.
    """

    device: torch.device
    total: int
    before: int
    moments: dict[str, int] = field(default_factory=dict)
    lowest: int = 0

    @classmethod
    def begin(cls, device: torch.device) -> "FreeMemory":
        """Return a record of a GPU that begins now; makes the driver's context."""
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        return cls(device, total, free, lowest=free)

    def look(self, moment: str | None = None) -> int:
        """Look how much is free, and return it.

        Args:
            moment: the look's name in the record; None if only its being the lowest matters.
        """
        free = torch.cuda.mem_get_info(self.device)[0]
        self.lowest = min(self.lowest, free)
        if moment is not None:
            self.moments[moment] = free
        return free

    @property
    def drop(self) -> int:
        """The most bytes that were taken since the record began."""
        return self.before - self.lowest

    @property
    def context(self) -> int:
        """Bytes that were gone when it began: the driver's context, and what others hold."""
        return self.total - self.before


@contextmanager
def device_fence(device: torch.device, nbytes: int) -> Iterator[int]:
    """Leave that many bytes of a GPU free inside the block: whoever asks for more is refused, torch or CUDA itself.

    The rest is taken, really, so that what does not go through torch's allocator meets the fence as well: graphs'
    executables, kernels' code, libraries' workspaces (torch.cuda.set_per_process_memory_fraction would miss them).

    Args:
        nbytes: that can be taken inside, besides the driver's context, which is there already.

    Yields:
        Bytes that are really free, up to 10 MiB more.

    Raises:
        PlanError: fewer are free.
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
