"""GGUF metadata of Gemma 4: what differs by layer is stored as arrays, and some of it under keys of its own."""

import contextlib

import pytest

from graphcore.arch.config.model_config import ExpertsConfig, ModelConfig
from graphcore.arch.config_from_gguf import config_from_gguf
from graphcore.arch.registry import architecture_of
from graphcore.errors import CheckpointError, GraphcoreError, UnsupportedError
from graphcore.nn.rope_spec import DivisorScaling, RopeSpec

# 26B-A4B, keys as llama.cpp's converter writes them
SLIDES = 5 * (5 * [True] + [False])
GEMMA4 = {
    "general.architecture": "gemma4",
    "gemma4.block_count": 30,
    "gemma4.context_length": 262144,
    "gemma4.embedding_length": 2816,
    "gemma4.embedding_length_per_layer_input": 0,
    "gemma4.feed_forward_length": 2112,
    "gemma4.attention.head_count": 16,
    "gemma4.attention.head_count_kv": [8 if slides else 2 for slides in SLIDES],
    "gemma4.attention.key_length": 512,
    "gemma4.attention.key_length_swa": 256,
    "gemma4.attention.value_length": 512,
    "gemma4.attention.value_length_swa": 256,
    "gemma4.attention.layer_norm_rms_epsilon": 1e-6,
    "gemma4.attention.shared_kv_layers": 0,
    "gemma4.attention.sliding_window": 1024,
    "gemma4.attention.sliding_window_pattern": SLIDES,
    "gemma4.expert_count": 128,
    "gemma4.expert_used_count": 8,
    "gemma4.expert_feed_forward_length": 704,
    "gemma4.final_logit_softcapping": 30.0,
    "gemma4.rope.dimension_count": 512,
    "gemma4.rope.dimension_count_swa": 256,
    "gemma4.rope.freq_base": 1e6,
    "gemma4.rope.freq_base_swa": 1e4,
}
SHAPES = {"token_embd.weight": (262144, 2816)}
FREQS = 64 * [1.0] + 192 * [1e30]


def parse(**changes: object) -> ModelConfig:
    merged = {**GEMMA4, **{f"gemma4.{key}": value for key, value in changes.items()}}
    return config_from_gguf(merged, SHAPES, FREQS, "model.gguf")


def test_each_layer_has_its_own_heads_rotation_and_window() -> None:
    config = parse()
    assert config.experts == ExpertsConfig(128, 8, moe_intermediate_size=704)
    spec = architecture_of(config).spec(config)
    assert (len(spec.blocks), spec.logit_cap, spec.tied, spec.per_layer) == (30, 30.0, True, None)
    sliding, full = spec.blocks[0].attention, spec.blocks[5].attention
    assert (sliding.heads, sliding.kv_heads, sliding.head_dim, sliding.window) == (16, 8, 256, 1024)
    assert (full.heads, full.kv_heads, full.head_dim, full.window) == (16, 2, 512, None)
    assert (sliding.rope, full.rope) == (RopeSpec(1e4), RopeSpec(1e6, DivisorScaling(tuple(FREQS))))
    # Without a tensor of values the keys' product is theirs, too.
    assert (sliding.values_are_keys, full.values_are_keys) == (False, True)
    assert {one.attention for one in spec.blocks} == {sliding, full}


def test_the_last_layers_may_share_keys_and_have_a_wider_mlp() -> None:
    widths = 20 * [2112] + 10 * [4224]
    spec_of = architecture_of(parse()).spec
    spec = spec_of(parse(**{"attention.shared_kv_layers": 10, "feed_forward_length": widths}))
    assert [one.attention.shares_cache for one in spec.blocks] == 20 * [False] + 10 * [True]
    assert [one.mlp.parallel_mlp.hidden for one in spec.blocks] == widths
    assert set(spec.cache_layers[20:]) == {17, 19}


@pytest.mark.parametrize(
    ("key", "value", "error", "message"),
    [
        ("attention.head_count_kv", 29 * [8] + [2], UnsupportedError, "layer 29 has 2 kv heads"),
        ("attention.head_count_kv", [8, 2], CheckpointError, "must be a list of block_count \\(30\\) values"),
        ("attention.sliding_window_pattern", [True], CheckpointError, "a list of 30 booleans"),
        ("attention.sliding_window_pattern", 30 * [True], UnsupportedError, "lets the last layer slide"),
        ("attention.shared_kv_layers", 31, CheckpointError, "must be an integer from 0 to 30"),
        ("attn_logit_softcapping", 50.0, UnsupportedError, "attn_logit_softcapping"),
        ("expert_used_count", None, CheckpointError, "lacks gemma4.expert_used_count"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    key: str, value: object, error: type[GraphcoreError], message: str
) -> None:
    with pytest.raises(error, match=message):
        parse(**{key: value})


@pytest.mark.parametrize("value", [True, -1, 0, 2**64 - 1, 1.5, "x", [], [0], [-1, 2], float("inf")], ids=repr)
def test_no_value_of_any_key_ends_in_anything_but_a_config_or_a_clear_error(value: object) -> None:
    for key in GEMMA4:
        with contextlib.suppress(GraphcoreError):
            config_from_gguf({**GEMMA4, key: value}, SHAPES, FREQS, "model.gguf")
