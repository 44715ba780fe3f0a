"""Queries of the page cache: how much of a checkpoint the operating system already holds in memory."""

import ctypes
import mmap
import os
import sys
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

import numpy as np

from graphcore.checkpoint.file_bytes import FileSpan, opened


def cached_share(spans: Iterable[FileSpan]) -> float:
    """Return the share of the spans' pages that are in the page cache: 0 to 1. Nothing is read.

    A file counts as not cached if the system gives no reliable answer: on systems other than Linux, and for files that
    the process neither owns nor may write, for which mincore(2) reports every page as present since Linux 5.2.

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


def _pages_of(path: Path, runs: list[FileSpan]) -> np.ndarray:
    """Return whether each page of the runs is in the page cache, uint8."""
    places = [(run.offset // mmap.PAGESIZE, -(-run.end // mmap.PAGESIZE)) for run in runs]  # first page, stop
    with opened(path) as stream:
        status = os.fstat(stream.fileno())
        may_ask = os.geteuid() in (0, status.st_uid) or os.access(path, os.W_OK)
        if sys.platform != "linux" or not may_ask or not status.st_size:
            return np.zeros(sum(end - first for first, end in places), dtype=np.uint8)
        # The mapping is never accessed: that would read the file, or kill the process if the file shrank.
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
            return np.concatenate([_resident(mapping, first, end) for first, end in places])


def _resident(mapping: mmap.mmap, first: int, end: int) -> np.ndarray:
    """Return whether each of the pages first .. end - 1 is in memory, uint8; pages past the mapping are not."""
    pages = np.zeros(end - first, dtype=np.uint8)
    mapped = min(end, -(-len(mapping) // mmap.PAGESIZE)) - first
    if mapped > 0:
        start = np.frombuffer(mapping, dtype=np.uint8).ctypes.data + first * mmap.PAGESIZE
        mincore = ctypes.CDLL(None).mincore
        mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        mincore(start, mapped * mmap.PAGESIZE, pages.ctypes.data)  # a failure leaves zeros
    return pages & 1


def runs_of(spans: Iterable[FileSpan]) -> tuple[FileSpan, ...]:
    """Merge spans into the fewest runs, sorted by file and offset.

    Spans that touch or overlap become one run, so that shared bytes are counted once. A layer's tensors are often not
    one run: files may be sorted by dtype (all scales, then all blocks) or by name (layers 0, 1, 10, 11, 2), or be cut
    into shards in the middle of a layer.
    """
    runs: list[FileSpan] = []
    for span in sorted(span for span in spans if span.nbytes):
        if runs and runs[-1].file == span.file and span.offset <= runs[-1].end:
            last = runs.pop()
            span = FileSpan(last.file, last.offset, max(last.end, span.end) - last.offset)
        runs.append(span)
    return tuple(runs)
