"""The weight map of each development model, against counts and names written down by hand."""

import json
import re
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from dev_models import (
    BITNET,
    GEMMA3,
    GPT2,
    GPT_OSS,
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    QWEN3_5,
    QWEN3_MOE,
    QWEN3_NEXT,
    config_of,
)
from safetensors.torch import load_file
from support.cases import in_case
from transformers import AutoConfig, AutoModelForCausalLM

from graphcore import Engine
from graphcore.arch.weight_map import get_weight_map
from graphcore.errors import UnsupportedError

PER_LAYER = {"llama": 9, "qwen3": 11, "gemma3_text": 13, "mistral": 9, "qwen2": 12, "bitnet": 11}
RAW = {"llama": LLAMA, "qwen3": QWEN3, "gemma3_text": GEMMA3, "mistral": MISTRAL, "qwen2": QWEN2, "bitnet": BITNET}
TINY = Path(__file__).parents[2] / "golden" / "tiny"
GLOBAL = {
    "model.embed_tokens.weight": "embed_tokens.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
}

every_model = pytest.mark.parametrize("model_type", RAW)


def map_of(model_type: str, **changes: object) -> dict[str, str]:
    return get_weight_map(config_of(RAW[model_type], **changes))


def leaves(model_type: str) -> set[str]:
    """Return what a layer holds, without the layer's number."""
    names = (re.fullmatch(r"model\.layers\.\d+\.(.+)\.weight", name) for name in map_of(model_type))
    return {name[1] for name in names if name}


@every_model
def test_counts_per_layer_and_in_all(model_type: str) -> None:
    for num_layers in [1, 2, 7]:
        with in_case(num_layers):
            weight_map = map_of(model_type, num_hidden_layers=num_layers)
            for layer in range(num_layers):
                assert sum(name.startswith(f"model.layers.{layer}.") for name in weight_map) == PER_LAYER[model_type]
            assert len(weight_map) == num_layers * PER_LAYER[model_type] + len(GLOBAL)


@pytest.mark.parametrize(("model_type", "num_layers"), [("llama", 16), ("qwen3", 28), ("gemma3_text", 26)])
def test_development_models_have_their_own_number_of_layers(model_type: str, num_layers: int) -> None:
    weight_map = map_of(model_type)
    layers = {int(name.split(".")[2]) for name in weight_map if name.startswith("model.layers.")}
    assert layers == set(range(num_layers))
    assert len(weight_map) == num_layers * PER_LAYER[model_type] + 3


@every_model
def test_embedding_norm_and_head_are_always_there(model_type: str) -> None:
    for tied in [True, False]:
        with in_case(tied):
            weight_map = map_of(model_type, tie_word_embeddings=tied)
            assert {name: weight_map[name] for name in GLOBAL} == GLOBAL


def test_llama_has_no_head_norms_and_two_block_norms() -> None:
    norms = {leaf for leaf in leaves("llama") if "norm" in leaf}
    assert norms == {"input_layernorm", "post_attention_layernorm"}


def test_gemma_has_head_norms_and_four_block_norms() -> None:
    norms = {leaf for leaf in leaves("gemma3_text") if "norm" in leaf}
    assert norms == {
        "self_attn.q_norm",
        "self_attn.k_norm",
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    }


def test_qwen3_is_llama_and_head_norms() -> None:
    llama, qwen3 = map_of("llama", num_hidden_layers=4), map_of("qwen3", num_hidden_layers=4)
    extra = qwen3.keys() - llama.keys()
    assert llama.items() < qwen3.items()
    assert extra == {f"model.layers.{i}.self_attn.{part}_norm.weight" for i in range(4) for part in "qk"}


def test_qwen2_is_llama_and_biases_of_q_k_and_v() -> None:
    llama, qwen2 = map_of("llama", num_hidden_layers=3), map_of("qwen2", num_hidden_layers=3)
    assert llama.items() < qwen2.items()
    assert qwen2.keys() - llama.keys() == {
        f"model.layers.{i}.self_attn.{part}_proj.bias" for i in range(3) for part in "qkv"
    }


@every_model
def test_our_names_are_hugging_face_s_without_model(model_type: str) -> None:
    assert all(ours == stored.removeprefix("model.") for stored, ours in map_of(model_type).items())


@every_model
def test_map_is_one_to_one(model_type: str) -> None:
    weight_map = map_of(model_type)
    assert len(set(weight_map.values())) == len(weight_map)


@every_model
def test_map_has_the_names_that_transformers_saves(model_type: str) -> None:
    small = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 16, "head_dim": 16}
    raw = {**RAW[model_type], **small, "num_attention_heads": 4, "num_key_value_heads": 1}
    config = AutoConfig.for_model(**deepcopy(raw))  # which it changes
    names = AutoModelForCausalLM.from_config(config).state_dict().keys()
    assert get_weight_map(config_of(raw)).keys() == set(names)


@pytest.mark.parametrize("name", ["llama3", "qwen3", "gemma3"])
def test_map_is_what_is_loaded_from_a_file_that_transformers_has_written(name: str) -> None:
    """By the bits: a name that led to another weight of the same shape would differ."""
    folder = TINY / name
    decoder = Engine.load(folder, device="cpu", dtype="fp32", graph="eager").runner.builder.decoder
    ours = {prefix + leaf: tensor for prefix, group in decoder.groups() for leaf, tensor in group.named_buffers()}
    stored = load_file(folder / "model.safetensors")
    weight_map = get_weight_map(config_of(json.loads((folder / "config.json").read_text())))
    assert stored.keys() <= weight_map.keys()
    assert stored.keys() >= weight_map.keys() - {"lm_head.weight"}
    assert set(weight_map.values()) == ours.keys()
    for source, tensor in stored.items():
        stands_for = ours[weight_map[source]] - float(name == "gemma3" and "norm" in source)  # Gemma's 1 + w
        assert torch.allclose(stands_for, tensor.float(), rtol=0, atol=1e-6), source


@pytest.mark.parametrize("raw", [GPT2, GPT_OSS, QWEN3_MOE, QWEN3_NEXT, QWEN3_5], ids=lambda raw: raw["model_type"])
def test_fused_tensors_have_no_map_one_to_one(raw: dict) -> None:
    with pytest.raises(UnsupportedError, match=f"'{raw['model_type']}' stores fused tensors"):
        get_weight_map(config_of(raw))
