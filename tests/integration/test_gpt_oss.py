"""gpt-oss from every form of its files gives transformers' logits, over sequences that wrap the rings several times.

The forms are those of gpt_oss_files. Tolerance as in test_model_parity.
"""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from support.files.gpt_oss_files import build, gguf_tensors, pack, save_dense, save_mxfp4, write_gguf
from support.streaming import SIZES
from support.tiny_models import GPT_OSS, VOCAB
from torch import Tensor, nn

from graphcore import Engine
from graphcore.errors import CheckpointError

pytestmark = pytest.mark.thorough

TOLERANCE = 2e-5
SEEDS = (0, 1, 2)
LENGTH = 61  # the window is 8: rings wrap seven times
SHAPE_OF_20B = {
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "swiglu_limit": 7.0,
    "swiglu_alpha": 1.702,
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}


def ids_of(seed: int) -> Tensor:
    return torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(100 + seed))


@torch.no_grad()
def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, use_cache=False).logits


@torch.inference_mode()
def check(path: Path, model: nn.Module, seed: int, graph: str = "eager") -> None:
    """Compare one pass, and token by token after a prompt, with transformers."""
    ids = ids_of(seed)
    expected = logits_of(model, ids)
    with Engine.load(path, dtype="fp32", device="cpu", graph=graph, overrides=list(SIZES)) as engine:
        assert (engine.logits(ids) - expected).abs().max() < TOLERANCE
        row = ids[1].tolist()
        steps = [engine.runner.extend([row[:21]], [0])]
        steps += [engine.runner.extend([[token]], [at]) for at, token in enumerate(row[21:], start=21)]
        assert (torch.cat(steps) - expected[1, 20:]).abs().max() < TOLERANCE


@pytest.mark.parametrize("seed", SEEDS)
def test_mxfp4_blocks_give_transformers_logits(seed: int, tmp_path: Path) -> None:
    check(tmp_path, save_mxfp4(tmp_path, seed), seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", SEEDS)
def test_dense_experts_give_transformers_logits(seed: int, dtype: torch.dtype, tmp_path: Path) -> None:
    check(tmp_path, save_dense(tmp_path, seed, dtype), seed)


@pytest.mark.thorough
def test_compiled_mxfp4_blocks_give_transformers_logits(tmp_path: Path) -> None:
    check(tmp_path, save_mxfp4(tmp_path, 4), 4, "compiled")


def test_both_storage_forms_and_a_cut_model_agree_with_transformers_layer_by_layer(tmp_path: Path) -> None:
    model = save_mxfp4(tmp_path, 5)
    with torch.no_grad():
        expected = model(input_ids=ids_of(5), use_cache=False, output_hidden_states=True).hidden_states
    overrides = [*SIZES, "model.num_hidden_layers=3"]
    with Engine.load(tmp_path, dtype="fp32", device="cpu", graph="eager", overrides=overrides) as engine:
        _, hidden = engine.logits(ids_of(5), output_hidden_states=True)
    for found, wanted in zip(hidden, expected[:4], strict=True):
        assert (found - wanted).abs().max() < TOLERANCE


def build_for_gguf(seed: int) -> nn.Module:
    """Return a model with the activation that no GGUF key describes at its published limit and alpha."""
    model = build(seed)
    for layer in model.model.layers:
        layer.mlp.experts.limit, layer.mlp.experts.alpha = 7.0, 1.702
        layer.mlp.experts.gate_up_proj_bias.mul_(20)  # so that the limit of 7 is reached
    return model


@cache
def dense_file_model() -> nn.Module:
    return build_for_gguf(7)


@pytest.mark.parametrize("is_fused", [False, True], ids=["apart", "fused"])
@pytest.mark.parametrize("is_packed", [False, True], ids=["f32", "mxfp4"])
def test_a_gguf_file_gives_transformers_logits(is_packed: bool, is_fused: bool, tmp_path: Path) -> None:
    model = build_for_gguf(7)
    packed = pack(model, 7) if is_packed else {}
    check(write_gguf(tmp_path / "model.gguf", model, gguf_tensors(model, packed, is_fused)), model, 7)


@pytest.mark.parametrize("name", ["blk.1.attn_sinks.weight", "blk.0.ffn_up_exps.weight", "blk.0.attn_k.bias"])
def test_a_gguf_file_without_one_of_its_tensors_is_refused_by_name(name: str, tmp_path: Path) -> None:
    tensors = gguf_tensors(dense_file_model(), {}, is_fused=False)
    del tensors[name]
    path = write_gguf(tmp_path / "model.gguf", dense_file_model(), tensors)
    with pytest.raises(CheckpointError, match=f"Missing required tensor: '{name}'"):
        Engine.load(path, dtype="fp32", device="cpu", graph="eager")


@pytest.mark.parametrize(
    "changes",
    [
        {"truncate": True},
        {"attention_factor": 1.1},
        {"mscale": 0.8, "mscale_all_dim": 0.5},
        {"rope_type": "default"},
        {"factor": 3.0, "beta_fast": 8.0},
    ],
    ids=str,
)
def test_other_rotations_of_config_json_give_transformers_logits(changes: dict[str, object], tmp_path: Path) -> None:
    model = save_dense(tmp_path, 3, rope_parameters={**GPT_OSS["rope_parameters"], **changes})
    check(tmp_path, model, 3)
    plain = json.loads((tmp_path / "config.json").read_text())
    plain["rope_parameters"] = {**GPT_OSS["rope_parameters"], "factor": 8.5}
    (tmp_path / "config.json").write_text(json.dumps(plain))
    with pytest.raises(AssertionError):  # the rotation matters to these logits
        check(tmp_path, model, 3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sliding_attention", "full_attention"])
@torch.inference_mode()
def test_a_layer_of_the_20b_shape_gives_transformers_logits(kind: str, tmp_path: Path) -> None:
    """800 million expert weights as MXFP4 blocks; 160 tokens, more than the window of 128."""
    model = save_mxfp4(tmp_path, 6, **SHAPE_OF_20B, layer_types=[kind])
    ids = torch.randint(0, VOCAB, (1, 160), generator=torch.Generator().manual_seed(6))
    expected = logits_of(model, ids)
    del model
    overrides = ["prefill_chunk=100", "context_length=160"]
    with Engine.load(tmp_path, dtype="fp32", device="cpu", graph="eager", overrides=overrides) as engine:
        errors = [(engine.logits(ids) - expected).abs().max().item()]
        row = ids[0].tolist()
        steps = [engine.runner.extend([row[:140]], [0])]
        steps += [engine.runner.extend([[token]], [at]) for at, token in enumerate(row[140:], start=140)]
        errors.append((torch.cat(steps) - expected[0, 139:]).abs().max().item())
    print(f"\n{kind}: largest error of logits {errors[0]:.1e}, token by token {errors[1]:.1e}; they vary by", end=" ")
    print(f"{expected.std().item():.2f}")
    assert max(errors) < 1e-4
