"""What a captured decode step really runs on the GPU, as a list that tests compare with the one of last time.

A list is kept for each GPU, torch version and model, one kernel to a line in the order in which they ran, so that a
drift (a kernel that splits in two, a copy that was not there, a product that another library takes) can be read:

    tests/golden/graphs/nvidia-h200-torch-2.13.0/llama-bf16-batch1.txt
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Protocol

import torch
from torch.profiler import ProfilerActivity, profile

from graphcore.engine.engine import Engine
from graphcore.engine.sampler import SamplingParams
from graphcore.errors import GraphError
from graphcore.streaming.scheduler import run_program
from graphcore.tasks.measure import quiet_standard_error, synchronize

MOST_LINES = 60  # of a change that are shown


class Interval(Protocol):
    """When something ran, in microseconds."""

    start: float


class DeviceType(Protocol):
    """Where something ran."""

    name: str


class Event(Protocol):
    """As much of a profiler's event as is looked at (torch.autograd.profiler_util.FunctionEvent)."""

    name: str
    device_type: DeviceType
    time_range: Interval


def nodes_of(run: Callable[[], object], device: torch.device) -> list[str]:
    """Return the names of the kernels, copies and fills that one run starts on a GPU, in order, inside graphs too."""
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with quiet_standard_error(), profile(activities=activities, acc_events=True) as profiler:
        run()
        synchronize(device)
    return names_in_order(profiler.events())


def names_in_order(events: Iterable[Event]) -> list[str]:
    """Return the names of what ran on the device, the earliest first."""
    on_device = [event for event in events if event.device_type.name == "CUDA"]
    return [event.name for event in sorted(on_device, key=lambda event: event.time_range.start)]


@torch.inference_mode()
def decode_nodes(engine: Engine, num_sequences: int = 1, params: SamplingParams | None = None) -> list[str]:
    """Return what a captured decode step runs, captured now if it was not yet; it runs on no real token.

    Args:
        params: how tokens are chosen; None takes the likeliest.

    Raises:
        GraphError: decode steps are not captured as CUDA graphs here.
    """
    runner = engine.runner
    program = runner.choosing_program(runner.width(num_sequences), params or SamplingParams())
    if program is None:
        raise GraphError(f"decode steps are no CUDA graphs on {runner.device} with graph={engine.choices.graph}")
    program.state.span.counts.zero_()
    run_program(program, runner.policy)
    return nodes_of(lambda: run_program(program, runner.policy), runner.device)


def golden_path(folder: Path, name: str, device: torch.device) -> Path:
    """Return where the list of a model is kept for this GPU and this torch, its build ("+cu130") left out."""
    gpu = torch.cuda.get_device_name(device)
    key = f"{gpu}-torch-{torch.__version__.partition('+')[0]}"
    return folder / re.sub(r"[^a-z0-9.]+", "-", key.lower()) / f"{name}.txt"


def write_nodes(nodes: Sequence[str], path: Path) -> None:
    """Keep a list for later comparisons."""
    path.parent.mkdir(parents=True, exist_ok=True)
    assert not any("\n" in node for node in nodes), "a node's name has more than one line"
    path.write_text("".join(f"{node}\n" for node in nodes), encoding="utf-8")


def drift(nodes: Sequence[str], path: Path) -> str:
    """Return how a list differs from the one that is kept; empty if it does not.

    Raises:
        FileNotFoundError: none is kept; `write_nodes` begins with one.
    """
    kept, found = path.read_text(encoding="utf-8").splitlines(), list(nodes)
    if kept == found:
        return ""
    lines = changes(kept, found)
    cut = [f"... {len(lines) - MOST_LINES} more lines"] if len(lines) > MOST_LINES else []
    return "\n".join([f"{path}: {len(kept)} nodes were kept, {len(found)} ran", *lines[:MOST_LINES], *cut])


def changes(kept: Sequence[str], found: Sequence[str]) -> list[str]:
    """Return lines that tell the change: which kernels run more or less often, then where, in order."""
    before, after = Counter(kept), Counter(found)
    names = [name for name in {**before, **after} if before[name] != after[name]]
    lines = [f"    {before[name]} -> {after[name]} times  {name}" for name in names]
    # What is alike at both ends is cut off first: layers repeat, and a matcher could shift them against each other.
    shorter = min(len(kept), len(found))
    start = next((at for at in range(shorter) if kept[at] != found[at]), shorter)
    most = shorter - start
    end = next((at for at in range(most) if kept[-1 - at] != found[-1 - at]), most)
    old, new = kept[start : len(kept) - end], found[start : len(found) - end]
    for kind, low, high, new_low, new_high in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind != "equal":
            lines += [f"- {start + at}: {old[at]}" for at in range(low, high)]
            lines += [f"+ {start + at}: {new[at]}" for at in range(new_low, new_high)]
    return lines
