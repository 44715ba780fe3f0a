"""The time since Python began, and whether compiled code came from the cache on disk."""

import time

from graphcore.graph.compile import CompileReport
from graphcore.processors import IMPORTED_AT, SECONDS_BEFORE_IMPORT


def seconds_since_start() -> float:
    """Return the seconds since Python began in this process, interpreter start and imports included.

    The process's age would be too large where a shell replaces itself by Python, as
    `bash -c "pip install ...; python run.py"` does: it includes the installation. So the time before graphcore's import
    is measured as processor time, without waits for the disk.
    """
    return time.perf_counter() - IMPORTED_AT + SECONDS_BEFORE_IMPORT


def cache_state(report: CompileReport) -> str:
    """Return "cold" (every graph compiled anew), "warm" (every one from disk), "mixed", or "none" (no graph)."""
    if not report.cache_hits and not report.cache_misses:
        return "none"
    if not report.cache_misses:
        return "warm"
    return "mixed" if report.cache_hits else "cold"
