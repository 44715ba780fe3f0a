"""The workspace that is planned has room for every tensor that a chunk certainly needs at one time."""

from dataclasses import replace
from pathlib import Path

import torch

from graphcore.config.compose import compose_settings
from graphcore.engine.loading.open_model import open_model
from graphcore.nn.spec import AttentionSpec, ModelSpec
from graphcore.planning.workspace import waiting_nbytes, workspace_nbytes

BATCH, TOKENS, FLOAT32 = 3, 7, 4


def spec_of(folder: Path) -> ModelSpec:
    settings = compose_settings(["model=llama3", "model.checkpoint=random:", f"cache_dir={folder}"])
    return open_model(settings.model, 0, settings.cache_folder, lambda *_: None).spec


def planned(spec: ModelSpec) -> int:
    return workspace_nbytes(spec, BATCH, TOKENS, torch.bfloat16)


def test_logits_and_their_copy_have_room_whatever_the_chunk(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    larger = replace(spec, vocab=spec.vocab + 1000)
    of_slice = 32 * 3 * FLOAT32  # of 32 tokens of a prompt, in three forms, while its log probabilities are computed
    assert planned(larger) - planned(spec) == 1000 * (2 * BATCH * FLOAT32 + of_slice)


def test_a_slice_of_logits_takes_the_place_of_the_blocks_activations(tmp_path: Path) -> None:
    """With a chunk long enough they are larger, and a larger vocabulary adds the step's logits alone."""
    spec = spec_of(tmp_path)
    sizes = [workspace_nbytes(replace(spec, vocab=vocab), BATCH, 4096, torch.bfloat16) for vocab in (1000, 2000)]
    assert sizes[1] - sizes[0] == 1000 * 2 * BATCH * FLOAT32


def test_three_residual_streams_have_room_for_each_token(tmp_path: Path) -> None:
    """Streams are float32: before the block, after attention, after the MLP."""
    spec = spec_of(tmp_path)
    larger = replace(spec, dim=spec.dim + 64)
    assert planned(larger) - planned(spec) == TOKENS * 64 * 3 * FLOAT32


def test_cosines_and_sines_of_each_rope_have_room_for_each_token(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    ((rope, head_dim),) = spec.ropes
    first, *rest = spec.blocks
    assert isinstance(first.attention, AttentionSpec)
    rotated = replace(first.attention, rope=replace(rope, theta=2 * rope.theta))
    two = replace(spec, blocks=(replace(first, attention=rotated), *rest))
    assert planned(two) - planned(spec) == TOKENS * 2 * head_dim * FLOAT32


def test_chunks_run_one_after_another_and_a_decode_step_has_a_token_of_each_sequence(tmp_path: Path) -> None:
    spec = replace(spec_of(tmp_path), vocab=0)
    few, many, more = (workspace_nbytes(spec, batch, TOKENS, torch.bfloat16) for batch in (1, TOKENS, 2 * TOKENS))
    assert few == many == more // 2


def test_a_chunk_that_waits_keeps_its_stream_and_the_rows_of_its_positions(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    ((_, head_dim),) = spec.ropes
    assert waiting_nbytes(spec, 10) == 10 * (8 + FLOAT32 * (spec.dim + head_dim))
