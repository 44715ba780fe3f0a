"""Memory in RAM that begins at a page: anonymous, zeroed, and given back to the system with the last tensor in it."""

import math
import mmap
from contextlib import suppress

import torch
from torch import Tensor


def shared_pages(nbytes: int) -> Tensor:
    """Return page-aligned memory, uint8, that a fork shares instead of copying: for buffers rewritten often.

    Raises:
        MemoryError: the system gives no such memory.
    """
    return torch.frombuffer(_mapped(nbytes), dtype=torch.uint8)


def private_pages(nbytes: int) -> Tensor:
    """Return page-aligned memory, [nbytes] uint8, in huge pages if the system has them: for weights and caches.

    The system allocates the pages when they are first written. Huge pages are filled and locked faster, and read
    faster in a decode step, which touches every page once (docs/lab/decode_cpu.md).

    Raises:
        MemoryError: the system gives no such memory.
    """
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return shared_pages(nbytes)[:nbytes]
    pages = _mapped(nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]


def _mapped(nbytes: int, **flags: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), **flags)
    except OSError as error:
        raise MemoryError(f"{nbytes} bytes of RAM: {error.strerror}") from error


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a zeroed tensor, on the CPU in private pages, all of which are allocated now: no answer waits for them.

    Raises:
        MemoryError: the system gives no such memory.
    """
    if device.type != "cpu" or not math.prod(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    return private_pages(math.prod(shape) * dtype.itemsize).view(dtype).view(shape).zero_()
