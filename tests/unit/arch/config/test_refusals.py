"""What a config.json may not say: every refusal names the field."""

import contextlib
from itertools import product as every_pair

import pytest
from support.cases import in_case
from support.hub_configs import (
    FAMILIES,
    GEMMA3_1B,
    GEMMA3_4B,
    GPT2,
    GPT_OSS,
    LLAMA,
    MISTRAL,
    QWEN3,
    QWEN3_MOE,
    parse,
    without,
)

from graphcore.arch.registry import MODEL_TYPES, NESTED_TYPES
from graphcore.errors import CheckpointError, GraphcoreError, UnsupportedError


@pytest.mark.parametrize("model_type", ["mamba", "gpt_os", "lama", "mistral4"])
def test_unsupported_model_type_lists_the_supported_ones(model_type):
    names = {*MODEL_TYPES, *NESTED_TYPES}
    assert {"gemma3", "gemma3_text", "gpt2", "llama"} <= names
    known = ", ".join(sorted(names))
    with pytest.raises(UnsupportedError, match=f"{model_type}.*{known}"):
        parse(LLAMA, model_type=model_type)


def test_multimodal_config_of_another_family_is_refused_though_its_text_part_is_known():
    with pytest.raises(UnsupportedError, match="llava"):
        parse({"model_type": "llava", "text_config": MISTRAL})
    with pytest.raises(UnsupportedError, match="qwen3"):
        parse({"model_type": "gemma3", "text_config": QWEN3})


def test_missing_model_type_is_named():
    with pytest.raises(CheckpointError, match="model_type"):
        parse(without(LLAMA, "model_type"))
    with pytest.raises(CheckpointError, match="text_config"):
        parse({"model_type": "gemma3"})


def test_missing_required_fields_are_listed_all_at_once():
    with pytest.raises(CheckpointError) as caught:
        parse({"model_type": "llama", "num_attention_heads": 32})
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"):
        assert name in str(caught.value)
    assert "num_attention_heads" not in str(caught.value)
    with pytest.raises(CheckpointError, match="n_embd, n_layer, n_head, vocab_size"):
        parse({"model_type": "gpt2"})


def test_settings_that_change_the_mathematics_are_refused_by_name():
    for raw, field, value in [
        (GEMMA3_1B, "attn_logit_softcapping", 50.0),
        (GEMMA3_1B, "final_logit_softcapping", 30.0),
        (GEMMA3_1B, "use_bidirectional_attention", True),
        (LLAMA, "is_causal", False),
        (LLAMA, "partial_rotary_factor", 0.5),
        (LLAMA, "no_rope_layers", [1, 1, 0]),
        (LLAMA, "attention_multiplier", 0.015),
        (LLAMA, "residual_multiplier", 0.22),
        (LLAMA, "logits_scaling", 8.0),
        (LLAMA, "embedding_multiplier", 12.0),
        (LLAMA, "altup_num_inputs", 4),
        (LLAMA, "num_local_experts", 8),
        (QWEN3, "num_experts", 128),
        (QWEN3_MOE, "shared_expert_intermediate_size", 768),
        (QWEN3_MOE, "n_shared_experts", 1),
        (QWEN3_MOE, "n_routed_experts", 64),
        (QWEN3_MOE, "routed_scaling_factor", 2.5),
        (QWEN3_MOE, "scoring_func", "sigmoid"),
        (QWEN3_MOE, "n_group", 4),
        (QWEN3_MOE, "topk_group", 2),
        (GPT2, "scale_attn_by_inverse_layer_idx", True),
        (GPT2, "scale_attn_weights", False),
        (GPT2, "add_cross_attention", True),
    ]:
        with in_case(raw, field, value), pytest.raises(UnsupportedError, match=f"'{field}'"):
            parse(raw, **{field: value})


@pytest.mark.parametrize(("raw", "field"), [(LLAMA, "hidden_act"), (GPT2, "activation_function")])
def test_unknown_activations_are_refused_with_the_known_ones(raw, field):
    with pytest.raises(UnsupportedError, match="activation 'relu6' is not supported; known: silu, "):
        parse(raw, **{field: "relu6"})


@pytest.mark.parametrize(
    ("raw", "field", "value"),
    [
        (LLAMA, "partial_rotary_factor", 1.0),
        (LLAMA, "is_causal", True),
        (LLAMA, "logits_scaling", 1),
        (QWEN3, "num_experts", 0),
        (QWEN3_MOE, "shared_expert_intermediate_size", 0),
        (QWEN3_MOE, "scoring_func", "softmax"),
        (GPT2, "reorder_and_upcast_attn", True),
        (GPT2, "scale_attn_weights", True),
        (LLAMA, "hidden_act", "gelu"),
    ],
)
def test_neutral_values_of_such_settings_are_fine(raw, field, value):
    parse(raw, **{field: value})


@pytest.mark.parametrize(("model", "method"), [(GPT_OSS, "hqq"), (LLAMA, "mxfp4"), (GPT_OSS, None)])
def test_quantised_forms_are_read_only_where_the_model_type_has_them(model, method):
    with pytest.raises(UnsupportedError, match="quantization_config has quant_method"):
        parse(model, quantization_config={"quant_method": method})


def test_more_experts_a_token_than_there_are_is_refused():
    with pytest.raises(CheckpointError, match="num_experts_per_tok 4 is above num_local_experts 3; correct one"):
        parse(GPT_OSS, num_local_experts=3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mlp_only_layers", 3),
        ("mlp_only_layers", [-1]),
        ("mlp_only_layers", ["a"]),
        ("decoder_sparse_step", 0),
        ("norm_topk_prob", 1),
        ("moe_intermediate_size", 1.5),
        ("num_experts", 0),
    ],
)
def test_wrong_settings_of_a_mixture_are_named(field, value):
    with pytest.raises(CheckpointError, match=f"'{field}' must be"):
        parse(QWEN3_MOE, **{field: value})


@pytest.mark.parametrize("raw", [LLAMA, GEMMA3_4B])
def test_quantised_checkpoints_are_refused_by_their_method(raw):
    with pytest.raises(UnsupportedError, match="quant_method 'quanto'"):
        parse(raw, quantization_config={"quant_method": "quanto", "weights": "int4"})


def test_wrong_types_and_sizes_are_refused_by_name():
    for field, value in [
        ("hidden_size", "2048"),
        ("hidden_size", 2048.0),
        ("hidden_size", True),
        ("hidden_size", -1),
        ("hidden_size", 0),
        ("hidden_size", 2**60),
        ("hidden_size", [2048]),
        ("num_hidden_layers", 2**30),
        ("vocab_size", 10**400),
        ("rms_norm_eps", "1e-5"),
        ("rms_norm_eps", -1e-5),
        ("rms_norm_eps", float("inf")),
        ("rope_theta", True),
        ("rope_theta", 10**400),
        ("rope_theta", 0),
        ("attention_bias", 1),
        ("tie_word_embeddings", "true"),
        ("hidden_act", 3),
        ("model_type", 3),
        ("torch_dtype", 16),
        ("rope_scaling", [1]),
        ("rope_parameters", "llama3"),
    ]:
        with in_case(field, value):
            with pytest.raises(CheckpointError, match=f"config.json.*{field}") as caught:
                parse(LLAMA, **{field: value})
            assert "\n" not in str(caught.value)
            assert len(str(caught.value)) < 400


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(CheckpointError, match=r"num_attention_heads 32.*num_key_value_heads 5"):
        parse(LLAMA, num_key_value_heads=5)
    with pytest.raises(CheckpointError, match=r"hidden_size 2050.*num_attention_heads 32"):
        parse(without(LLAMA, "head_dim"), hidden_size=2050)
    with pytest.raises(CheckpointError, match="head_dim 63 is odd"):
        parse(LLAMA, head_dim=63)


def test_no_value_of_any_field_ends_in_anything_but_a_config_or_a_clear_error():
    for name, value in every_pair(sorted(FAMILIES), [None, True, -1, 0, 2**70, 1.5, "x", [], {}, [None], float("nan")]):
        with in_case(name, value):
            for field in [*FAMILIES[name], "rope_parameters", "layer_types", "text_config", "quantization_config"]:
                with contextlib.suppress(GraphcoreError):
                    parse(FAMILIES[name], **{field: value})
