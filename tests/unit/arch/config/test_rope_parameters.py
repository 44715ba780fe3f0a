"""Rotary settings: every spelling comes out in one form, which transformers reads the same way."""

import copy
import math

import pytest
import torch
from support.cases import in_case
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from graphcore.arch.config.model_config import RopeParameters
from graphcore.arch.config.rope_parameters import note_on_longrope, read_rope
from graphcore.arch.config.typed_fields import Fields
from graphcore.arch.families.gemma3 import GEMMA3
from graphcore.arch.families.gpt_oss import GPT_OSS
from graphcore.arch.families.llama import LLAMA
from graphcore.arch.families.phi3 import PHI3
from graphcore.arch.families.qwen import QWEN3
from graphcore.arch.rotary import rope_of
from graphcore.errors import CheckpointError, UnsupportedError
from graphcore.nn.rope import rope_frequencies
from graphcore.nn.rope_spec import LongScaling, YarnScaling

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA3_FORM = {"rope_type": "llama3", **LLAMA3}


def read(raw: dict, architecture=LLAMA, context: int = 131_072) -> RopeParameters:
    return read_rope(Fields(raw, "config.json"), architecture.defaults, head_dim=64, context=context)


@pytest.mark.parametrize(
    "raw",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        {"rope_theta": 1.0, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_parameters": None, "rope_scaling": {"rope_type": "llama3", "extra": 1, **LLAMA3}},
    ],
)
def test_every_spelling_of_a_scaling_is_one_form_and_what_transformers_reads(raw):
    from transformers import LlamaConfig

    rope = read(raw)
    assert rope == RopeParameters(5e5, LLAMA3_FORM)
    theirs = LlamaConfig(**copy.deepcopy(raw)).rope_parameters
    assert theirs["rope_theta"] == rope.theta
    assert {key: theirs[key] for key in LLAMA3_FORM} == rope.scaling


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({}, RopeParameters(1e6, None, 1e4)),
        ({"rope_theta": 2e6, "rope_local_base_freq": 3e4}, RopeParameters(2e6, None, 3e4)),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 8}},
            RopeParameters(1e6, {"rope_type": "linear", "factor": 8.0}, 1e4),
        ),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
                }
            },
            RopeParameters(5e6, {"rope_type": "linear", "factor": 8.0}, 2e4),
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 7e5}, "sliding_attention": None}},
            RopeParameters(7e5, None, 1e4),
        ),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 7e3}}}, RopeParameters(1e6, None, 7e3)),
    ],
)
def test_gemma3_has_a_table_per_layer_type_as_in_transformers(raw, expected):
    from transformers import Gemma3TextConfig

    assert read(raw, GEMMA3) == expected
    theirs = Gemma3TextConfig(**copy.deepcopy(raw)).rope_parameters
    full, local = theirs["full_attention"], theirs["sliding_attention"]
    assert (full["rope_theta"], local["rope_theta"]) == (expected.theta, expected.local_theta)
    assert full.get("factor") == (expected.scaling or {}).get("factor")


def test_a_flat_object_of_gemma3_is_of_full_attention():
    flat = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e6}}
    assert read(flat, GEMMA3) == RopeParameters(5e6, {"rope_type": "linear", "factor": 2.0}, 1e4)


@pytest.mark.parametrize("rope", [{"rope_type": "default"}, {"type": "default", "factor": 4.0}, {}, None])
def test_default_rope_has_no_scaling(rope):
    assert read({"rope_scaling": rope}) == RopeParameters(1e4)


@pytest.mark.parametrize("rope_type", ["su", "mrope", "x" * 300])
def test_other_rope_types_are_refused_with_the_known_ones(rope_type):
    with pytest.raises(
        UnsupportedError,
        match=r"rope_scaling: rope_type .*; known: default, dynamic, linear, llama3, longrope, proportional, yarn",
    ) as caught:
        read({"rope_scaling": {"type": rope_type, "factor": 2.0}})
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("missing", sorted(LLAMA3.keys() - {"original_max_position_embeddings"}))
def test_a_missing_key_is_named(missing):
    rope = {key: value for key, value in LLAMA3_FORM.items() if key != missing}
    with pytest.raises(CheckpointError, match=f"'llama3' needs {missing}"):
        read({"rope_parameters": rope})


def test_linear_scaling_needs_its_factor():
    with pytest.raises(CheckpointError, match="'linear' needs factor"):
        read({"rope_scaling": {"type": "linear"}})


def test_wrong_values_are_refused_by_name():
    for key, value in [
        ("factor", 0),
        ("factor", -2.0),
        ("factor", "8"),
        ("factor", True),
        ("factor", float("nan")),
        ("low_freq_factor", -1.0),
        ("high_freq_factor", 1.0),
        ("high_freq_factor", 0.5),
        ("original_max_position_embeddings", 8192.5),
        ("original_max_position_embeddings", 0),
        ("rope_theta", -1.0),
        ("rope_type", 3),
    ]:
        with in_case(key, value), pytest.raises(CheckpointError, match=f"rope_parameters: '{key}'"):
            read({"rope_parameters": {**LLAMA3_FORM, key: value}})


def test_partial_rotation_is_refused():
    with pytest.raises(UnsupportedError, match="partial_rotary_factor"):
        read({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}})


def test_scaled_local_layers_are_refused():
    rope = {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}
    with pytest.raises(UnsupportedError, match="sliding layers"):
        read({"rope_parameters": rope}, GEMMA3)


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_tables_per_layer_type_are_refused_where_the_class_has_one(name):
    with pytest.raises(UnsupportedError, match=f"{name} differs by layer type, but qwen3"):
        read({name: {"full_attention": {"rope_type": "default"}}}, QWEN3)


YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({}, 1.3465736),
        ({"factor": 1.0}, 1.0),
        ({"attention_factor": 1.25}, 1.25),
        ({"mscale": 0.707, "mscale_all_dim": 0.5}, (1 + 0.0707 * math.log(32)) / (1 + 0.05 * math.log(32))),
        ({"mscale": 0.707}, 1.3465736),  # transformers reads it only beside the other one
    ],
    ids=str,
)
def test_yarn_s_attention_factor_is_that_of_transformers(changes, factor):
    from transformers import GptOssConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {**YARN, **changes}
    theirs = ROPE_INIT_FUNCTIONS["yarn"](GptOssConfig(rope_parameters=dict(rope)), device="cpu")[1]
    scaling = read({"rope_parameters": rope}, GPT_OSS).scaling
    assert scaling is not None
    assert scaling["attention_factor"] == pytest.approx(factor, abs=1e-7)
    assert scaling["attention_factor"] == pytest.approx(theirs, abs=1e-12)


def test_yarn_s_ramp_is_rounded_unless_the_file_or_the_class_says_otherwise():
    assert read({"rope_parameters": YARN}, QWEN3).scaling["truncate"] is True
    assert read({"rope_parameters": YARN}, GPT_OSS).scaling["truncate"] is False
    for truncate in (True, False):
        for architecture in (QWEN3, GPT_OSS):
            scaling = read({"rope_parameters": {**YARN, "truncate": truncate}}, architecture).scaling
            assert scaling["truncate"] is truncate


@pytest.mark.parametrize("raw", [{}, {"rope_theta": 150000}, {"rope_scaling": None}, {"rope_parameters": {}}], ids=str)
def test_gpt_oss_without_a_rotation_of_its_own_has_its_class_s(raw):
    rope = read(raw, GPT_OSS)
    assert rope.theta == 150_000.0
    assert rope.scaling == read({"rope_parameters": YARN}, GPT_OSS).scaling


def test_gpt_oss_with_plain_frequencies_has_them():
    assert read({"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}, GPT_OSS) == RopeParameters(5e4)


@pytest.mark.parametrize(
    ("key", "value"),
    [("beta_fast", 0), ("beta_fast", 0.5), ("beta_slow", -1), ("truncate", 1), ("mscale", "x"), ("rope_theta", 1)],
)
def test_wrong_yarn_values_are_refused_by_name(key, value):
    with pytest.raises(CheckpointError, match=f"'{key}' must be"):
        read({"rope_parameters": {**YARN, key: value}}, GPT_OSS)


def frequencies_of_transformers(context: int = 64, **settings: object) -> tuple[torch.Tensor, float]:
    """Return the frequencies [head_dim / 2] and the factor of cosines that transformers computes for these settings."""
    config = LlamaConfig(hidden_size=128, num_attention_heads=2, max_position_embeddings=context, **settings)
    rotary = LlamaRotaryEmbedding(config)
    return rotary.inv_freq, rotary.attention_scaling


YARN_4 = {"rope_type": "yarn", "factor": 4.0}
LLAMA3_8 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_scaling": YARN_4},
        {"rope_scaling": {**YARN_4, "original_max_position_embeddings": 32.0}},
        {"rope_scaling": {**YARN_4, "original_max_position_embeddings": 32}, "original_max_position_embeddings": 16},
        {"rope_scaling": {**YARN_4, "factor": None, "original_max_position_embeddings": 16}},
        {"rope_scaling": LLAMA3_8},
        {"rope_scaling": {**LLAMA3_8, "original_max_position_embeddings": 16.0}},
        {"rope_parameters": {**LLAMA3_8, "rope_theta": 500.0}},
        {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
        {"rope_scaling": {"type": "linear", "factor": 4.0, "original_max_position_embeddings": 16}},
        {"rope_scaling": {"factor": 4.0}},
    ],
    ids=str,
)
def test_frequencies_are_those_of_transformers_where_the_file_says_less_than_all(settings):
    theirs, their_scale = frequencies_of_transformers(**copy.deepcopy(settings))
    spec = rope_of(read(settings, context=64))
    scale = spec.scaling.attention_factor if isinstance(spec.scaling, YarnScaling) else 1.0
    # float32 powers, and other orders of the same operations: a few units in the last place.
    torch.testing.assert_close(rope_frequencies(spec, 64).float(), theirs, rtol=1e-6, atol=0.0)
    assert scale == pytest.approx(their_scale, abs=1e-12)


SHORT, LONG = [1.0 + pair / 9 for pair in range(32)], [2.0 + pair for pair in range(32)]
LISTS = {"short_factor": SHORT, "long_factor": LONG}
LONGROPES = [
    {"rope_scaling": {"type": "longrope", **LISTS}},
    {"rope_scaling": {"type": "su", **LISTS}, "original_max_position_embeddings": 2048},
    {"rope_scaling": {"rope_type": "yarn", **LISTS}, "original_max_position_embeddings": 8192},
    {"rope_scaling": {"type": "longrope", "original_max_position_embeddings": 64, **LISTS}},  # not read there
    {"rope_parameters": {"rope_type": "longrope", "rope_theta": 5e5, "factor": 3.0, **LISTS}},
    {"rope_parameters": {"rope_type": "longrope", "attention_factor": 1.25, **LISTS}},
    {"rope_scaling": {"type": "longrope", **LISTS}, "max_position_embeddings": 4096},
]


@pytest.mark.parametrize("raw", LONGROPES, ids=str)
def test_longrope_of_phi3_has_the_frequencies_and_the_factor_of_transformers(raw):
    raw = {"max_position_embeddings": 131_072, **raw}
    today = copy.deepcopy(raw)
    if raw.get("rope_scaling", {}).get("type") == "su":  # the class renames it after it has looked for its keys
        today["rope_scaling"]["type"] = "longrope"
    theirs = Phi3Config(hidden_size=256, num_attention_heads=4, **today)
    table = Phi3RotaryEmbedding(theirs)
    context = raw["max_position_embeddings"]
    spec = rope_of(read_rope(Fields(raw, "config.json"), PHI3.defaults, 64, context))
    assert isinstance(spec.scaling, LongScaling)
    original = theirs.rope_parameters["original_max_position_embeddings"]
    assert spec.scaling.original_context == original
    for tokens in (1, original, original + 1):
        cos, _ = table(torch.zeros(1), torch.tensor([[tokens - 1]]))
        ours = rope_frequencies(spec, 64, tokens) * (tokens - 1)
        assert torch.equal(ours.cos() * spec.scaling.attention_factor, cos[0, 0, :32])


def test_longrope_of_other_types_needs_its_lists_and_reads_its_own_original_context():
    rope = read({"rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": 4096, **LISTS}})
    assert rope.scaling == {
        "rope_type": "longrope",
        "original_max_position_embeddings": 4096,
        "attention_factor": math.sqrt(1 + math.log(32) / math.log(4096)),
    }
    assert (rope.short_factors, rope.long_factors) == (tuple(SHORT), tuple(LONG))
    wrong = [{"short_factor": SHORT}, {**LISTS, "long_factor": LONG[1:]}, {**LISTS, "short_factor": [0.0] * 32}]
    for lists in wrong:
        with pytest.raises(CheckpointError, match=r"'(long|short)_factor' must be"):
            read({"rope_scaling": {"rope_type": "longrope", **lists}})
    with pytest.raises(CheckpointError, match="'original_max_position_embeddings' must be at least 2, found 1"):
        read({"rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": 1, **LISTS}})


def test_a_note_says_where_short_sequences_rotate_otherwise_than_in_transformers():
    rope = read({"rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": 4096, **LISTS}})
    assert note_on_longrope(rope, 4096) == note_on_longrope(None, 8192) == note_on_longrope(read({}), 8192) == ()
    (note,) = note_on_longrope(rope, 4097)
    assert note.startswith("context_length=4097 is above 4096: all sequences rotate with longrope's long_factor")


def test_a_sliding_longrope_of_gemma3_is_refused_and_a_full_one_keeps_its_lists():
    full = {"rope_type": "longrope", "rope_theta": 1e6, "original_max_position_embeddings": 8192, **LISTS}
    rope = read({"rope_parameters": {"full_attention": full, "sliding_attention": {"rope_theta": 1e4}}}, GEMMA3)
    assert (rope.local_theta, rope.long_factors) == (1e4, tuple(LONG))
    with pytest.raises(UnsupportedError, match="sliding layers have a rope_type other than 'default'"):
        read({"rope_parameters": {"full_attention": {}, "sliding_attention": full}}, GEMMA3)
