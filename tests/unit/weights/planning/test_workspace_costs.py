"""The workspace that is planned has room for every tensor that a chunk certainly needs at one time."""

from dataclasses import replace
from pathlib import Path

import torch

from graphcore.config.compose import compose_settings
from graphcore.engine.open_model import open_model
from graphcore.nn.spec import ModelSpec
from graphcore.weights.planning.costs import workspace_nbytes

BATCH, TOKENS, FLOAT32 = 3, 7, 4


def spec_of(folder: Path) -> ModelSpec:
    settings = compose_settings(["model=llama3", "model.checkpoint=random:", f"cache_dir={folder}"])
    return open_model(settings.model, 0, settings.cache_folder, lambda *_: None).spec


def planned(spec: ModelSpec) -> int:
    return workspace_nbytes(spec, BATCH, TOKENS, torch.bfloat16)


def test_logits_and_their_copy_have_room_whatever_the_chunk(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    larger = replace(spec, vocab=spec.vocab + 1000)
    assert planned(larger) - planned(spec) == 2 * BATCH * 1000 * FLOAT32


def test_three_residual_streams_have_room_for_each_token(tmp_path: Path) -> None:
    """Streams are float32: before the block, after attention, after the MLP."""
    spec = spec_of(tmp_path)
    larger = replace(spec, dim=spec.dim + 64)
    assert planned(larger) - planned(spec) == BATCH * TOKENS * 64 * 3 * FLOAT32
