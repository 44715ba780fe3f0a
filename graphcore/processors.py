"""The processors that this process may use, how its threads wait, and how much time other processes took from it."""

import functools
import gc
import os
import sys
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path

from graphcore.cgroups import ROOT, group_folders, lines_of
from graphcore.errors import GraphError

# libgomp, torch's thread pool, spins while it waits for the next operation: by default for milliseconds, which costs a
# busy machine a core. This many rounds take about 0.2 ms: longer than the time between two operations.
SPIN_ROUNDS = "10000"
SPIN_VARIABLE, SPIN_VARIABLES = "GOMP_SPINCOUNT", ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
IMPORTED_AT = time.perf_counter()  # time in seconds at which graphcore was first imported
SECONDS_BEFORE_IMPORT = time.process_time()  # processor seconds that this process had used by then


def usable_processors(root: Path = ROOT) -> int:
    """Return how many processors this process can keep busy: those it may run on, or fewer under a group's CPU quota.

    A quota of one and a half processors counts as two. Source: sched_setaffinity(2), cgroup-v2.rst (cpu.max),
    scheduler/sched-bwc.rst.

    Args:
        root: root folder of the file system; another one in tests.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [_quota(folder, is_v2) for folder, is_v2 in group_folders("cpu", root)]
    return max(1, min([allowed, *(quota for quota in quotas if quota is not None)]))


def _quota(folder: Path, is_v2: bool) -> int | None:
    """Return a group's quota in whole processors, rounded up; None if it has none."""
    if is_v2:
        words = " ".join(lines_of(folder / "cpu.max")).split()
    else:
        words = [*lines_of(folder / "cpu.cfs_quota_us"), *lines_of(folder / "cpu.cfs_period_us")]
    if len(words) != 2 or not words[0].isdecimal() or not words[1].isdecimal():  # "max" and version 1's -1: no quota
        return None
    return -(-int(words[0]) // int(words[1]))


def bound_spinning(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let torch's threads spin only briefly while they wait, here and in child processes, unless the user set it.

    A command calls this for its own process, before torch is imported.
    """
    if not any(name in environment for name in SPIN_VARIABLES):
        environment[SPIN_VARIABLE] = SPIN_ROUNDS


@functools.cache
def load_torch() -> bool:
    """Import torch so that its threads spin only briefly, unless the user set it; return False if it was there before.

    libgomp reads the variable once, when `import torch` loads it. So it is set for that time alone, and the environment
    of a program that imports graphcore stays as it was.
    """
    if "torch" in sys.modules:
        return False
    was_set = any(name in os.environ for name in SPIN_VARIABLES)
    bound_spinning()
    try:
        import torch  # noqa: F401
    finally:
        if not was_set:
            os.environ.pop(SPIN_VARIABLE, None)
    return True


@contextmanager
def uncollected_imports() -> Iterator[None]:
    """Keep what the block imports out of all garbage collections, if it is the first to import torch.

    Modules stay until the process ends. Collections would look through their objects several times while they are made,
    and again at the end, which takes a fifth of a short run's processor time.
    """
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def spinning_note() -> str:
    """Return a note if torch was loaded before its threads' spinning could be limited; else an empty text."""
    if load_torch() or any(name in os.environ for name in SPIN_VARIABLES):
        return ""
    return (
        "torch was imported before graphcore's engine, so its threads spin while they wait, which is slow on a busy "
        f"machine; import graphcore.Engine first, or set {SPIN_VARIABLE}={SPIN_ROUNDS}"
    )


def seconds_queued() -> float | None:
    """Return the seconds that this process's threads were ready to run but had no processor; None if not counted.

    Source: the kernel's scheduler/sched-stats.rst, /proc/<pid>/schedstat, second field, in nanoseconds.
    """
    total = 0
    found = False
    for thread in Path("/proc/self/task").glob("*/schedstat"):
        words = " ".join(lines_of(thread)).split()
        if len(words) == 3:
            total, found = total + int(words[1]), True
    return total * 1e-9 if found else None


def refuse_forked(num_threads: int) -> None:
    """Check that this process may compute with several threads: a forked process has none of its parent's threads.

    The kernels' team and torch's pool would wait for the missing threads forever.

    Args:
        num_threads: number of threads that will compute.

    Raises:
        GraphError: another process computed first, and this one was forked from it.
    """
    if num_threads > 1 and _first_process() != os.getpid():
        raise GraphError(
            f"this process was forked from process {_first_process()} after that had loaded a model, so it lacks the "
            "threads that compute; load models after forking, use multiprocessing's 'spawn', or set threads=1"
        )


@functools.cache
def _first_process() -> int:
    """Return the id of the process that first called this, a parent's if this process was forked later."""
    return os.getpid()
