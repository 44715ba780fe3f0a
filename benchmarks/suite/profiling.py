"""What takes the time of some steps: launches by kernel and grid, each with the bytes that it reads, and idle time.

Bytes are known where a launch of graphcore's own kernels reads weights: the same steps run once more outside of their
graph while a recorder writes down the weights in each launch's arguments. Where the launches that were timed are not
those that were recorded, in their order, bytes are left out. Keys, values and activations are not counted.
"""

import json
import re
import tempfile
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from graphcore.engine.program_runner import ProgramRunner
from graphcore.graph.gpu.capture import CapturedStep
from graphcore.nn.decoder import Decoder
from graphcore.nn.moe import ExpertLinear, MoE
from graphcore.streaming.timeline import total, union
from graphcore.tasks.measuring.timed_runs import quiet_standard_error, synchronize

TOP = 6  # launches that the line names
KEPT = 40  # launches that the record has
NAME_LENGTH = 44


class Launch(NamedTuple):
    """A kind of launch: a kernel, its grid, and the bytes of weights that it reads; None where they are not known."""

    name: str
    grid: str
    nbytes: int | None

    @property
    def words(self) -> str:
        return f"{self.name}{self.grid}"


class Run(NamedTuple):
    """One launch as the profiler saw it; times in seconds."""

    name: str
    grid: str
    begin: float
    end: float


@dataclass(frozen=True)
class Profile:
    """Launches of some steps.

    Attributes:
        span: seconds from the first launch's beginning to the last one's end.
        busy: seconds of it in which at least one ran.
        seconds: of each kind of launch, all of its runs.
        counts: runs of each.
    """

    steps: int
    span: float
    busy: float
    seconds: Mapping[Launch, float]
    counts: Mapping[Launch, int]

    def gb_per_second(self, launch: Launch) -> float | None:
        """Return the rate at which a kind of launch reads its weights."""
        return launch.nbytes and launch.nbytes * self.counts[launch] / self.seconds[launch] / 1e9

    def line(self) -> str:
        """Return the launches that take most, how often a step has each, their rates, and the idle share."""
        if not self.seconds:
            return "the profiler saw no kernel"
        top = sorted(self.seconds, key=self.seconds.__getitem__, reverse=True)[:TOP]
        rest = sum(self.seconds.values()) - sum(self.seconds[launch] for launch in top)
        return (
            f"{', '.join(map(self._words, top))}, other kernels {rest / self.span:.0%}, "
            f"none running {1 - self.busy / self.span:.0%}; "
            f"{sum(self.counts.values()) / self.steps:.0f} kernels and {self.span / self.steps * 1e6:.0f} us a step"
        )

    def _words(self, launch: Launch) -> str:
        rate = self.gb_per_second(launch)
        at = "" if rate is None else f" at {rate:.0f} GB/s"
        return f"{launch.words} {self.seconds[launch] / self.span:.0%} (x{self.counts[launch] / self.steps:.0f}){at}"

    def record(self) -> dict[str, object]:
        """Return everything, for report.json."""
        top = sorted(self.seconds, key=self.seconds.__getitem__, reverse=True)[:KEPT]
        launches = [
            {
                "name": launch.name,
                "grid": launch.grid,
                "count": self.counts[launch],
                "microseconds": self.seconds[launch] * 1e6,
                "share": self.seconds[launch] / self.span,
                "bytes": launch.nbytes,
                "gb_per_second": self.gb_per_second(launch),
            }
            for launch in top
        ]
        return {"steps": self.steps, "span_seconds": self.span, "busy_seconds": self.busy, "launches": launches}


def profile_steps(
    work: Callable[[], object], steps: int, device: torch.device, runner: ProgramRunner | None = None, batch: int = 1
) -> Profile:
    """Return what runs on the device while the work does its steps; on the CPU torch's operators stand for kernels.

    Args:
        runner: whose captured greedy decode steps of `batch` sequences the work runs; without it no bytes are known.
    """
    work()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with quiet_standard_error(), profile(activities=activities, acc_events=True) as profiler:
        work()
        synchronize(device)
    if device.type == "cuda":
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            runs = runs_of(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])
    else:
        events = [event for event in profiler.events() if event.cpu_parent is None]
        times = [(event.name, event.time_range.start / 1e6, event.time_range.end / 1e6) for event in events]
        runs = [Run(name, "", begin, end) for name, begin, end in times]
    return summed(runs, steps, () if runner is None else recorded_step(runner, batch))


def runs_of(events: Sequence[Mapping[str, Any]]) -> list[Run]:
    """Return the kernels, copies and fills of a Chrome trace, in order; only kernels have a grid."""
    found = []
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            grid = event["args"].get("grid")
            words = "" if grid is None else f"[{' x '.join(map(str, trimmed(grid)))}]"
            found.append(Run(event["name"], words, event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6))
    return sorted(found, key=lambda run: run.begin)


def trimmed(grid: Sequence[int]) -> Sequence[int]:
    """Return a grid without the ones at its end."""
    most = max((at for at, size in enumerate(grid, 1) if size != 1), default=1)
    return grid[:most]


def summed(runs: Sequence[Run], steps: int, step: Sequence[tuple[str, int]] = ()) -> Profile:
    """Return what launches come to.

    Args:
        step: kernels of one step with bytes of weights, in order, as `recorded_step` has them.
    """
    seconds: defaultdict[Launch, float] = defaultdict(float)
    counts: Counter[Launch] = Counter()
    for run, nbytes in zip(runs, nbytes_of([run.name for run in runs], steps, step), strict=True):
        launch = Launch(short(run.name), run.grid, nbytes)
        seconds[launch] += run.end - run.begin
        counts[launch] += 1
    intervals = union([(run.begin, run.end) for run in runs])
    span = intervals[-1][1] - intervals[0][0] if intervals else 0.0
    return Profile(steps, max(span, 1e-9), total(intervals), dict(seconds), dict(counts))


def nbytes_of(names: Sequence[str], steps: int, step: Sequence[tuple[str, int]]) -> list[int | None]:
    """Return each launch's bytes of weights; None where it reads none that are known.

    The launches whose kernels the recorder knows must be `steps` times the recorded ones, in their order.
    """
    known = {name for name, _ in step}
    places = [at for at, name in enumerate(names) if name in known]
    found: list[int | None] = [None] * len(names)
    if [names[at] for at in places] == [name for name, _ in step] * steps:
        for at, (_, nbytes) in zip(places, list(step) * steps, strict=True):
            found[at] = nbytes or None
    return found


def short(name: str) -> str:
    """Return a kernel's name without its template's arguments and parameters."""
    bare = re.sub(r"<.*|\(.*", "", name.removeprefix("void ")).strip() or name
    return bare.rpartition("::")[2][:NAME_LENGTH] or name[:NAME_LENGTH]


def recorded_step(runner: ProgramRunner, batch: int) -> list[tuple[str, int]]:
    """Return the launches of graphcore's kernels in one greedy step, in order, with the bytes of their weights.

    A captured step runs outside of its graph. A program in several pieces hands over memory between them; its launches
    are not recorded.
    """
    with torch.inference_mode():
        program = runner.program("decode", runner.width(batch), is_greedy=True)
        steps = program.steps
        if any(isinstance(step, CapturedStep) for step in steps):
            (only, *others) = steps
            if others or not isinstance(only, CapturedStep):
                return []
            steps = only.steps
        state = program.state
        for row in range(batch):
            runner.reserve(row, 0, 1)
        state.put_rows([[1]] * batch, [0] * batch)
        made = state.hidden, state.ropes
        with recorder(WeightRanges.of(runner.builder.decoder, batch)) as launches:
            for step in steps:
                step.replay()
            synchronize(runner.device)
        state.hidden, state.ropes = made
    return launches


@dataclass(frozen=True)
class WeightRanges:
    """Where a decoder's weights lie, so that a launch's arguments tell which of them it reads.

    Attributes:
        begins, ends: addresses, in order.
        used: share of each that a step reads: of experts, the chosen ones, where sequences choose different ones.
    """

    begins: Sequence[int]
    ends: Sequence[int]
    used: Sequence[float]

    @classmethod
    def of(cls, decoder: Decoder, batch: int) -> "WeightRanges":
        """Return the ranges of all buffers, for a step of that many sequences."""
        shares: dict[int, float] = {}
        for module in decoder.modules():
            if isinstance(module, MoE):
                experts = [part for part in module.experts.children() if isinstance(part, ExpertLinear)]
                shares |= {id(part): min(1.0, module.top_k * batch / part.experts) for part in experts}
        ranges = {
            (buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes, shares.get(id(module), 1.0))
            for module in decoder.modules()
            for buffer in module.buffers(recurse=False)
            if buffer.nbytes
        }
        begins, ends, used = zip(*sorted(ranges), strict=True)
        return cls(begins, ends, used)

    def nbytes(self, tensor: torch.Tensor) -> int:
        """Return the bytes of a tensor that a step reads, if it is a weight or a part of one."""
        at = bisect_right(self.begins, tensor.data_ptr()) - 1
        if at < 0 or tensor.data_ptr() >= self.ends[at]:
            return 0
        return round(tensor.nbytes * self.used[at])


@contextmanager
def recorder(weights: WeightRanges) -> Iterator[list[tuple[str, int]]]:
    """Write down each launch of a Triton kernel inside the block: its name, and the bytes of weights that it reads."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    launches: list[tuple[str, int]] = []
    kept = [(kind, kind.run) for kind in (JITFunction, InterpretedFunction)]

    def recording(launch: Callable[..., object]) -> Callable[..., object]:
        def run(self: Any, *args: object, **options: object) -> object:
            launches.append((self.fn.__name__, sum(weights.nbytes(tensor) for tensor in tensors_in([*args]))))
            return launch(self, *args, **options)

        return run

    for kind, launch in kept:
        kind.run = recording(launch)
    try:
        yield launches
    finally:
        for kind, launch in kept:
            kind.run = launch


def tensors_in(arguments: Sequence[object]) -> Iterator[torch.Tensor]:
    """Yield the tensors of a launch's arguments, also those in tuples."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, tuple | list):
            yield from tensors_in(argument)
