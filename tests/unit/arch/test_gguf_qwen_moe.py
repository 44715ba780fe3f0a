"""GGUF metadata of Qwen's mixtures of experts: what a file says, and what llama.cpp knows without it."""

import contextlib

import pytest

from graphcore.arch.config.model_config import ExpertsConfig, ModelConfig
from graphcore.arch.config_from_gguf import config_from_gguf
from graphcore.errors import CheckpointError, GraphcoreError, UnsupportedError

# Qwen3-30B-A3B, keys as llama.cpp's converter writes them
QWEN3_MOE = {
    "general.architecture": "qwen3moe",
    "qwen3moe.block_count": 48,
    "qwen3moe.context_length": 40960,
    "qwen3moe.embedding_length": 2048,
    "qwen3moe.feed_forward_length": 6144,
    "qwen3moe.attention.head_count": 32,
    "qwen3moe.attention.head_count_kv": 4,
    "qwen3moe.attention.key_length": 128,
    "qwen3moe.attention.value_length": 128,
    "qwen3moe.attention.layer_norm_rms_epsilon": 1e-6,
    "qwen3moe.rope.freq_base": 1_000_000.0,
    "qwen3moe.expert_count": 128,
    "qwen3moe.expert_used_count": 8,
    "qwen3moe.expert_feed_forward_length": 768,
}
SHAPES = {"token_embd.weight": (151936, 2048), "output.weight": (151936, 2048)}


def parse(**changes: object) -> ModelConfig:
    merged = {**QWEN3_MOE, **{f"qwen3moe.{key}": value for key, value in changes.items()}}
    return config_from_gguf(merged, SHAPES, None, "model.gguf")


def test_experts_are_those_of_the_file_and_their_shares_sum_to_one() -> None:
    config = parse()
    assert config.experts == ExpertsConfig(
        num_local_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True
    )
    assert (config.intermediate_size, config.hidden_act, config.tie_word_embeddings) == (6144, "silu", False)
    assert parse(expert_weights_norm=True) == config
    for softmax in (1, 3):  # over all scores, or over the chosen ones
        assert parse(expert_gating_func=softmax) == config


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_weights_norm", False),
        ("expert_gating_func", 2),
        ("expert_shared_count", 1),
        ("expert_shared_feed_forward_length", 768),
        ("expert_weights_scale", 2.5),
        ("expert_group_count", 4),
    ],
)
def test_other_mixtures_are_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(UnsupportedError, match=f"qwen3moe.{key}"):
        parse(**{key: value})


@pytest.mark.parametrize("key", ["expert_count", "expert_used_count", "expert_feed_forward_length"])
def test_a_file_needs_the_keys_of_its_experts(key: str) -> None:
    with pytest.raises(CheckpointError, match=rf"lacks qwen3moe\.{key}"):
        parse(**{key: None})


@pytest.mark.parametrize("value", [True, -1, 0, 2**64 - 1, 1.5, "x", [], [0], [-1, 2], float("inf")], ids=repr)
def test_no_value_of_any_key_ends_in_anything_but_a_config_or_a_clear_error(value: object) -> None:
    for key in QWEN3_MOE:
        with contextlib.suppress(GraphcoreError):
            config_from_gguf({**QWEN3_MOE, key: value}, SHAPES, None, "model.gguf")
