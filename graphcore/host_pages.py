"""Memory in RAM that begins at a page: anonymous, zeroed, and given back to the system with the last tensor in it."""

import math
import mmap

import torch
from torch import Tensor


def shared_pages(nbytes: int) -> Tensor:
    """Return page-aligned memory, uint8, that a fork shares instead of copying: for buffers rewritten often."""
    return torch.frombuffer(mmap.mmap(-1, max(nbytes, mmap.PAGESIZE)), dtype=torch.uint8)


def private_pages(nbytes: int) -> Tensor:
    """Return page-aligned memory, [nbytes] uint8, in huge pages if the system has them: for weights and caches.

    The system allocates the pages when they are first written. Huge pages are filled and locked faster, and read
    faster in a decode step, which touches every page once (docs/lab/decode_cpu.md).
    """
    length = max(nbytes, mmap.PAGESIZE)
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return shared_pages(length)[:nbytes]
    pages = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a zeroed tensor; on the CPU in private pages, most of which are not there until they are written."""
    if device.type != "cpu" or not math.prod(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    return private_pages(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
