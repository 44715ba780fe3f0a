"""How fast a GPU's memory is, timed by the device itself: reading, which decode does, and copying, which cards state.

A copy of n bytes moves 2 n: they are read and written. Cards are compared by that rate (the target of a decode step is
a share of it), and what only reads may be a little faster. Not yet run on hardware.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

DEVICE_NBYTES = 4 * 10**9  # of the buffer: far more than the largest cache holds; less where less is free
FREE_SHARE = 4  # of what is free, one part: two buffers are needed, and something is to be left
WARM_RUNS = 2


@dataclass(frozen=True)
class DeviceBandwidth:
    """Bytes per second of the fastest of some runs.

    Attributes:
        read: of torch.sum over float32.
        copied: of a copy on the device; read and written bytes count, so twice the buffer.
        nbytes: of the buffer.
    """

    read: float
    copied: float
    nbytes: int


def measure_device_bandwidth(device: torch.device, nbytes: int = DEVICE_NBYTES, repeats: int = 10) -> DeviceBandwidth:
    """Return how fast a GPU reads its memory, and copies inside it.

    Args:
        nbytes: of the buffer, at most; a quarter of what is free if that is less.
        repeats: runs of each, beside some that are not timed.
    """
    free = torch.cuda.mem_get_info(device)[0]
    count = min(nbytes, free // FREE_SHARE) // 4
    source, out = torch.ones(count, device=device), torch.empty(count, device=device)
    read = fastest_seconds(lambda: source.sum(), repeats)
    copied = fastest_seconds(lambda: out.copy_(source), repeats)
    return DeviceBandwidth(source.nbytes / read, 2 * source.nbytes / copied, source.nbytes)


def fastest_seconds(work: Callable[[], object], repeats: int) -> float:
    """Return the seconds that work takes on the current stream, between two events: the least of some runs."""
    found: list[float] = []
    for _ in range(WARM_RUNS + repeats):
        began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch does not type it
        ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # as above
        began.record()
        work()
        ended.record()
        ended.synchronize()
        found.append(began.elapsed_time(ended) / 1e3)
    return min(found[WARM_RUNS:])
