"""The time since the process began, and whether compiled code came from the cache on disk."""

import os
import time
from pathlib import Path

import psutil

from graphcore.graph.compile import CompileReport

START_TICKS_FIELD = 19  # field of /proc/self/stat after the command's name: starttime, in clock ticks since boot


def seconds_since_start() -> float:
    """Return the seconds since this process began, interpreter start and imports included.

    Linux gives the start in hundredths of a second; elsewhere psutil is used, which may be a second off.
    """
    stat = Path("/proc/self/stat")
    if not stat.exists():
        return time.time() - float(psutil.Process().create_time())
    ticks = int(stat.read_text(encoding="utf-8").rpartition(")")[2].split()[START_TICKS_FIELD])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def cache_state(report: CompileReport) -> str:
    """Return "cold" (every graph compiled anew), "warm" (every one from disk), "mixed", or "none" (no graph)."""
    if not report.cache_hits and not report.cache_misses:
        return "none"
    if not report.cache_misses:
        return "warm"
    return "mixed" if report.cache_hits else "cold"
