"""Measuring: repeats of one piece of work, their spread, the memory they take, and the kernels of one run."""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

# Operators that move no bytes: they make views, look at shapes, or take memory.
WITHOUT_KERNEL = frozenset(
    f"aten::{name}"
    for name in (
        *("alias", "as_strided", "chunk", "detach", "expand", "lift_fresh", "narrow", "permute", "reshape", "select"),
        *("slice", "split", "squeeze", "t", "to", "transpose", "unbind", "unsqueeze", "view", "_unsafe_view"),
        *("empty", "empty_like", "empty_strided", "resize_", "resolve_conj", "resolve_neg", "result_type"),
    )
)
BOOKKEEPING = ("TorchDynamo Cache Lookup", "Pregraph bytecode", "AOTDispatcher")


@dataclass(frozen=True)
class Spread:
    """What repeats of one measurement gave, in its unit."""

    median: float
    min: float
    q1: float
    q3: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return the spread of at least one value."""
        quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
        return cls(statistics.median(values), min(values), quartiles[0], quartiles[2], max(values))


def synchronize(device: torch.device) -> None:
    """Return when the device has done everything that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_repeats(work: Callable[[], object], repeats: int, device: torch.device) -> list[float]:
    """Return the seconds of each of the repeats, the device idle at both ends."""
    seconds = []
    for _ in range(repeats):
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    return seconds


class PeakMemory:
    """The most memory taken since this object was made.

    On CUDA what torch has allocated on the device; on the CPU the growth of the process's resident set, which has the
    weights, the caches, what loading and compiling took, and the code itself.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._baseline = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._baseline = torch.cuda.memory_allocated(device)
        else:
            with suppress(OSError):  # where the kernel does not let the peak be reset, an earlier one counts
                Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            self._baseline = resident_nbytes("VmRSS")

    def nbytes(self) -> int:
        """Return the peak so far."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self._baseline
        return max(0, resident_nbytes("VmHWM") - self._baseline)


def resident_nbytes(field: str) -> int:
    """Return VmRSS (resident now), VmHWM (its highest) or RssShmem (shared memory now) of this process.

    Source: proc(5), /proc/pid/status.
    """
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    kibibytes = next(line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return int(kibibytes) * 1024


def count_kernels(work: Callable[[], object], device: torch.device) -> int:
    """Return how many kernels one run of the work starts.

    On CUDA: kernels that ran on the device, inside a captured graph too. On the CPU, where the profiler does not see
    into compiled code: outermost calls that move bytes, an operator or a whole compiled graph being one. A native
    program is called past torch and not counted.
    """
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with quiet_standard_error(), profile(activities=activities, acc_events=True) as profiler:
        work()
        synchronize(device)
    events = list(profiler.events())
    if device.type == "cuda":
        on_device = [event for event in events if event.device_type.name == "CUDA"]
        return sum(not event.name.startswith(("Memcpy", "Memset")) for event in on_device)
    outermost = [event for event in events if event.cpu_parent is None]
    return sum(moves_bytes(event) for event in outermost)


def moves_bytes(event: FunctionEvent) -> bool:
    """Return whether the event, or one that it called, is more than a view, an allocation or bookkeeping."""
    if event.name.startswith(BOOKKEEPING):
        return False
    return any(map(moves_bytes, event.cpu_children)) if event.name in WITHOUT_KERNEL else True


@contextmanager
def quiet_standard_error() -> Iterator[None]:
    """Drop what native code prints to standard error inside the block: torch's profiler says when it starts."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
