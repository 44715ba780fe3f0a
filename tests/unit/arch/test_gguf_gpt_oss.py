"""gpt-oss's GGUF metadata: what it says, what its class says instead, and what is refused."""

import contextlib

import pytest

from graphcore.arch.config.model_config import ModelConfig
from graphcore.arch.config_from_gguf import config_from_gguf
from graphcore.errors import CheckpointError, GraphcoreError, UnsupportedError

# What gpt-oss 20b's GGUF says, as llama.cpp's loader lists it.
GPT_OSS = {
    "general.architecture": "gpt-oss",
    "gpt-oss.block_count": 24,
    "gpt-oss.context_length": 131072,
    "gpt-oss.embedding_length": 2880,
    "gpt-oss.feed_forward_length": 2880,
    "gpt-oss.expert_feed_forward_length": 2880,
    "gpt-oss.attention.head_count": 64,
    "gpt-oss.attention.head_count_kv": 8,
    "gpt-oss.attention.key_length": 64,
    "gpt-oss.attention.value_length": 64,
    "gpt-oss.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "gpt-oss.attention.sliding_window": 128,
    "gpt-oss.expert_count": 32,
    "gpt-oss.expert_used_count": 4,
    "gpt-oss.rope.freq_base": 150000.0,
    "gpt-oss.rope.scaling.type": "yarn",
    "gpt-oss.rope.scaling.factor": 32.0,
    "gpt-oss.rope.scaling.original_context_length": 4096,
    "tokenizer.ggml.tokens": ["t"] * 100,
    "tokenizer.ggml.eos_token_id": 98,
}


def parse(**changes: object) -> ModelConfig:
    """Return the config with some of the architecture's keys changed, __ for a dot; None takes one away."""
    metadata = {**GPT_OSS, **{f"gpt-oss.{key.replace('__', '.')}": value for key, value in changes.items()}}
    kept = {key: value for key, value in metadata.items() if value is not None}
    return config_from_gguf(kept, {}, None, "model.gguf")


def test_what_a_gpt_oss_file_does_not_say_is_its_class_s_own():
    config = parse()
    assert config.attention.layer_types == ("sliding_attention", "full_attention") * 12
    assert (config.attention.sliding_window, config.attention.head_dim) == (128, 64)
    assert config.attention.query_pre_attn_scalar is None
    assert (config.experts.swiglu_limit, config.experts.swiglu_alpha) == (7.0, 1.702)
    assert (config.experts.num_local_experts, config.experts.num_experts_per_tok) == (32, 4)
    assert config.intermediate_size == 2880
    assert config.rope.scaling == {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": pytest.approx(1.3465736),
        "truncate": False,
    }


def test_an_expert_s_width_wins_over_the_feed_forward_length():
    assert parse(expert_feed_forward_length=1440).intermediate_size == 1440
    assert parse(expert_feed_forward_length=None, feed_forward_length=320).intermediate_size == 320


def test_yarn_of_other_architectures_is_rounded_as_transformers_and_llama_cpp_do():
    llama = {key.replace("gpt-oss.", "llama."): value for key, value in GPT_OSS.items() if "expert" not in key}
    metadata = {**llama, "general.architecture": "llama", "llama.attention.sliding_window": 0}
    scaling = config_from_gguf(metadata, {}, None, "model.gguf").rope.scaling
    assert scaling is not None
    assert scaling["truncate"] is True


@pytest.mark.parametrize("key", ["expert_count", "expert_used_count", "attention.sliding_window"])
def test_a_gpt_oss_file_needs_its_experts_and_its_window(key):
    with pytest.raises(CheckpointError, match=rf"gpt-oss\.{key}"):
        parse(**{key.replace(".", "__"): None})


def test_yarn_without_its_context_scales_from_the_context_length_and_without_its_factor_not_at_all():
    """llama.cpp's rule (llama-model.cpp): n_ctx_orig_yarn is n_ctx_train, and an unset factor is 1."""
    assert (
        parse(rope__scaling__original_context_length=None).rope.scaling
        == parse(rope__scaling__original_context_length=parse().max_position_embeddings).rope.scaling
    )
    assert parse(rope__scaling__original_context_length=0) == parse(rope__scaling__original_context_length=None)
    assert parse(rope__scaling__factor=None).rope.scaling is None
    assert parse(rope__scaling__factor=None, rope__scale_linear=32.0) == parse()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_gating_func", 1),
        ("expert_gating_func", 2),
        ("expert_shared_count", 1),
        ("expert_weights_scale", 2.5),
        ("rope.scaling.yarn_ext_factor", 0.5),
        ("rope.scaling.yarn_log_multiplier", 0.1),
    ],
)
def test_other_mixtures_and_other_yarns_are_refused_by_name(key, value):
    with pytest.raises(UnsupportedError, match=key.replace(".", r"\.")):
        parse(**{key.replace(".", "__"): value})


def test_a_stated_attention_factor_of_yarn_counts():
    """llama.cpp's converter writes that of OLMo 3's config.json."""
    assert parse(rope__scaling__yarn_attn_factor=1.2).rope.scaling["attention_factor"] == 1.2
    assert parse(rope__scaling__yarn_attn_factor=1.0) == parse(rope__scaling__yarn_attn_factor=0.0) == parse()
    with pytest.raises(UnsupportedError, match=r"yarn_attn_factor is 1\.2"):
        parse(rope__scaling__yarn_attn_factor=1.2, rope__scaling__type="linear")


def test_more_experts_a_token_than_there_are_is_refused():
    with pytest.raises(CheckpointError, match="num_experts_per_tok 33 is above num_local_experts 32"):
        parse(expert_used_count=33)


@pytest.mark.parametrize("value", [True, -1, 0, 2**64 - 1, 1.5, "x", [], [0], [-1, 2], float("inf")], ids=repr)
def test_no_value_of_any_key_ends_in_anything_but_a_config_or_a_clear_error(value):
    for key in GPT_OSS:
        with contextlib.suppress(GraphcoreError):
            config_from_gguf({**GPT_OSS, key: value}, {}, None, "model.gguf")
