"""DeepSeek and GLM 4.7 Flash give transformers' logits from all forms of files, also with settings of no published one.

Tolerance as in test_model_parity.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.files.layered_files import packed_file
from support.streaming import SIZES, errors_of, runs_as
from support.tiny_models import (
    DEEPSEEK_V3_ODD,
    LATENT_YARN,
    VOCAB,
    build_reference,
    deepseek_v2,
    deepseek_v3,
    glm4_moe_lite,
    randomise,
)
from torch import Tensor, nn

from graphcore import Engine
from graphcore.checkpoint.gguf_checkpoint import GGUFCheckpoint
from graphcore.errors import CheckpointError, ConfigError, UnsupportedError

pytestmark = pytest.mark.thorough

TOLERANCE = 2e-5
LENGTH, PROMPT = 45, 21
CHANGES: Mapping[str, tuple[Callable[..., nn.Module], dict[str, object]]] = {
    "one_head": (deepseek_v3, {"num_attention_heads": 1, "num_key_value_heads": 1}),
    "queries_of_one_projection": (deepseek_v3, {"q_lora_rank": None, "tie_word_embeddings": True}),
    "values_wider_than_the_row": (deepseek_v3, {"v_head_dim": 120, "kv_lora_rank": 12, "qk_rope_head_dim": 2}),
    "not_normalised": (deepseek_v3, {"norm_topk_prob": False, "n_shared_experts": 3, "hidden_act": "gelu"}),
    "dense_layers_only": (deepseek_v3, {"first_k_dense_replace": 9, "rope_parameters": None}),
    "no_dense_layer": (deepseek_v3, {"first_k_dense_replace": 0}),
    "scores_scaled_without_yarn": (
        deepseek_v3,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0, "mscale_all_dim": 1.0}},
    ),
    "yarn_without_mscale": (
        deepseek_v2,
        {"rope_parameters": {name: LATENT_YARN[name] for name in LATENT_YARN if "mscale" not in name}},
    ),
    "one_group_of_four": (deepseek_v2, {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}),
    "groups_that_greedy_ignores": (deepseek_v2, {"n_group": 4, "topk_group": 1, "routed_scaling_factor": 16.0}),
    "kinds_of_layers": (glm4_moe_lite, {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "flags_of_null": (deepseek_v3, {"norm_topk_prob": None, "rope_interleave": None}),
    "wide_epsilon": (glm4_moe_lite, {"rms_norm_eps": 0.1, "attention_bias": True}),
}


def build(builder: Callable[..., nn.Module], changes: Mapping[str, object]) -> nn.Module:
    torch.manual_seed(0)
    model = builder(**changes)
    randomise(model, 0)
    model.set_attn_implementation("eager")
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("name", CHANGES)
def test_captured_steps_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = build(*CHANGES[name])
    model.save_pretrained(tmp_path)
    assert max(errors_of(tmp_path, model, "auto")) < TOLERANCE


def test_a_cache_has_one_row_for_a_position_and_no_values(tmp_path: Path) -> None:
    build_reference("deepseek_v3").save_pretrained(tmp_path)
    overrides = ["context_length=64", "batch_size=1"]
    with Engine.load(tmp_path, dtype="fp32", device="cpu", graph="auto", overrides=overrides) as engine:
        assert runs_as(engine, "auto")
        caches = engine.runner.builder.caches
        row, pages = 32 + 64, 1 + 64 // 16
        assert {tuple(cache.k.shape) for cache in caches} == {(pages, 1, 16, row)}
        assert [cache.v.nbytes for cache in caches] == [0] * 3
        assert engine.plan.kv_nbytes == 3 * pages * 16 * row * 4 + caches[0].table.nbytes


@pytest.mark.parametrize("kv_dtype", ["q8_0", "q4_0"])
def test_a_quantised_cache_gives_the_same_logits_in_every_way(kv_dtype: str, tmp_path: Path) -> None:
    model = build(deepseek_v3, {"first_k_dense_replace": 3})  # without a choice of experts, which rounding changes
    model.save_pretrained(tmp_path)
    ids = torch.randint(0, VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(100))
    found = []
    for graph in ("auto", "eager"):
        overrides = [*SIZES, "batch_size=1", f"kv_dtype={kv_dtype}"]
        with Engine.load(tmp_path, dtype="fp32", device="cpu", graph=graph, overrides=overrides) as engine:
            assert runs_as(engine, graph)
            found += [engine.logits(ids), engine.logits(ids, by_token=True)]
    assert max((one - found[0]).abs().max().item() for one in found) < 1e-2  # sums may round to another code
    if kv_dtype == "q8_0":
        assert (found[0] - model(input_ids=ids, use_cache=False).logits).abs().max() < 0.3


def test_a_quantised_cache_needs_values_that_begin_at_a_whole_block(tmp_path: Path) -> None:
    changes = {"kv_lora_rank": 32, "qk_rope_head_dim": 32}  # rows of 64 are mixed whole
    build(deepseek_v3, changes).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"blocks of 64 features.*begin at feature 32"):
        Engine.load(tmp_path, dtype="fp32", device="cpu", overrides=["kv_dtype=q8_0"])


def test_fp8_blocks_of_keys_and_values_have_their_exact_values(tmp_path: Path) -> None:
    """The matrix of keys and values of heads is divided: its rows of values stay packed, those of keys become dense."""
    sizes = {
        "hidden_size": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 24,
        "v_head_dim": 40,
        "first_k_dense_replace": 3,
    }
    model = build(deepseek_v3, sizes)
    model.save_pretrained(tmp_path)
    stored: dict[str, Tensor] = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        if "_proj" not in name or tensor.shape[1] % 32:
            stored[name] = tensor
            continue
        scales = 0.01 * torch.rand(-(-tensor.shape[0] // 32), -(-tensor.shape[1] // 32)) + 0.005
        each = scales.repeat_interleave(32, 0)[: len(tensor)].repeat_interleave(32, 1)[:, : tensor.shape[1]]
        codes = (tensor / each).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored |= {name: codes, f"{name}_scale_inv": scales}
        model.get_parameter(name).copy_(codes.float() * each)
    assert sum(name.endswith("kv_b_proj.weight_scale_inv") for name in stored) == 3
    save_file(stored, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with Engine.load(tmp_path, dtype="fp32", device="cpu", graph="auto") as engine:
        assert runs_as(engine, "auto")
        attention = engine.runner.builder.decoder.layers[0].self_attn
        assert attention.v_b_proj.packing.format == "fp8"
        assert attention.k_b_proj.packing is None
    assert max(errors_of(tmp_path, model, "auto")) < TOLERANCE
    assert max(errors_of(tmp_path, model, "eager", ("streaming=on",))) < TOLERANCE


def test_layers_that_predict_further_tokens_are_left_out_with_a_note(tmp_path: Path) -> None:
    model = build_reference("deepseek_v3")
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    last = [name for name in stored if name.startswith("model.layers.2.")]
    further = {name.replace(".2.", ".3.", 1): stored[name].clone() for name in last}
    further |= {f"model.layers.3.{name}.weight": torch.ones(3) for name in ("enorm", "hnorm", "eh_proj")}
    save_file({**stored, **further}, tmp_path / "model.safetensors")
    assert max(errors_of(tmp_path, model, "eager")) < TOLERANCE
    with Engine.load(tmp_path, dtype="fp32", device="cpu", graph="eager") as engine:
        (note,) = [note for note in engine.notes if "left out" in note]
    assert "multi-token prediction" in note


def rewritten(file: Path, to: Path) -> None:
    """Write a GGUF file as before May 2025: one matrix of keys and values of heads, and the heads' own widths."""
    own = "deepseek2."
    checkpoint, reader = GGUFCheckpoint(file), gguf.GGUFReader(file)
    values = checkpoint.metadata
    changes = {
        "attention.key_length": values[own + "attention.key_length_mla"],
        "attention.value_length": values[own + "attention.value_length_mla"],
        "attention.head_count_kv": values[own + "attention.head_count"],
    }
    writer = gguf.GGUFWriter(to, "deepseek2")
    for key, value in values.items():
        name = key.removeprefix(own)
        if key.startswith(own) and not name.endswith("_mla"):
            value = changes.get(name, value)
            kind = gguf.GGUFValueType(checkpoint.kinds[key][0])
            writer.add_key_value(key, value, kind)
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    for name, data in tensors.items():
        if name.endswith("attn_k_b.weight"):
            both = data.transpose(0, 2, 1), tensors[name.replace("_k_b", "_v_b")]
            joined = np.concatenate(both, axis=1)
            name, data = name.replace("_k_b", "_kv_b"), joined.reshape(-1, joined.shape[2])
        if not name.endswith("attn_v_b.weight"):
            writer.add_tensor(name, np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_older_gguf_files_have_one_matrix_of_keys_and_values(tmp_path: Path) -> None:
    model = build_reference("deepseek_v3")
    file = packed_file("deepseek_v3", tmp_path)
    rewritten(file, tmp_path / "older.gguf")
    assert max(errors_of(file, model, "auto")) < TOLERANCE
    assert max(errors_of(tmp_path / "older.gguf", model, "auto")) < TOLERANCE


def test_rotated_features_are_interleaved_in_gguf_files_whatever_their_order_in_safetensors(tmp_path: Path) -> None:
    model = build(deepseek_v3, {"rope_interleave": False})
    file = packed_file("deepseek_v3", tmp_path, rope_interleave=False)
    assert max(errors_of(tmp_path / "deepseek_v3", model, "eager")) < TOLERANCE
    assert max(errors_of(file, model, "eager")) < TOLERANCE


@pytest.mark.parametrize(("name", "function"), [("deepseek_v2", "softmax"), ("deepseek_v3", "sigmoid")])
def test_a_gguf_file_without_a_score_function_has_sigmoids_if_it_has_a_selection_bias(
    name: str, function: str, tmp_path: Path
) -> None:
    """llama.cpp's converter writes none if config.json has no scoring_func, as those that transformers saves."""
    model = build_reference(name)
    file, key = packed_file(name, tmp_path), b"deepseek2.expert_gating_func"
    assert file.read_bytes().count(key) == 1
    file.write_bytes(file.read_bytes().replace(key, key.replace(b"gating", b"unread")))
    with Engine.load(file, dtype="fp32", device="cpu", graph="eager") as engine:
        assert (engine.config.model_type, engine.config.experts.routing.function) == (name, function)
    assert max(errors_of(file, model, "eager")) < TOLERANCE


def save_as_kimi(model: nn.Module, folder: Path, is_nested: bool) -> None:
    """Write a DeepSeek V3 as Kimi K2, or nested as K2.5, under Moonshot's names."""
    model.save_pretrained(folder)
    config = {**json.loads((folder / "config.json").read_text()), "model_type": "kimi_k2"}
    if is_nested:
        config = {"model_type": "kimi_k25", "text_config": config, "vision_config": {}, "tie_word_embeddings": False}
        stored = load_file(folder / "model.safetensors")
        nested = {f"language_model.{name}": tensor for name, tensor in stored.items()}
        others = {name: torch.zeros(2) for name in ("vision_tower.norm.weight", "mm_projector.pre_norm.weight")}
        save_file({**nested, **others}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("is_nested", [False, True], ids=["kimi_k2", "kimi_k25"])
def test_kimi_is_a_deepseek_v3_of_another_name(is_nested: bool, tmp_path: Path) -> None:
    model = build(deepseek_v3, {"n_group": 1, "topk_group": 1})
    save_as_kimi(model, tmp_path, is_nested)
    assert max(errors_of(tmp_path, model, "auto")) < TOLERANCE
    with Engine.load(tmp_path, dtype="fp32", device="cpu", graph="eager") as engine:
        assert engine.config.model_type == "deepseek_v3"
        left_out = [note for note in engine.notes if "vision (1 tensor)" in note]
        assert len(left_out) == is_nested


def test_yarn_factors_that_differ_have_no_gguf_form(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="would be read as another one"):
        packed_file("deepseek_v3_odd", tmp_path)
    assert DEEPSEEK_V3_ODD["rope_parameters"]["mscale_all_dim"] != LATENT_YARN["mscale"]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads 2"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method"),
        ("deepseek_v3", {"n_group": 3}, "3 groups"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "head_dim 7 is odd"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func"),
        ("deepseek_v2", {"num_experts_per_tok": None}, "num_experts_per_tok"),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse"]}, "mlp_layer_types"),
        ("glm4_moe_lite", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_refused_by_name(
    name: str, change: dict[str, object], message: str, tmp_path: Path
) -> None:
    build_reference(name).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises((CheckpointError, UnsupportedError), match=message):
        Engine.load(tmp_path, dtype="fp32", device="cpu", graph="eager")
