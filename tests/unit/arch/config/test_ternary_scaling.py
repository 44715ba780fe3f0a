"""BitNet's quantization_config: what it means, and what of it is refused."""

from itertools import product as every_pair

import pytest
from support.cases import in_case
from support.hub_configs import BITNET, GEMMA3_1B, GPT2, LLAMA, QWEN3, parse

from graphcore.checkpoint.ternary_checkpoint import TernaryScaling
from graphcore.errors import UnsupportedError


def scaling_of(raw: dict, **settings: object) -> TernaryScaling | None:
    return parse(raw, quantization_config={"quant_method": "bitnet", **settings}).ternary


def test_class_and_mode_say_how_weights_are_scaled() -> None:
    for (settings, scaling), raw in every_pair(
        [
            ({}, "divided"),  # as Falcon3's and Llama3-8B-1.58's
            ({"linear_class": "bitlinear"}, "divided"),
            ({"linear_class": "autobitlinear"}, "multiplied"),
            ({"linear_class": "autobitlinear", "quantization_mode": "offline"}, "multiplied"),
            ({"linear_class": "autobitlinear", "quantization_mode": "online"}, "online"),
            ({"linear_class": "bitlinear", "quantization_mode": "online"}, "divided"),
            ({"modules_to_not_convert": ["lm_head"], "use_rms_norm": False}, "divided"),
            ({"modules_to_not_convert": ["lm_head.weight", "model.norm"]}, "divided"),
            ({"modules_to_not_convert": None}, "divided"),
        ],
        [BITNET, LLAMA, QWEN3],
    ):
        with in_case(settings, scaling, raw):
            assert scaling_of(raw, **settings) == scaling


def test_the_2b_4t_multiplies_and_its_bf16_sibling_is_online() -> None:
    assert parse(BITNET).ternary == "multiplied"
    assert scaling_of(BITNET, linear_class="autobitlinear", quantization_mode="online") == "online"


def test_a_bitnet_without_it_is_an_ordinary_model() -> None:
    """transformers gives it ordinary Linears."""
    assert parse(BITNET, quantization_config=None).ternary is None
    assert parse(LLAMA).ternary is None


@pytest.mark.parametrize(
    "settings",
    [
        {"use_rms_norm": True},
        {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.down_proj"]},
        {"modules_to_not_convert": []},
        {"linear_class": "fastbitlinear"},
        {"quantization_mode": "sometimes"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_that_are_not_computed_are_refused_by_name(settings: dict) -> None:
    with pytest.raises(UnsupportedError, match=f"quantization_config: {next(iter(settings))} is"):
        scaling_of(BITNET, **settings)


@pytest.mark.parametrize("raw", [GPT2, GEMMA3_1B], ids=["gpt2", "gemma3"])
def test_families_that_it_was_never_for_are_refused(raw: dict) -> None:
    with pytest.raises(UnsupportedError, match="quant_method 'bitnet' is not supported for model_type"):
        scaling_of(raw)


def test_biases_that_would_be_scaled_with_the_weights_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="scales biases"):
        parse(BITNET, attention_bias=True)
    assert parse(LLAMA, attention_bias=True, quantization_config={"quant_method": "bitnet"}).ternary == "divided"
