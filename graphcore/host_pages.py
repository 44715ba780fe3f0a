"""Page-aligned host memory from anonymous mmap, zeroed; it is unmapped when the last tensor that views it is freed."""

import math
import mmap
from contextlib import suppress

import torch
from torch import Tensor


def shared_pages(nbytes: int) -> Tensor:
    """Return shared page-aligned memory, at least `nbytes` of uint8: a fork shares it, so rewriting it copies no page.

    Raises:
        MemoryError: the system gives no such memory.
    """
    return torch.frombuffer(_mapped(nbytes), dtype=torch.uint8)


def private_pages(nbytes: int) -> Tensor:
    """Return private page-aligned memory, [nbytes] uint8, backed by transparent huge pages where the system has them.

    The system allocates the pages when they are first written. Huge pages are filled and locked faster, and need fewer
    TLB entries: a decode step reads all weights once (docs/lab/decode_cpu.md).

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


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, touched: int | None = None) -> Tensor:
    """Return a zeroed tensor; on the CPU in `private_pages`, touched now so that decoding has no page faults.

    Args:
        touched: leading rows of `shape` that are touched; the system allocates the others when they are written. None
            touches all.

    Raises:
        MemoryError: the system gives no such memory.
    """
    if device.type != "cpu" or not math.prod(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = private_pages(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
    pages[:touched].zero_()
    return pages
