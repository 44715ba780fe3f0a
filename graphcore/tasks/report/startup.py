"""The time since Python began, and whether compiled code came from the cache on disk."""

import time

from graphcore.graph.compile import CompileReport
from graphcore.processors import IMPORTED_AT, SECONDS_BEFORE_IMPORT


def seconds_since_start() -> float:
    """Return the seconds since Python began in this process, interpreter start and imports included.

    The age of the process is more where a shell became Python with exec, as `bash -c "pip install ...; python run.py"`
    does: it counts the installation. So the time before graphcore was imported is the processor time until then. Waits
    for the disk before it are not counted.
    """
    return time.perf_counter() - IMPORTED_AT + SECONDS_BEFORE_IMPORT


def cache_state(report: CompileReport) -> str:
    """Return "cold" (every graph compiled anew), "warm" (every one from disk), "mixed", or "none" (no graph)."""
    if not report.cache_hits and not report.cache_misses:
        return "none"
    if not report.cache_misses:
        return "warm"
    return "mixed" if report.cache_hits else "cold"
