"""Qwen 3 mixtures of experts from every form of their files give transformers' logits, in every way they can run.

Tolerance as in test_model_parity. A captured step adds in another order, and packed experts round what they are given,
so those have tolerances of their own.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import save_file
from support.files.qwen_moe_files import build, names_of, round_experts, save, write_gguf
from support.streaming import SIZES, runs_as
from support.tiny_models import QWEN3_MOE, VOCAB
from torch import Tensor, nn

from graphcore import Engine
from graphcore.errors import CheckpointError, UnsupportedError

pytestmark = pytest.mark.thorough

TOLERANCE = 2e-5
LENGTH, PROMPT = 45, 21
CHANGES: Mapping[str, dict[str, object]] = {
    "published": {},  # normalised shares, grouped heads
    "not_normalised": {"norm_topk_prob": False},
    "dense_layers": {"mlp_only_layers": [1, 3]},
    "every_second_layer": {"decoder_sparse_step": 2, "norm_topk_prob": False},
    "odd_sizes": {"num_experts": 7, "num_experts_per_tok": 2, "moe_intermediate_size": 37, "hidden_size": 60},
    "one_expert": {"num_experts_per_tok": 1, "norm_topk_prob": False, "tie_word_embeddings": True},
    "all_experts": {"num_experts_per_tok": 6, "num_key_value_heads": 4},
    "biases_and_windows": {"attention_bias": True, "use_sliding_window": True, "sliding_window": 8},
    "gelu": {"hidden_act": "gelu_pytorch_tanh"},
}


def ids_of(seed: int) -> Tensor:
    return torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(100 + seed))


@torch.inference_mode()
def errors_of(path: Path, model: nn.Module, graph: str) -> tuple[float, float]:
    """Return the largest error of one pass over two sequences, and of one sequence token by token after a prompt."""
    ids = ids_of(0)
    expected = model(input_ids=ids, use_cache=False).logits
    # With room for one sequence alone, auto is captured and compiles nothing.
    overrides = SIZES if graph != "auto" else (*SIZES, "batch_size=1")
    with Engine.load(path, dtype="fp32", device="cpu", graph=graph, overrides=list(overrides)) as engine:
        assert runs_as(engine, graph)
        whole = (torch.cat([engine.logits(row[None]) for row in ids]) - expected).abs().max().item()
        row = ids[1].tolist()
        steps = [engine.runner.extend([row[:PROMPT]], [0])]
        steps += [engine.runner.extend([[token]], [at]) for at, token in enumerate(row[PROMPT:], start=PROMPT)]
        return whole, (torch.cat(steps) - expected[1, PROMPT - 1 :]).abs().max().item()


@pytest.mark.parametrize("name", CHANGES)
def test_logits_and_steps_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = build(**CHANGES[name])
    model.save_pretrained(tmp_path)
    assert max(errors_of(tmp_path, model, "eager")) < TOLERANCE


@pytest.mark.parametrize("name", ["published", "every_second_layer", "odd_sizes"])
def test_captured_steps_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = build(**CHANGES[name])
    model.save_pretrained(tmp_path)
    assert max(errors_of(tmp_path, model, "auto")) < TOLERANCE


@pytest.mark.slow  # test_model_parity.py compiles a block with experts, and a dense one
def test_compiled_blocks_of_both_kinds_give_transformers_logits(tmp_path: Path) -> None:
    model = build(**CHANGES["dense_layers"])
    model.save_pretrained(tmp_path)
    assert max(errors_of(tmp_path, model, "compiled")) < TOLERANCE


@pytest.mark.parametrize("graph", ["eager", "auto"])
def test_equal_scores_share_equally(graph: str, tmp_path: Path) -> None:
    """Experts come in pairs of equal ones with equal scores, so that it does not matter which of a pair is chosen."""
    model = build()
    for layer in model.model.layers:
        for parameter in (layer.mlp.gate.weight, layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
            parameter[1::2] = parameter[::2]
    model.save_pretrained(tmp_path)
    assert max(errors_of(tmp_path, model, graph)) < TOLERANCE


@pytest.mark.parametrize("is_fused", [False, True], ids=["one_by_one", "fused"])
def test_both_forms_of_safetensors_give_transformers_logits(is_fused: bool, tmp_path: Path) -> None:
    model = build(**CHANGES["dense_layers"])
    save(tmp_path, model, is_fused)
    assert max(errors_of(tmp_path, model, "eager")) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.layers.1.mlp.experts.3.up_proj.weight", "Missing required tensor"),
        (
            "model.layers.0.mlp.experts.5.down_proj.weight",
            "Shape mismatch",
        ),  # the last one: five experts instead of six
        ("model.layers.2.mlp.gate.weight", "Missing required tensor"),
    ],
)
def test_a_file_without_an_expert_is_refused_by_name(name: str, message: str, tmp_path: Path) -> None:
    model = build()
    stored = names_of(model, is_fused=False)
    del stored[name]
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict()))
    with pytest.raises(CheckpointError, match=message) as caught:
        Engine.load(tmp_path, dtype="fp32", device="cpu", graph="eager")
    assert name.replace(".5.", ".") in str(caught.value)


def test_experts_of_different_shapes_are_refused_by_name(tmp_path: Path) -> None:
    model = build()
    stored = names_of(model, is_fused=False)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    stored[name] = stored[name][:-1].contiguous()
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict()))
    with pytest.raises(CheckpointError, match=rf"{name}.*does not fit"):
        Engine.load(tmp_path, dtype="fp32", device="cpu", graph="eager")


@pytest.mark.parametrize("is_fused", [False, True], ids=["apart", "fused"])
@pytest.mark.parametrize(("graph", "encoding"), [("eager", None), ("eager", "Q4_0"), ("auto", "Q8_0")])
def test_a_gguf_file_gives_transformers_logits(
    graph: str, encoding: str | None, is_fused: bool, tmp_path: Path
) -> None:
    model = build(moe_intermediate_size=64)
    kind = None if encoding is None else gguf.GGMLQuantizationType[encoding]
    if kind is not None:
        round_experts(model, kind)
    path = write_gguf(tmp_path / "model.gguf", model, kind, is_fused)
    assert max(errors_of(path, model, graph)) < TOLERANCE


@pytest.mark.parametrize("key", ["expert_count", "expert_used_count", "expert_feed_forward_length"])
def test_a_gguf_file_without_a_key_of_its_experts_is_refused_by_name(key: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", build(), None, is_fused=False)
    path.write_bytes(path.read_bytes().replace(f"qwen3moe.{key}".encode(), f"qwen3moe.{key[:-1]}X".encode()))
    with pytest.raises(CheckpointError, match=f"lacks qwen3moe.{key}"):
        Engine.load(path, dtype="fp32", device="cpu", graph="eager")


def test_the_tiny_model_s_choice_of_experts_matters(tmp_path: Path) -> None:
    """Mutants of the router's rule are far outside the tolerance."""
    model = build()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for change in ({"norm_topk_prob": False}, {"num_experts_per_tok": 2}):
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        assert min(errors_of(tmp_path, model, "eager")) > 100 * TOLERANCE
    assert QWEN3_MOE["norm_topk_prob"] is True


@pytest.mark.parametrize(
    "change",
    [
        {"shared_expert_intermediate_size": 64},
        {"n_shared_experts": 1},
        {"routed_scaling_factor": 2.5},
        {"scoring_func": "sigmoid"},
        {"n_group": 4},
    ],
    ids=str,
)
def test_settings_of_other_mixtures_are_refused_by_name(change: dict[str, object], tmp_path: Path) -> None:
    model = build()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(UnsupportedError, match=next(iter(change))):
        Engine.load(tmp_path, dtype="fp32", device="cpu", graph="eager")


@pytest.mark.slow
def test_a_layer_of_the_30b_shape_gives_transformers_logits(tmp_path: Path) -> None:
    """600 million expert weights in 128 experts, of which a token goes through 8."""
    sizes = {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 1,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    }
    model = build(**sizes)
    save(tmp_path, model, is_fused=False)
    errors = errors_of(tmp_path, model, "eager")
    print(f"\nlargest error of logits {errors[0]:.1e}, token by token {errors[1]:.1e}")
    assert max(errors) < 1e-4
