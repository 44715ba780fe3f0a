"""How much of a checkpoint the operating system already holds in memory."""

import ctypes
import mmap
import os
import sys
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

import numpy as np

from graphcore.checkpoint.file_bytes import opened
from graphcore.checkpoint.runs import runs_of
from graphcore.checkpoint.span import Span


def cached_share(spans: Iterable[Span]) -> float:
    """Return which share of the spans' pages is in the page cache: 0 to 1.

    Nothing is read. A file about which the system does not tell counts as not cached: anywhere but on Linux, or where
    we may not write to the file, for then it would claim that every page is there (mincore(2), since Linux 5.2).

    Raises:
        CheckpointNotFoundError: a file is gone.
        CheckpointError: a file cannot be opened.
    """
    cached = pages = 0
    for path, runs in groupby(runs_of(spans), key=lambda run: run.file):
        found = _pages_of(path, list(runs))
        cached += int(np.count_nonzero(found))
        pages += found.size
    return cached / pages if pages else 0.0


def _pages_of(path: Path, runs: list[Span]) -> np.ndarray:
    """Return for each page of the runs whether it is in the page cache."""
    places = [(run.offset // mmap.PAGESIZE, -(-run.end // mmap.PAGESIZE)) for run in runs]  # first page, and end
    with opened(path) as stream:
        status = os.fstat(stream.fileno())
        may_ask = os.geteuid() in (0, status.st_uid) or os.access(path, os.W_OK)
        if sys.platform != "linux" or not may_ask or not status.st_size:
            return np.zeros(sum(end - first for first, end in places), dtype=np.uint8)
        # Never touched: a touch would read the file, or kill the process if it shrank.
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
            return np.concatenate([_resident(mapping, first, end) for first, end in places])


def _resident(mapping: mmap.mmap, first: int, end: int) -> np.ndarray:
    """Return for pages first .. end - 1 whether they are in memory; pages after the mapping are not."""
    pages = np.zeros(end - first, dtype=np.uint8)
    mapped = min(end, -(-len(mapping) // mmap.PAGESIZE)) - first
    if mapped > 0:
        start = np.frombuffer(mapping, dtype=np.uint8).ctypes.data + first * mmap.PAGESIZE
        mincore = ctypes.CDLL(None).mincore
        mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        mincore(start, mapped * mmap.PAGESIZE, pages.ctypes.data)  # what fails leaves zeros
    return pages & 1
