"""LFM2, whose layers have gated short convolutions or attention, from every form of its files: transformers' logits."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.files.lfm2_files import build, save_multimodal, save_older, write_gguf
from support.streaming import SIZES, errors_of, runs_as
from support.tiny_models import TOLERANCE, VOCAB
from torch import Tensor

from graphcore import Engine
from graphcore.config.compose import compose_settings
from graphcore.engine.loading.open_model import open_model
from graphcore.errors import CheckpointError, UnsupportedError
from graphcore.export.pack import Packer

pytestmark = pytest.mark.thorough

LENGTH, PROMPT = 45, 21
FULL = "full_attention"
CHANGES: Mapping[str, dict[str, object]] = {
    "published": {},
    "width_as_it_stands": {"block_auto_adjust_ff_dim": False},
    "width_times_a_factor": {"block_ffn_dim_multiplier": 1.3, "block_multiple_of": 24},
    "only_convolutions": {"layer_types": ["conv"] * 5},
    "only_attention": {"layer_types": None},
    "some_attend": {"layer_types": None, "full_attn_idxs": [0, 3]},
    "biases": {"conv_bias": True},
    "wide_convolution": {"conv_L_cache": 8},
    "wider_convolution": {"conv_L_cache": 11},
    "convolution_over_two": {"conv_L_cache": 2},
    "convolution_over_one": {"conv_L_cache": 1},
    "heads_of_their_own": {"head_dim": 20, "num_attention_heads": 6, "num_key_value_heads": 1},
    "untied": {"tie_word_embeddings": False},
    "scaled_rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "odd_width": {"hidden_size": 44, "num_attention_heads": 2, "num_key_value_heads": 2},
}


# Steps of these convolutions run eager, too; those of other changes run as native instructions, after eager prompts.
EAGER = ("published", "only_convolutions", "biases", "wide_convolution", "convolution_over_two", "convolution_over_one")

MIXTURES: Mapping[str, dict[str, object]] = {
    "published": {},
    "scaled_shares": {"routed_scaling_factor": 1.7},
    "shares_as_they_are": {"norm_topk_prob": False},
    "without_a_bias": {"use_expert_bias": False},
    "no_dense_layer": {"num_dense_layers": 0, "num_experts": 7, "num_experts_per_tok": 2},
    "only_dense_layers": {"num_dense_layers": 9},
    "biases_of_convolutions": {"conv_bias": True, "conv_L_cache": 4, "tie_word_embeddings": False},
}


def ids_of(seed: int) -> Tensor:
    return torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(100 + seed))


@pytest.mark.parametrize(
    ("case", "graph"),
    [*((case, "eager") for case in EAGER), *((case, "auto") for case in CHANGES if case != "wider_convolution")],
)
def test_logits_and_steps_are_those_of_transformers(case: str, graph: str, tmp_path: Path) -> None:
    model = build(**CHANGES[case])
    model.save_pretrained(tmp_path)
    assert max(errors_of(tmp_path, model, graph)) < TOLERANCE


@pytest.mark.parametrize(
    ("case", "graph"),
    [("published", "eager"), ("biases_of_convolutions", "eager"), *((case, "auto") for case in MIXTURES)],
)
def test_mixtures_logits_and_steps_are_those_of_transformers(case: str, graph: str, tmp_path: Path) -> None:
    model = build("lfm2_moe", **MIXTURES[case])
    model.save_pretrained(tmp_path)
    assert max(errors_of(tmp_path, model, graph)) < TOLERANCE


def test_a_mixture_whose_experts_are_one_tensor_gives_transformers_logits(tmp_path: Path) -> None:
    model = build("lfm2_moe")
    config = model.config.to_dict()
    tensors = {name: one.contiguous() for name, one in model.state_dict().items() if name != "lm_head.weight"}
    assert "model.layers.1.feed_forward.experts.gate_up_proj" in tensors
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert max(errors_of(tmp_path, model, "eager")) < TOLERANCE


@pytest.mark.parametrize("change", [{"routed_scaling_factor": 1.7}, {"norm_topk_prob": False}], ids=str)
def test_shares_that_llama_cpp_would_not_compute_are_not_packed(change: dict[str, object], tmp_path: Path) -> None:
    build("lfm2_moe", **change).save_pretrained(tmp_path)
    model = open_model(compose_settings([f"model.checkpoint={tmp_path}"]).model, 0, tmp_path, lambda *_: None)
    with pytest.raises(UnsupportedError, match=r"llama\.cpp does not read it"):
        _ = Packer(model, "stored").metadata


def test_biases_of_convolutions_are_not_packed(tmp_path: Path) -> None:
    build(conv_bias=True).save_pretrained(tmp_path)
    model = open_model(compose_settings([f"model.checkpoint={tmp_path}"]).model, 0, tmp_path, lambda *_: None)
    with pytest.raises(UnsupportedError, match="its blocks differ: GGUF has no key"):
        _ = Packer(model, "stored").metadata


def test_a_convolution_that_is_too_wide_for_native_programs_runs_in_torch(tmp_path: Path) -> None:
    model = build(**CHANGES["wider_convolution"])
    model.save_pretrained(tmp_path)
    assert max(errors_of(tmp_path, model, "eager")) < TOLERANCE
    with Engine.load(tmp_path, dtype="fp32", device="cpu", graph="auto") as engine:
        assert "a convolution over 11 tokens has no native instruction, only up to 8" in " ".join(engine.notes)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_gguf_file_gives_transformers_logits(seed: int, tmp_path: Path) -> None:
    model = build(seed=seed)
    path = write_gguf(tmp_path / "model.gguf", model)
    assert max(errors_of(path, model, "auto")) < TOLERANCE


def test_files_with_the_first_names_of_settings_give_transformers_logits(tmp_path: Path) -> None:
    model = build()
    save_older(tmp_path, model)
    assert max(errors_of(tmp_path, model, "eager")) < TOLERANCE


def test_the_language_model_of_a_multimodal_file_gives_transformers_logits(tmp_path: Path) -> None:
    model = build()
    save_multimodal(tmp_path, model)
    assert max(errors_of(tmp_path, model, "eager")) < TOLERANCE
    with Engine.load(tmp_path, dtype="fp32", device="cpu", graph="eager") as engine:
        assert "left out of the checkpoint: vision (2 tensors)" in engine.notes


def test_a_gguf_file_with_a_window_slides_where_it_attends(tmp_path: Path) -> None:
    """llama.cpp reads the key; transformers' model without convolutions and with Mistral's window would do the same."""
    model = build()
    plain, narrow, wide = (write_gguf(tmp_path / f"{window}.gguf", model, window) for window in (0, 5, LENGTH))
    found = []
    for path in (plain, narrow, wide):
        with Engine.load(path, dtype="fp32", device="cpu", graph="auto", overrides=list(SIZES)) as engine:
            assert runs_as(engine, "auto")
            found.append(engine.logits(ids_of(0)[:1]))
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[0][:, :5], found[1][:, :5])
    assert not torch.isclose(found[0][:, 5:], found[1][:, 5:]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'"),
        ({"layer_types": ["sliding_attention"] * 5}, "'sliding_attention', which is not supported"),
        ({"num_experts": 4}, "'num_experts' is 4"),
        ({"model_type": "lfm2_moe", "n_group": 2, "topk_group": 1}, "'n_group' is 2"),
        ({"model_type": "lfm2_moe", "scoring_func": "softmax"}, "'scoring_func' is 'softmax'"),
    ],
    ids=str,
)
def test_settings_that_change_the_mathematics_are_refused_by_name(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    build().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(UnsupportedError, match=message):
        Engine.load(tmp_path, dtype="fp32", device="cpu", graph="eager")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"conv_L_cache": 0}, "'conv_L_cache' must be a positive integer"),
        ({"intermediate_size": 1, "block_ffn_dim_multiplier": None}, "'intermediate_size' must be large enough"),
        ({"block_ffn_dim_multiplier": -1}, "'block_ffn_dim_multiplier' must be above zero"),
        ({"layer_types": ["conv"]}, "layer_types names 1 layers"),
        ({"layer_types": None, "full_attn_idxs": ["a"]}, "'full_attn_idxs' must be a list of indices"),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_are_named(change: dict[str, object], message: str, tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(CheckpointError, match=message):
        Engine.load(tmp_path, dtype="fp32", device="cpu", graph="eager")


@pytest.mark.parametrize("key", ["shortconv.l_cache", "attention.head_count_kv"])
def test_a_gguf_file_without_a_key_of_its_convolutions_is_refused_by_name(key: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", build())
    path.write_bytes(path.read_bytes().replace(f"lfm2.{key}".encode(), f"lfm2.{key[:-1]}X".encode()))
    with pytest.raises(CheckpointError, match=f"lacks lfm2.{key}"):
        Engine.load(path, dtype="fp32", device="cpu", graph="eager")
