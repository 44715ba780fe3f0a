"""What takes the time of some steps: kernels by their share, and the time in which none ran."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from graphcore.streaming.timeline import total, union
from graphcore.tasks.measuring.timed_runs import quiet_standard_error, synchronize

TOP = 6  # kernels that the line names
NAME_LENGTH = 44


@dataclass(frozen=True)
class Profile:
    """Kernels of some steps.

    Attributes:
        span: seconds from the first kernel's beginning to the last one's end.
        busy: seconds of it in which at least one ran.
        seconds: of each kernel's name, all of its runs.
        counts: runs of each.
    """

    steps: int
    span: float
    busy: float
    seconds: dict[str, float]
    counts: dict[str, int]

    def line(self) -> str:
        """Return the kernels that take most, how often a step runs each, and the idle share."""
        if not self.seconds:
            return "the profiler saw no kernel"
        top = sorted(self.seconds, key=self.seconds.__getitem__, reverse=True)[:TOP]
        parts = [f"{name} {self.seconds[name] / self.span:.0%} (x{self.counts[name] / self.steps:.0f})" for name in top]
        rest = sum(self.seconds.values()) - sum(self.seconds[name] for name in top)
        return (
            f"{', '.join(parts)}, other kernels {rest / self.span:.0%}, none running {1 - self.busy / self.span:.0%}; "
            f"{sum(self.counts.values()) / self.steps:.0f} kernels and {self.span / self.steps * 1e6:.0f} us a step"
        )

    def record(self) -> dict[str, object]:
        """Return everything, for report.json."""
        top = sorted(self.seconds, key=self.seconds.__getitem__, reverse=True)[:30]
        kernels = [{"name": name, "microseconds": self.seconds[name] * 1e6, "count": self.counts[name]} for name in top]
        return {"steps": self.steps, "span_seconds": self.span, "busy_seconds": self.busy, "kernels": kernels}


def profile_steps(work: Callable[[], object], steps: int, device: torch.device) -> Profile:
    """Return what runs on the device while the work does its steps; on the CPU torch's operators stand for kernels."""
    work()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with quiet_standard_error(), profile(activities=activities, acc_events=True) as profiler:
        work()
        synchronize(device)
    events = list(profiler.events())
    if device.type == "cuda":
        runs = [event for event in events if event.device_type.name == "CUDA" and not event.is_user_annotation]
    else:
        runs = [event for event in events if event.cpu_parent is None]
    return summed([(event.name, event.time_range.start, event.time_range.end) for event in runs], steps)


def summed(runs: Sequence[tuple[str, float, float]], steps: int) -> Profile:
    """Return what kernels' names, beginnings and ends, in microseconds, come to."""
    seconds: defaultdict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for name, begin, end in runs:
        seconds[short(name)] += (end - begin) / 1e6
        counts[short(name)] += 1
    intervals = union([(begin / 1e6, end / 1e6) for _, begin, end in runs])
    span = intervals[-1][1] - intervals[0][0] if intervals else 0.0
    return Profile(steps, max(span, 1e-9), total(intervals), dict(seconds), dict(counts))


def short(name: str) -> str:
    """Return a kernel's name without its template's arguments and parameters."""
    bare = re.sub(r"<.*|\(.*", "", name.removeprefix("void ")).strip() or name
    return bare.rpartition("::")[2][:NAME_LENGTH] or name[:NAME_LENGTH]
