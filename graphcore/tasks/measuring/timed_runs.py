"""Timed repeats of a function, their spread, and the number of kernels that one run launches."""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.autograd.profiler import profile  # torch.profiler's imports the compiler when it starts
from torch.autograd.profiler_util import FunctionEvent

# Operators that move no bytes: they make views, read shapes, or allocate memory.
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
    """The median, extremes and quartiles of repeated measurements, in their unit."""

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
    """Wait until the device has done all enqueued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_repeats(
    work: Callable[[], object], repeats: int, device: torch.device, prepare: Callable[[], object] = lambda: None
) -> list[float]:
    """Return the seconds of each repeat; the device is idle before and after each.

    Args:
        prepare: function that is called before each repeat and not timed.
    """
    seconds = []
    for _ in range(repeats):
        prepare()
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    return seconds


def count_kernels(work: Callable[[], object], device: torch.device) -> int:
    """Return the number of kernels that one run of the work launches.

    On CUDA these are the kernels that ran on the device, including those of captured graphs. On the CPU the profiler
    does not see into compiled code; there these are the outermost calls that move bytes, where an operator or a whole
    compiled graph is one call. A native program does not go through torch and is not counted.
    """
    use_device = "cuda" if device.type == "cuda" else None
    with quiet_standard_error(), profile(use_device=use_device, use_kineto=True, acc_events=True) as profiler:
        work()
        synchronize(device)
    events = list(profiler.function_events)
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
    """Discard what native code prints to standard error inside the block: torch's profiler prints when it starts."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
