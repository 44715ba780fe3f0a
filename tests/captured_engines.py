"""Engines that decode as on CUDA, on `FakeCuda`, and the same engines eager on the CPU."""

from pathlib import Path

import pytest
from fake_cuda import FakeCuda

from graphcore import Engine
from graphcore.engine.batching.new_batching import batching_of
from graphcore.graph import block_compiler as kinds
from graphcore.kernels.backend import TritonBackend

TINY = Path(__file__).parent / "golden" / "tiny"
LAYERS = "streaming.layer_group_size=1"  # as on a GPU


def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Return what captured engines find for CUDA from now on; nothing is compiled."""
    monkeypatch.setattr(kinds, "compile_whole", lambda function, name: function)
    return FakeCuda.install(monkeypatch)


def engine_of(name: str = "qwen3", *overrides: str) -> Engine:
    sizes = ["prefill_chunk=16", "batch_size=3", "context_length=320", *overrides]
    sizes += [LAYERS] if "streaming=on" in overrides else []
    return Engine.load(TINY / name, dtype="fp32", graph="eager", device="cpu", overrides=sizes)


def captured_engine(name: str = "qwen3", *overrides: str) -> Engine:
    engine = engine_of(name, *overrides)
    engine.runner.builder.kind, engine.runner.builder.backend = "captured", TritonBackend()
    engine._queue.batching = batching_of(engine.runner, engine.settings.cache_folder)
    return engine
