"""Memory that has its pages to itself, so that it can be locked, and read past the page cache.

A page that is locked for a GPU must not hold anything else: a copy from memory of which some is locked and some is not
is refused. Source: CUDA Driver API, "API synchronization behavior": regions must be registered entirely or not at all.
"""

import mmap

import torch
from torch import Tensor


def shared_pages(nbytes: int) -> Tensor:
    """Return page-aligned memory, uint8, that a fork does not copy: for buffers that are written again and again."""
    return torch.frombuffer(mmap.mmap(-1, max(nbytes, mmap.PAGESIZE)), dtype=torch.uint8)


def private_pages(nbytes: int) -> Tensor:
    """Return page-aligned memory, [nbytes] uint8, in huge pages where the system has them: for what is written once.

    It is there when it has been written to. Huge pages are filled, and locked, in a fraction of the time.
    """
    length = max(nbytes, mmap.PAGESIZE)
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return shared_pages(length)[:nbytes]
    pages = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]
