"""Page-aligned host memory from mmap, zeroed; it is unmapped when the last tensor that views it is freed.

anonymous       stays in RAM
of a file       the system writes pages to disk and drops them when memory runs short, and reads them when they are used
"""

import math
import mmap
import os
import tempfile
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from graphcore.cgroups import lines_of


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


def file_pages(nbytes: int, folder: Path) -> Tensor:
    """Return page-aligned memory of a new file in a folder, [nbytes] uint8. The disk's space is reserved.

    The file has no name, so that nothing is left of it once the tensor is freed, or the process has ended in any way.

    Raises:
        OSError: the folder cannot be written, or its disk has no room.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)  # without room later, a write to the memory would end the process
        return torch.from_file(f"/proc/self/fd/{file.fileno()}", shared=True, size=nbytes, dtype=torch.uint8)


def is_of_file(tensor: Tensor) -> bool:
    """Return whether a tensor's memory is that of a file (`file_pages`)."""
    return tensor.device.type == "cpu" and tensor.untyped_storage().filename is not None


def is_in_ram(folder: Path) -> bool:
    """Return whether a folder's file system keeps its files in RAM. Source: proc(5), /proc/pid/mountinfo."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in lines_of(Path("/proc/self/mountinfo")):
        mounted, _, described = line.partition(" - ")
        if mounted.split()[2] == number:
            return described.split()[0] in ("tmpfs", "ramfs")
    return False


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
