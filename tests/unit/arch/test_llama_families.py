"""Families that are Llama's block with one thing more: Ministral 3, Mixtral, Granite and SmolLM3."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import product as every_pair

import pytest
from dev_models import GRANITE, GRANITE_MOE, MINISTRAL3, MIXTRAL, SMOLLM3, config_of
from support.cases import in_case
from support.hub_configs import FAMILIES, parse, without

from graphcore.arch.architecture import TensorSource
from graphcore.arch.config.model_config import ModelConfig
from graphcore.arch.config_from_gguf import config_from_gguf
from graphcore.arch.folds import PickRows
from graphcore.arch.registry import architecture_of
from graphcore.errors import CheckpointError, UnsupportedError
from graphcore.nn.rope_spec import PositionScale, RopeSpec, YarnScaling
from graphcore.nn.spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec, MoESpec, NormSpec
from graphcore.routing import ScoredRouting

ROPE = MINISTRAL3["rope_parameters"]
NORM = NormSpec("rms", 1e-5)


def spec_of(raw: dict, **changes: object) -> ModelSpec:
    config = config_of(raw, **changes)
    return architecture_of(config).spec(config)


def keys(name: str, **own: object) -> dict[str, object]:
    """Return the metadata of a small GGUF file. Args: own: keys of the architecture, "__" for a dot."""
    sizes: dict[str, object] = {
        "block_count": 8,
        "context_length": 4096,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 1e6,
        **{key.replace("__", "."): value for key, value in own.items()},
    }
    return {"general.architecture": name, **{f"{name}.{key}": value for key, value in sizes.items()}}


def read(metadata: Mapping[str, object]) -> ModelConfig:
    return config_from_gguf(metadata, {"token_embd.weight": (96, 64)}, None, "model.gguf")


def read_spec(metadata: Mapping[str, object]) -> ModelSpec:
    config = read(metadata)
    return architecture_of(config).spec(config)


def test_ministral_3_8b() -> None:
    yarn = YarnScaling(16.0, 16_384, 1.0, 32.0, 1.0, rounds_ramp=True)
    scale = PositionScale(0.1, 16_384)
    attention = AttentionSpec(32, 8, 128, 128**-0.5, rope=RopeSpec(1e6, yarn), position_scale=scale)
    block = BlockSpec(4096, NORM, attention, MLPSpec(14_336, "silu"))
    assert spec_of(MINISTRAL3) == ModelSpec(4096, 131_072, (block,) * 34, NORM, context=262_144)
    nested = parse(FAMILIES["ministral3"])
    assert architecture_of(nested).spec(nested) == spec_of(MINISTRAL3)


@pytest.mark.parametrize("beta", [0.0, None])
def test_queries_of_a_ministral_without_a_beta_are_not_scaled(beta: float | None) -> None:
    (block,) = set(spec_of(MINISTRAL3, rope_parameters={**ROPE, "llama_4_scaling_beta": beta}).blocks)
    assert block.attention.position_scale is None


def test_a_scale_of_queries_needs_no_yarn_but_a_period() -> None:
    plain = {"rope_type": "default", "rope_theta": 5e5, "llama_4_scaling_beta": 0.2}
    (block,) = set(spec_of(MINISTRAL3, rope_parameters={**plain, "original_max_position_embeddings": 100}).blocks)
    assert (block.attention.position_scale, block.attention.rope) == (PositionScale(0.2, 100), RopeSpec(5e5))
    with pytest.raises(CheckpointError, match="llama_4_scaling_beta needs original_max_position_embeddings"):
        spec_of(MINISTRAL3, rope_parameters=plain)


def test_devstral_2_123b_has_the_usual_factor_of_cosines_and_no_scale() -> None:
    """Its mscale_all_dim is 0, which transformers takes for absent."""
    changes = {"mscale_all_dim": 0.0, "factor": 64.0, "original_max_position_embeddings": 4096}
    (block,) = set(spec_of(MINISTRAL3, rope_parameters={**ROPE, **changes, "llama_4_scaling_beta": 0.0}).blocks)
    assert block.attention.rope.scaling.attention_factor == pytest.approx(1.4158883)
    assert block.attention.position_scale is None


def test_only_the_text_of_a_spec_with_a_scale_names_it() -> None:
    """Saved caches have a hash of the text."""
    scaled = AttentionSpec(4, 2, 8, 1.0, position_scale=PositionScale(0.1, 5))
    assert "position_scale=PositionScale(beta=0.1, period=5)" in repr(scaled)
    assert repr(replace(scaled, position_scale=None)) == (
        "AttentionSpec(heads=4, kv_heads=2, head_dim=8, scale=1.0, window=None, qk_norm=None, rope=None, "
        "qkv_bias=False, output_bias=False, sinks=False, sub_norm=None, cap=0.0, output_gate=False, v_norm_eps=0.0, "
        "values_are_keys=False, shares_cache=False)"
    )


def test_mistral_small_is_read_out_of_a_multimodal_config() -> None:
    config = parse(FAMILIES["mistral3"])
    (block,) = set(architecture_of(config).spec(config).blocks)
    assert (config.model_type, config.num_hidden_layers, config.hidden_size) == ("mistral", 40, 5120)
    assert (block.attention.window, block.attention.head_dim, block.attention.rope) == (None, 128, RopeSpec(1e9))


@pytest.mark.parametrize(("outer", "inner", "tied"), [(None, False, True), (False, True, False), (True, None, True)])
def test_a_multimodal_mistral_ties_its_head_unless_the_outer_config_says_otherwise(
    outer: bool | None, inner: bool | None, tied: bool
) -> None:
    raw = without(FAMILIES["ministral3"], "tie_word_embeddings")
    text = {**raw["text_config"], "tie_word_embeddings": inner}
    found = parse({**raw, "text_config": text, **({} if outer is None else {"tie_word_embeddings": outer})})
    assert found.tie_word_embeddings is tied


def test_a_mistral3_file_has_the_scale_of_its_keys() -> None:
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 16.0}
    yarn |= {"rope__scaling__original_context_length": 256, "rope__scaling__yarn_log_multiplier": 1.0}
    (block,) = set(read_spec(keys("mistral3", attention__temperature_scale=0.1, **yarn)).blocks)
    assert block.attention.position_scale == PositionScale(0.1, 256)
    assert block.attention.rope.scaling == YarnScaling(16.0, 256, 1.0, rounds_ramp=True)
    (plain,) = set(read_spec(keys("mistral3", **yarn)).blocks)
    assert plain == replace(block, attention=replace(block.attention, position_scale=None))
    (unscaled,) = set(read_spec(keys("mistral3", attention__temperature_scale=0.1)).blocks)
    assert unscaled.attention.position_scale == PositionScale(0.1, 4096)  # llama.cpp: the context length


def test_mixtral_8x7b() -> None:
    attention = AttentionSpec(32, 8, 128, 128**-0.5, rope=RopeSpec(1e6))
    block = BlockSpec(4096, NORM, attention, MoESpec(8, 2, 14_336))
    assert spec_of(MIXTRAL) == ModelSpec(4096, 32_000, (block,) * 32, NORM, context=32_768)
    (sliding,) = set(spec_of(MIXTRAL, sliding_window=4096).blocks)
    assert sliding == replace(block, attention=replace(attention, window=4096))


def test_a_llama_file_with_experts_is_mixtral_s_and_one_without_is_not() -> None:
    experts = {"expert_count": 8, "expert_used_count": 2}
    assert [read(keys("llama", **given)).model_type for given in ({}, {"expert_count": 0}, experts)] == [
        "llama", "llama", "mixtral",
    ]  # fmt: skip
    assert {block.mlp for block in read_spec(keys("llama", **experts)).blocks} == {MoESpec(8, 2, 96)}
    with pytest.raises(UnsupportedError, match="expert_gating_func"):
        read(keys("llama", **experts, expert_gating_func=2))


def test_mixtral_s_experts_are_found_one_by_one_and_fused() -> None:
    config = config_of(MIXTRAL)
    found = architecture_of(config).hf_sources("layers.1.mlp.experts.up_proj.weight", config)
    half = PickRows(14_336, 2 * 14_336, axis=-2)
    assert found == (
        TensorSource("layers.1.block_sparse_moe.experts.w3.weight"),
        TensorSource("layers.1.mlp.experts.gate_up_proj", (half,)),
    )


def test_granite_3_3_2b() -> None:
    attention = AttentionSpec(32, 8, 64, 0.015625, rope=RopeSpec(1e7))
    block = BlockSpec(2048, NORM, attention, MLPSpec(8192, "silu"), residual_factor=0.22)
    model = ModelSpec(2048, 49_159, (block,) * 40, NORM, context=131_072, tied=True)
    assert spec_of(GRANITE) == replace(model, embedding_scale=12.0, logit_factor=0.125)


def test_granite_3_1b_a400m_has_the_residual_multiplier_in_its_experts_shares() -> None:
    spec = spec_of(GRANITE_MOE)
    (block,) = set(spec.blocks)
    assert block.mlp == MoESpec(32, 8, 512, shares=ScoredRouting("softmax", eps=0.0, factor=0.22))
    assert (block.residual_factor, spec.embedding_scale, spec.logit_factor) == (0.22, 12.0, 1 / 6)


def test_a_granite_multiplier_that_is_not_above_zero_is_refused() -> None:
    for name, value in every_pair(
        ["embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"], [0, -1.0, "big"]
    ):
        with in_case(name, value), pytest.raises(CheckpointError, match=name):
            config_of(GRANITE, **{name: value})


def test_a_granite_file_has_the_factors_of_its_keys_and_llama_cpp_s_defaults() -> None:
    given = {"attention__scale": 0.25, "embedding_scale": 12.0, "residual_scale": 0.5, "logit_scale": 8.0}
    spec = read_spec(keys("granite", **given))
    (block,) = set(spec.blocks)
    assert (block.attention.scale, block.residual_factor) == (0.25, 0.5)
    assert (spec.embedding_scale, spec.logit_factor) == (12.0, 0.125)
    usual = read_spec(keys("granite", logit_scale=1.0))
    assert (usual.blocks[0].attention.scale, usual.blocks[0].residual_factor) == (0.25, 1.0)
    with pytest.raises(CheckpointError, match="logit_scale"):
        read(keys("granite"))
    with pytest.raises(UnsupportedError, match=r"rope\.scaling\.finetuned"):
        read(keys("granite", logit_scale=1.0, rope__scaling__finetuned=False))
    experts = {"expert_count": 8, "expert_used_count": 2, "expert_shared_feed_forward_length": 96}
    with pytest.raises(UnsupportedError, match="expert_shared_feed_forward_length"):
        read(keys("granitemoe", logit_scale=1.0, **experts))


def test_every_fourth_layer_of_smollm3_does_not_rotate() -> None:
    norm = NormSpec("rms", 1e-6)
    attention = AttentionSpec(16, 4, 128, 128**-0.5, rope=RopeSpec(5e6))
    block = BlockSpec(2048, norm, attention, MLPSpec(11_008, "silu"))
    still = replace(block, attention=replace(attention, rope=None))
    blocks = 9 * (block, block, block, still)
    assert spec_of(SMOLLM3) == ModelSpec(2048, 128_256, blocks, norm, context=65_536, tied=True)
    assert parse(FAMILIES["smollm3"]).own == config_of(SMOLLM3).own


@pytest.mark.parametrize(
    ("changes", "still"),
    [
        ({"no_rope_layer_interval": 3}, {2, 5, 8}),
        ({"no_rope_layers": [0, 1, 0, 1, 1, 1, 1, 1, 1, 0]}, {0, 2}),
        ({"no_rope_layers": 9 * [1]}, set()),
    ],
    ids=str,
)
def test_the_layers_of_smollm3_that_do_not_rotate_are_those_of_its_config(changes: dict, still: set[int]) -> None:
    blocks = spec_of(SMOLLM3, num_hidden_layers=9, **changes).blocks
    assert {index for index, block in enumerate(blocks) if block.attention.rope is None} == still


@pytest.mark.parametrize("value", [[1, 1, 0], 36 * [2], "all"])
def test_a_list_of_layers_that_fits_no_smollm3_is_refused(value: object) -> None:
    with pytest.raises(CheckpointError, match="no_rope_layers"):
        config_of(SMOLLM3, no_rope_layers=value)


def test_layers_of_smollm3_that_do_not_rotate_slide_if_it_has_a_window() -> None:
    blocks = spec_of(SMOLLM3, use_sliding_window=True, sliding_window=512).blocks
    assert all((block.attention.window == 512) == (block.attention.rope is None) for block in blocks)
    explicit = 35 * ["full_attention"] + ["sliding_attention"]
    blocks = spec_of(SMOLLM3, use_sliding_window=True, sliding_window=512, layer_types=explicit).blocks
    assert [block.attention.window for block in blocks] == 35 * [None] + [512]


def test_a_smollm3_cut_short_keeps_its_first_layers() -> None:
    config = config_of(SMOLLM3).cut(5, "config.json")
    assert [block.attention.rope is None for block in architecture_of(config).spec(config).blocks] == [
        False, False, False, True, False,
    ]  # fmt: skip


def test_a_smollm3_file_says_nothing_of_the_layers_that_do_not_rotate() -> None:
    blocks = read_spec(keys("smollm3")).blocks
    assert [index for index, block in enumerate(blocks) if block.attention.rope is None] == [3, 7]
