"""Engines whose weights stream, their results, and timelines as a ring of slots makes them."""

import bisect
import gc
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from graphcore import Engine
from graphcore.engine.program_runner import ProgramRunner
from graphcore.engine.scoring import token_losses
from graphcore.errors import PlanError
from graphcore.streaming.report import Measured, report_streaming
from graphcore.streaming.timeline import Event
from graphcore.streaming.weight_stream import WeightStream
from support.fake_sources import Wrapped
from support.tiny_models import VOCAB

# Engines whose weights stream, and what of them tests look at.

SIZES = ("batch_size=3", "prefill_chunk=16", "context_length=256")


def load(
    folder: Path,
    *overrides: str,
    streaming: str = "on",
    dtype: str = "fp32",
    graph: str = "eager",
    quant: str = "stored",
) -> Engine:
    """Load a model on the CPU with its matrices streaming."""
    return Engine.load(
        folder,
        dtype=dtype,
        quant=quant,
        device="cpu",
        graph=graph,
        streaming=streaming,
        overrides=[*SIZES, *overrides],
    )


def runs_as(engine: Engine, graph: str) -> bool:
    """Return whether decode steps run as `graph` asks: with auto as native programs, whose prompts are not compiled."""
    return engine.choices.graph == {"auto": "captured"}.get(graph, graph)


def smallest_budget(
    folder: Path, *overrides: str, streaming: str = "on", dtype: str = "fp32", graph: str = "eager"
) -> int:
    """Return what the refusal of an impossible budget says would work, in bytes."""
    with pytest.raises(PlanError, match=r"the smallest streaming.memory_budget that works .* is \d+ bytes") as refusal:
        load(folder, "streaming.memory_budget=1KiB", *overrides, streaming=streaming, dtype=dtype, graph=graph)
    return int(str(refusal.value).rpartition(" is ")[2].split(" bytes")[0])


def stream_of(engine: Engine) -> WeightStream:
    """Return what moves an engine's weights."""
    return engine.loaded.weight_stream


def wrap(engine: Engine, on_read: Callable[[int], None] = lambda number: None, lacking: int = 0) -> list[Wrapped]:
    """Put something before every read of an engine's files; see `Wrapped`."""
    files = stream_of(engine).files
    for path, source in list(files.items()):
        files[path] = Wrapped(source, on_read, lacking)
    return [source for source in files.values() if isinstance(source, Wrapped)]


def unwrap(engine: Engine) -> None:
    """Read the files themselves again."""
    files = stream_of(engine).files
    for path, source in list(files.items()):
        if isinstance(source, Wrapped):
            files[path] = source.inner


def fill_threads() -> list[str]:
    """Return the names of the threads that read weights, of all engines."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("graphcore-fill")]


def collect_until(has_happened: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Collect garbage until something has happened; return whether it has.

    The thread that computed for a forgotten engine holds it until its last pass has ended, a moment after the answer.
    """
    end = time.monotonic() + seconds
    while True:
        gc.collect()
        if has_happened():
            return True
        if time.monotonic() > end:
            return False
        time.sleep(0.01)


# How far an engine's logits are from those of a transformers model.

LENGTH, PROMPT = 45, 34  # as many steps as the widest convolution has tokens


@torch.inference_mode()
def errors_of(path: Path, model: nn.Module, graph: str, overrides: Sequence[str] = ()) -> tuple[float, float]:
    """Return the largest error of one pass over each of two sequences, and of one token by token after a prompt."""
    ids = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(100))
    expected = model(input_ids=ids, use_cache=False).logits
    sizes = [*SIZES, *([] if graph == "eager" else ["batch_size=1"]), *overrides]
    with Engine.load(path, dtype="fp32", device="cpu", graph=graph, overrides=sizes) as engine:
        assert runs_as(engine, graph)
        whole = (torch.cat([engine.logits(row[None]) for row in ids]) - expected).abs().max().item()
        row = ids[1].tolist()
        steps = [engine.runner.extend([row[:PROMPT]], [0])]
        steps += [engine.runner.extend([[token]], [at]) for at, token in enumerate(row[PROMPT:], start=PROMPT)]
        return whole, (torch.cat(steps) - expected[1, PROMPT - 1 :]).abs().max().item()


# What every way of using an engine gives, to be compared to the bit between resident and streamed weights.

PROMPTS = ([1, 2, 3, 4, 5, 6, 7, 8, 9], list(range(1, 25)), [30, 20, 10])  # rows of different lengths
IDS = torch.tensor([PROMPTS[1], PROMPTS[1][::-1]])


def results(engine: Engine, num_tokens: int) -> Mapping[str, object]:
    """Return what every way of using an engine gives."""
    logits, hidden = engine.logits(IDS, output_hidden_states=True)
    batch = engine.generate(PROMPTS, max_new_tokens=4, logprobs=True)
    return {
        "logits": [logits],
        "hidden states": list(hidden),
        "forward": [engine.forward(hidden[1])],
        "generate": engine.generate([PROMPTS[0]], max_new_tokens=num_tokens)[0].token_ids,
        "stream": [event.token_id for event in engine.stream(PROMPTS[2], max_new_tokens=3, temperature=1.0, seed=3)],
        "batch": [one.token_ids for one in batch],
        "log probabilities": [one.logprobs for one in batch],
        "scores": engine._queue.run_alone("scores", lambda: scores(engine)),
    }


def scores(engine: Engine) -> list[torch.Tensor]:
    """Return the losses of a prompt in chunks, and of one token by token."""
    runner = engine.runner
    assert isinstance(runner, ProgramRunner)
    return [token_losses(runner, PROMPTS[at], 1, path) for at, path in ((1, "prefill"), (0, "decode"))]


def differing(found: Mapping[str, object], expected: Mapping[str, object]) -> list[str]:
    """Return the names of results that are not the same to the bit."""

    def same(one: object, other: object) -> bool:
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            return torch.equal(one, other)
        if isinstance(one, list) and isinstance(other, list):
            return len(one) == len(other) and all(map(same, one, other))
        return one == other

    return [name for name in expected if not same(found[name], expected[name])]


# Timelines as a ring of slots makes them, without any clock: made for tests of reports and pictures.


def ring_events(
    num_passes: int,
    num_groups: int,
    streamed: frozenset[int],
    copy_seconds: float = 0.030,
    compute_seconds: float = 0.012,
    num_workers: int = 3,
    jobs: int = 6,
    nbytes: int = 60_000_000,
) -> list[Event]:
    """Return the events of passes over groups of which some are streamed through two slots, one read ahead.

    Args:
        copy_seconds: of a whole group, over all workers; it is read in `jobs` equal jobs.
        nbytes: of a group.
    """
    order = [group for _ in range(num_passes) for group in range(num_groups)]
    uses = [position for position, group in enumerate(order) if group in streamed]
    events: list[Event] = []
    ready: dict[int, float] = {}  # by position
    freed: list[float] = []
    link, now, at = 100.0, 100.0, 0

    def copy(use: int) -> None:
        nonlocal link
        begin = max(link, freed[use - 2] if use >= 2 else 0.0)
        each = copy_seconds / jobs
        for job in range(jobs):
            start = begin + job * each  # a job lasts as long as there are workers, so the link is shared
            end = min(start + each * num_workers, begin + copy_seconds)
            events.append(Event("copy", order[uses[use]], start, end, nbytes // jobs, job % num_workers))
        link = begin + copy_seconds
        ready[uses[use]] = link

    copy(0)
    for position, group in enumerate(order):
        if group in streamed and ready[position] > now:
            events.append(Event("stall", group, now, ready[position]))
            now = ready[position]
        if group in streamed and at + 1 < len(uses):
            copy(at + 1)
        events.append(Event("compute", group, now, now + compute_seconds))
        now += compute_seconds
        if group in streamed:
            freed.append(now)
            at += 1
    return events


# A simulated run of a streaming engine: what /plan and /status answer at any time, for tests of the page.

LAYER, TABLE, VECTORS = 1_300_000_000, 1_050_000_000, 40_000_000  # bytes
NUM_SLOTS = 2


def plan_of(num_layers: int, streamed: frozenset[int], budget: int | None, **changes: Any) -> dict[str, Any]:
    """Return what /plan answers: an embedding, a group for each layer, a head that stays, and vectors.

    Args:
        streamed: numbers of the groups that stream; layer n is group n + 1.
    """
    places = ["streamed" if number in streamed else "resident" for number in range(1, num_layers + 1)]
    layers = [
        {"name": f"layers.{n}", "numbers": [n + 1], "bytes": LAYER, "place": place} for n, place in enumerate(places)
    ]
    groups = [
        {"name": "embed_tokens", "numbers": [0], "bytes": TABLE, "place": "resident"},
        *layers,
        {"name": "head", "numbers": [num_layers + 1], "bytes": TABLE, "place": "resident"},
        {"name": "vectors", "numbers": [], "bytes": VECTORS, "place": "resident"},
    ]
    resident = sum(one["bytes"] for one in groups[:-1] if one["place"] == "resident")
    moved = LAYER * len(streamed)
    memory = {
        "weight_bytes": resident + VECTORS + NUM_SLOTS * LAYER * bool(streamed),
        "resident_bytes": resident,
        "slot_bytes": NUM_SLOTS * LAYER * bool(streamed),
        "expert_bytes": 0,
        "vector_bytes": VECTORS,
        "kv_bytes": 2_000_000_000,
        "workspace_bytes": 300_000_000,
        "program_bytes": 100_000_000,
        "buffer_bytes": 20_000_000 * bool(streamed),
        "overhead_bytes": 0,
        "load_peak_bytes": resident,
    }
    memory["total_bytes"] = sum(memory[f"{part}_bytes"] for part in ("weight", "kv", "workspace", "program", "buffer"))
    plan = {
        "model": "llama3_70b",
        "model_type": "llama",
        "device": "cpu",
        "dtype": "bfloat16",
        "graph": "native",
        "context_length": 8192,
        "max_sequences": 8,
        "num_layers": num_layers,
        "weight_bytes": memory["weight_bytes"],
        "kv_bytes": memory["kv_bytes"],
        "budget_bytes": budget,
        "is_streaming": bool(streamed),
        "fits": True,
        "error": None,
        "smallest_budget_bytes": 9_876_543_210,
        "memory": memory,
        "groups": groups,
        "streaming": {
            "policy": "auto",
            "mode": "async",
            "source": "disk" if streamed else None,
            "groups": len(streamed),
            "slots": NUM_SLOTS if streamed else 0,
            "expert_slots": 0,
            "expert_hit_rate": None,
            "mapped_layers": 0,
            "bytes_per_token": moved,
            "expected_bytes_per_token": float(moved),
        },
        "link_bytes_per_second": 6.25e9,
        "memory_bytes": 64_000_000_000,
        "predicted": {"tokens_per_second": 0.05123, "copy_seconds": 18.5, "fetch_seconds": 0, "compute_seconds": 2.0}
        | {"is_overlapped": True},
    }
    return plan | changes


@dataclass
class SimulatedRun:
    """A run whose passes repeat, with its plan.

    Attributes:
        plan: what /plan answers.
        events: all events, in the order in which they ended.
        requests: what /status lists.
    """

    plan: dict[str, Any]
    events: list[Event] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, num_layers: int, streamed: frozenset[int], num_passes: int) -> "SimulatedRun":
        moved = streamed or frozenset({1})  # events are made for at least one group
        made = ring_events(num_passes, num_layers + 2, moved, 0.02, 0.005, nbytes=LAYER // 11)
        plan = plan_of(num_layers, streamed, 24_000_000_000)
        return cls(plan, sorted(made, key=lambda event: event.end))

    def status(self, now: float, limit: int = 600) -> dict[str, Any]:
        """Return what /status answers at a time of the events' clock."""
        ended = self.events[: bisect.bisect_right(self.events, now, key=lambda event: event.end)]
        return {
            "model": self.plan["model"],
            "state": "ready",
            "version": "0.1.0",
            "uptime_seconds": now,
            "time": now,
            "requests": self.requests,
            "totals": {
                "requests": 12,
                "prompt_tokens": 1234,
                "cached_tokens": 100,
                "new_tokens": 5000 + round(20 * now),
            },
            "first_token_seconds": {"count": 12, "median": 0.2134, "p95": 0.4},
            "kv_cache": [
                {"name": "full attention", "page_tokens": 64, "pages": 128, "free": 100, "prefix_only": 12, "shared": 3}
            ],
            "streaming": self.streaming(now, ended, limit) if self.plan["is_streaming"] else None,
        }

    def streaming(self, now: float, ended: list[Event], limit: int) -> dict[str, Any]:
        """Return `streaming` of /status."""
        begin = self.events[0].begin if not ended else min(event.begin for event in ended)
        found = report_streaming(ended, Measured(begin, max(begin, now), 1, 1000))
        running = [event for event in self.events if event.begin <= now < event.end]
        slots = [self.slot(number, running) for number in range(NUM_SLOTS)]
        computing = [event.group for event in running if event.lane == "compute"]
        return {
            "slots": slots,
            "computing_group": computing[0] if computing else None,
            "bytes": found.nbytes,
            "copy_seconds": found.copy_seconds,
            "stall_seconds": found.stall_seconds,
            "hidden_seconds": found.hidden_seconds,
            "expert_hit_rate": None,
            "events": [[one.lane, one.group, one.begin, one.end, one.nbytes, one.worker] for one in ended[-limit:]],
        }

    def slot(self, number: int, running: list[Event]) -> dict[str, Any]:
        """Return a slot's state, by the events that run."""
        order = [group for one in self.plan["groups"] if one["place"] == "streamed" for group in one["numbers"]]
        users = set(order[number::NUM_SLOTS])
        for lane, state in (("compute", "computing"), ("copy", "reading")):
            for event in running:
                if event.lane == lane and event.group in users:
                    return {"slot": number, "group": event.group, "state": state}
        return {"slot": number, "group": None, "state": "free"}


def request(**changes: Any) -> dict[str, Any]:
    """Return an entry of `requests`."""
    usual = {
        "id": "chatcmpl-1",
        "state": "decode",
        "prompt_tokens": 20,
        "cached_tokens": 16,
        "computed_tokens": 30,
        "new_tokens": 10,
        "max_new_tokens": 200,
        "pages": 6,
        "shared_pages": 1,
        "waiting_seconds": 0.0,
        "prefill_seconds": 0.1,
        "decode_seconds": 0.4,
    }
    return usual | changes
