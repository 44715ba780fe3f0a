"""The runner where decode is captured: what looks between steps must not get a captured program."""

from pathlib import Path

import pytest
import torch

from graphcore import Engine
from graphcore.graph import builder as builder_module
from graphcore.graph.capture import CapturedStep

TINY = Path(__file__).parents[2] / "golden" / "tiny"
IDS = [5, 17, 3, 88, 41, 7, 9]  # one more than a multiple of the chunk: the last piece is one token


def engine_of() -> Engine:
    return Engine.load(TINY / "qwen3", dtype="fp32", graph="eager", device="cpu", overrides=["prefill_chunk=3"])


def test_logits_and_hidden_states_run_every_step_where_decode_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, layers = engine_of().logits([IDS], output_hidden_states=True)
    engine = engine_of()
    monkeypatch.setattr(builder_module, "compile_whole", lambda function, name: function)
    engine.runner.builder.kind = "captured"
    captured = engine.runner.program("decode", 1)
    assert [type(step) for step in captured.steps] == [CapturedStep]
    found, seen = engine.logits([IDS], output_hidden_states=True)
    assert torch.equal(found, expected)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(seen, layers, strict=True))
    assert torch.equal(engine.forward(layers[0]), layers[-1])
