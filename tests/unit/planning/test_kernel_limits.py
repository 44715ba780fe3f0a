"""A plan counts with the limits that the kernels have: whichever changes, the plan's bytes and the kernels change."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from graphcore.config.compose import compose_settings
from graphcore.engine.loading.open_model import open_model
from graphcore.engine.loading.prepare_model import match_model
from graphcore.kernels import limits
from graphcore.kernels.backend import TritonBackend
from graphcore.kernels.ops.delta_rule import gated_delta_chunks
from graphcore.nn.decoder import Decoder
from graphcore.nn.spec import ModelSpec
from graphcore.planning.gpu_overhead import overhead_nbytes
from graphcore.planning.workspace import attention_nbytes, workspace_nbytes
from graphcore.weights.packed_weights import PackingPolicy

BF16 = torch.bfloat16


def opened(model: str, folder: Path) -> tuple[ModelSpec, Decoder]:
    """Return a model's spec and its decoder, packed for a GPU."""
    settings = compose_settings([f"model={model}", "model.checkpoint='random:q4_k'"])
    found = open_model(settings.model, 0, folder, lambda *_: None)
    return found.spec, match_model(found, BF16, PackingPolicy(TritonBackend(), "float"))[0]


def planned(spec: ModelSpec, decoder: Decoder, batch: int) -> int:
    return overhead_nbytes(spec, decoder, batch, True, BF16) + workspace_nbytes(spec, batch, 512, BF16)


def with_heads_of(spec: ModelSpec, **changes: int) -> ModelSpec:
    """Return the spec with other attention: the plan reads nothing else of a layer's heads."""
    return replace(
        spec, blocks=tuple(replace(block, attention=replace(block.attention, **changes)) for block in spec.blocks)
    )


@pytest.mark.parametrize(
    ("model", "batch", "heads", "limit", "value"),
    [
        ("llama3_8b", 9, {}, "MOST_TOKENS", 9),  # the head's parts, the largest matrices, are multiplied packed
        ("qwen3_5", 1, {}, "DELTA_CHUNK", 1024),
        ("llama3", 1, {"heads": 1024, "kv_heads": 1}, "SPLIT_PROGRAMS", 3),  # more rows than a chunk's
        ("llama3", 8, {"heads": 4096, "kv_heads": 1}, "SPLIT_ROUNDS", 5),
        ("llama3", 1, {}, "PREFILL_ROWS", 256),
        ("llama3", 1, {"head_dim": 128}, "WIDE_HEAD", 64),
        ("llama3", 1, {"head_dim": 512}, "WIDE_HEAD_ROWS", 64),
    ],
)
def test_the_plan_follows_a_kernel_s_limit(
    model: str,
    batch: int,
    heads: dict[str, int],
    limit: str,
    value: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    spec, decoder = opened(model, tmp_path)
    spec = with_heads_of(spec, **heads) if heads else spec
    before = planned(spec, decoder, batch)
    monkeypatch.setattr(limits, limit, value)
    assert planned(spec, decoder, batch) != before


def test_the_plan_counts_the_scores_of_as_many_rows_as_a_thread_attends_at_once_in_a_prompt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    header = Path(limits.__file__).parent / "cpu" / "native" / "chunk.h"
    assert f"constexpr int ROW_TILE = {limits.CHUNK_ROWS};" in header.read_text(encoding="utf-8")
    pairs = header.with_name("bf16_pairs.h").read_text(encoding="utf-8")
    assert (limits.CHUNK_KEYS, "PAIR_KEYS = 2 * LANES;" in pairs) == (32, True)
    spec, _ = opened("llama3", tmp_path)
    for limit in ("CHUNK_ROWS", "CHUNK_KEYS"):
        before = attention_nbytes(spec, 4096, 512, BF16, threads=2)
        monkeypatch.setattr(limits, limit, 2 * getattr(limits, limit))
        assert attention_nbytes(spec, 4096, 512, BF16, threads=2) > before


def test_the_kernels_follow_the_same_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    from graphcore.kernels.gpu.attention import prefill, splits  # bring Triton

    def of_kernels() -> tuple[int, ...]:
        tiles = (prefill.tiles_of(1024, width, BF16)[0] for width in (128, 256, 512))
        return (splits.split_count(1, 8, 1 << 20, 64, 132), splits.most_splits(8, 8, 1 << 20, 64, 132), *tiles)

    assert of_kernels() == (33, 16, 128, 64, 32)
    monkeypatch.setattr(limits, "SPLIT_PROGRAMS", 4)
    assert of_kernels()[:2] == (66, 33)
    monkeypatch.setattr(limits, "SPLIT_ROUNDS", 2)
    assert of_kernels()[:2] == (66, 16)
    monkeypatch.setattr(limits, "PREFILL_ROWS", 256)
    assert of_kernels()[2:] == (256, 64, 32)
    monkeypatch.setattr(limits, "WIDE_HEAD_ROWS", 16)
    assert of_kernels()[2:] == (256, 64, 16)
    monkeypatch.setattr(limits, "WIDE_HEAD", 128)
    assert of_kernels()[2:] == (256, 16, 16)


def test_the_limits_bring_no_module_with_them() -> None:
    source = Path(limits.__file__).read_text(encoding="utf-8")
    assert not [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert gated_delta_chunks.__defaults__ == (limits.DELTA_CHUNK,)
