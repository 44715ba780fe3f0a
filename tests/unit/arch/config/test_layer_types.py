"""Which layers slide: explicit lists, patterns and each model type's rule."""

import pytest
from support.hub_configs import GEMMA3_1B, LLAMA, MISTRAL, QWEN2, QWEN3, parse

from graphcore.errors import CheckpointError, UnsupportedError


def test_layer_types_in_the_file_win_over_the_pattern():
    explicit = ["full_attention", "sliding_attention"] * 13
    assert parse(GEMMA3_1B, layer_types=explicit).attention.layer_types == tuple(explicit)


def test_without_a_pattern_no_layer_types_are_made():
    assert parse(LLAMA).attention.layer_types is None
    assert parse(LLAMA, sliding_window_pattern=2).attention.layer_types is None


@pytest.mark.parametrize(
    "patterns",
    [
        {"sliding_window_pattern": 3},
        {"sliding_window_pattern": 2, "_sliding_window_pattern": 6},
        {"_sliding_window_pattern": 2},
        {},
    ],
)
def test_the_pattern_is_the_one_that_transformers_reads(patterns):
    transformers = pytest.importorskip("transformers")
    raw = {key: value for key, value in GEMMA3_1B.items() if "pattern" not in key and key != "layer_types"}
    theirs = transformers.Gemma3TextConfig(num_hidden_layers=raw["num_hidden_layers"], **patterns).layer_types
    assert parse(raw, **patterns).attention.layer_types == tuple(theirs)


def test_mistral_slides_in_every_layer_unless_its_window_is_null():
    assert parse(MISTRAL).attention.layer_types == 32 * ("sliding_attention",)
    assert parse(MISTRAL, sliding_window=None).attention.sliding_window is None
    assert parse(MISTRAL, sliding_window=None).attention.layer_types is None


def test_qwen_slides_past_max_window_layers_only_if_asked_to():
    assert parse(QWEN2).attention.sliding_window is None
    config = parse(QWEN2, use_sliding_window=True)
    assert config.attention.sliding_window == 32768
    assert config.attention.layer_types == 21 * ("full_attention",) + 3 * ("sliding_attention",)
    assert parse(QWEN2, use_sliding_window=True, max_window_layers=0).attention.layer_types == 24 * (
        "sliding_attention",
    )


@pytest.mark.parametrize(
    ("raw", "changes", "kind", "says"),
    [
        (GEMMA3_1B, {"layer_types": ["full_attention"] * 25}, CheckpointError, "25 layers.*26"),
        (GEMMA3_1B, {"layer_types": ["chunked_attention"] * 26}, UnsupportedError, "chunked_attention"),
        (GEMMA3_1B, {"layer_types": "full_attention"}, CheckpointError, "layer_types.*list of strings"),
        (GEMMA3_1B, {"layer_types": [0] * 26}, CheckpointError, "layer_types.*list of strings"),
        (GEMMA3_1B, {"sliding_window": None}, CheckpointError, "no sliding_window"),
        (QWEN3, {"layer_types": ["sliding_attention"] * 28}, CheckpointError, "no sliding_window"),
        (LLAMA, {"layer_types": ["sliding_attention"] * 16}, UnsupportedError, "layer_types.*llama"),
        (MISTRAL, {"layer_types": ["full_attention"] * 32}, UnsupportedError, "layer_types.*mistral"),
        (GEMMA3_1B, {"sliding_window": 0}, CheckpointError, "sliding_window.*positive"),
        (GEMMA3_1B, {"sliding_window_pattern": -6}, CheckpointError, "sliding_window_pattern.*positive"),
        (QWEN2, {"use_sliding_window": 1}, CheckpointError, "use_sliding_window.*true or false"),
    ],
)
def test_wrong_layer_types_are_refused(raw, changes, kind, says):
    with pytest.raises(kind, match=says):
        parse(raw, **changes)
