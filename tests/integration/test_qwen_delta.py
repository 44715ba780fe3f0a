"""Qwen 3 Next and Qwen 3.5, dense and mixtures, from every form of their files give transformers' logits.

Tolerance: transformers' own float32 logits of these small models are off by up to 9e-5 (tests/support/tiny_models.py).
"""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.files.qwen_delta_files import build, save_multimodal, write_gguf
from support.streaming import errors_of
from support.tiny_models import TOLERANCE_WITH_DELTA_RULES as TOLERANCE
from support.tiny_models import VOCAB
from torch import Tensor

from graphcore import Engine
from graphcore.errors import CheckpointError, UnsupportedError

pytestmark = pytest.mark.thorough

LENGTH, PROMPT = 45, 21
CHANGES: Mapping[str, tuple[str, dict[str, object]]] = {
    "dense": ("qwen3_5", {}),
    "mixture": ("qwen3_5_moe", {}),
    "fused": ("qwen3_next", {}),
    "a_value_head_a_key_head": ("qwen3_5", {"linear_num_value_heads": 2}),
    "wide_values": ("qwen3_5", {"linear_value_head_dim": 40, "linear_key_head_dim": 16}),
    "short_convolution": ("qwen3_5", {"linear_conv_kernel_dim": 2, "tie_word_embeddings": True}),
    "only_delta_rules": ("qwen3_5", {"layer_types": ["linear_attention"] * 5}),
    "attention_first": ("qwen3_5", {"layer_types": ["full_attention", "linear_attention"] * 2, "num_hidden_layers": 4}),
    "biases": ("qwen3_5", {"attention_bias": True}),
    "all_of_a_head_rotates": (
        "qwen3_5",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
    ),
    "odd_mixture": ("qwen3_5_moe", {"num_experts": 7, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 21}),
    "shares_of_all": ("qwen3_next", {"norm_topk_prob": False}),
    "some_layers_dense": ("qwen3_next", {"mlp_only_layers": [1, 2]}),
}


def ids_of(seed: int) -> Tensor:
    return torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(100 + seed))


@pytest.mark.parametrize("case", CHANGES)
def test_logits_and_steps_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    name, changes = CHANGES[case]
    model = build(name, **changes)
    model.save_pretrained(tmp_path)
    assert max(errors_of(tmp_path, model, "eager")) < TOLERANCE


@pytest.mark.parametrize("case", ["dense", "mixture", "fused", "only_delta_rules", "biases"])
def test_captured_steps_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    name, changes = CHANGES[case]
    model = build(name, **changes)
    model.save_pretrained(tmp_path)
    assert max(errors_of(tmp_path, model, "auto")) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "is_fused", "graph"),
    [
        ("qwen3_5", False, "auto"),
        ("qwen3_5_moe", False, "auto"),
        ("qwen3_next", False, "eager"),
        ("qwen3_next", True, "eager"),
    ],
)
def test_a_gguf_file_gives_transformers_logits(name: str, is_fused: bool, graph: str, tmp_path: Path) -> None:
    model = build(name)
    path = write_gguf(tmp_path / "model.gguf", name, model, is_fused)
    assert max(errors_of(path, model, graph)) < TOLERANCE


def test_tensors_of_other_parts_are_left_out_with_one_note(tmp_path: Path) -> None:
    model = build("qwen3_5")
    save_multimodal(tmp_path, model)
    assert max(errors_of(tmp_path, model, "eager")) < TOLERANCE
    with Engine.load(tmp_path, dtype="fp32", device="cpu", graph="eager") as engine:
        notes = [note for note in engine.notes if "left out" in note]
    assert notes == ["left out of the checkpoint: vision (1 tensor) and multi-token prediction (2 tensors)"]


def test_layers_of_a_gguf_file_that_predict_further_tokens_are_left_out_with_one_note(tmp_path: Path) -> None:
    model = build("qwen3_5")
    path = write_gguf(tmp_path / "model.gguf", "qwen3_5", model, predicting=1)
    assert max(errors_of(path, model, "eager")) < TOLERANCE
    with Engine.load(path, dtype="fp32", device="cpu", graph="eager") as engine:
        notes = [note for note in engine.notes if "left out" in note]
    assert notes == ["left out of the checkpoint: multi-token prediction (1 tensor)"]
    stale = write_gguf(tmp_path / "stale.gguf", "qwen3_5", model, predicting=1, is_stale=True)
    with pytest.raises(CheckpointError, match="block_count 5 and nextn_predict_layers 1 leave layer 4 out"):
        Engine.load(stale, dtype="fp32", device="cpu", graph="eager")


def test_a_tensor_that_no_part_has_is_refused(tmp_path: Path) -> None:
    build("qwen3_5").save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored["model.layers.0.linear_attn.adapter.weight"] = torch.ones(2)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"unexpected tensor 'model\.layers\.0\.linear_attn\.adapter\.weight'"):
        Engine.load(tmp_path, dtype="fp32", device="cpu", graph="eager")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen3_5", {"attn_output_gate": False}, "'attn_output_gate' is False"),
        ("qwen3_5", {"hidden_act": "gelu"}, "'hidden_act' is 'gelu'"),
        ("qwen3_5", {"num_experts": 4}, "'num_experts' is 4"),
        ("qwen3_5_moe", {"norm_topk_prob": False}, "'norm_topk_prob' is False"),
        ("qwen3_5_moe", {"mlp_only_layers": [1]}, "'mlp_only_layers' is "),
        ("qwen3_5_moe", {"decoder_sparse_step": 2}, "'decoder_sparse_step' is 2"),
        ("qwen3_5", {"layer_types": ["sliding_attention"] * 5}, "'sliding_attention', which is not supported"),
        ("qwen3_next", {"routed_scaling_factor": 2.5}, "'routed_scaling_factor' is 2.5"),
    ],
    ids=str,
)
def test_settings_that_change_the_mathematics_are_refused_by_name(
    name: str, change: dict[str, object], message: str, tmp_path: Path
) -> None:
    build(name).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(UnsupportedError, match=message):
        Engine.load(tmp_path, dtype="fp32", device="cpu", graph="eager")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"linear_num_value_heads": 5}, "linear_num_value_heads 5 is not a multiple of linear_num_key_heads 2"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.5}}, "'partial_rotary_factor' must be"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.1}}, "'partial_rotary_factor' must be"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1e308}}, "'partial_rotary_factor' must be"),
        ({"linear_conv_kernel_dim": 0}, "'linear_conv_kernel_dim' must be a positive integer"),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_are_named(change: dict[str, object], message: str, tmp_path: Path) -> None:
    build("qwen3_5").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(CheckpointError, match=message):
        Engine.load(tmp_path, dtype="fp32", device="cpu", graph="eager")


@pytest.mark.parametrize("key", ["ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank"])
def test_a_gguf_file_without_a_size_of_its_delta_rule_is_refused_by_name(key: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", "qwen3_5", build("qwen3_5"))
    path.write_bytes(path.read_bytes().replace(f"qwen35.{key}".encode(), f"qwen35.{key[:-1]}X".encode()))
    with pytest.raises(CheckpointError, match=f"lacks qwen35.{key}"):
        Engine.load(path, dtype="fp32", device="cpu", graph="eager")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_both_kinds_of_layers_of_the_true_shapes_give_transformers_logits(name: str, tmp_path: Path) -> None:
    """Qwen 3.5 4B's layers, and Qwen 3.6 35B-A3B's, with 0.8 billion expert weights in each."""
    sizes = {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": 16,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    }
    if name == "qwen3_5":
        sizes |= {"hidden_size": 2560, "intermediate_size": 9216, "num_key_value_heads": 4}
    else:
        sizes |= {"hidden_size": 2048, "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8}
        sizes |= {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
    model = build(name, **sizes)
    model.save_pretrained(tmp_path)
    errors = errors_of(tmp_path, model, "auto")
    print(f"\nlargest error of logits {errors[0]:.1e}, token by token {errors[1]:.1e}")
    assert max(errors) < TOLERANCE
