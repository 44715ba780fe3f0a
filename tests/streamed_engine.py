"""Engines whose weights stream, and what of them tests look at."""

import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_source import Wrapped

from graphcore import Engine
from graphcore.errors import PlanError
from graphcore.streaming.weight_stream import WeightStream

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
