"""config.json to ModelConfig: real hub configs, transformers' own class defaults, and damage of every kind."""

import copy
import json
from pathlib import Path

import pytest

from graphcore.checkpoint.config import load_model_config, parse_model_config
from graphcore.checkpoint.config_defaults import CLASS_DEFAULTS
from graphcore.errors import CheckpointError, CheckpointNotFoundError, GraphcoreError, UnsupportedError

TINY = Path(__file__).parents[2] / "golden" / "tiny"

# meta-llama/Llama-3.2-1B-Instruct
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 128256,
}
# Qwen/Qwen3-1.7B
QWEN3 = {
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
# google/gemma-3-1b-it
GEMMA3_1B = {
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262144,
}
# google/gemma-3-4b-it: text_config omits what equals the class defaults
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
GPT2 = {
    "activation_function": "gelu_new",
    "bos_token_id": 50256,
    "eos_token_id": 50256,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
MISTRAL = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "vocab_size": 32000,
}
QWEN2 = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
FAMILIES = {
    "llama": LLAMA,
    "qwen3": QWEN3,
    "gemma3_text": GEMMA3_1B,
    "gemma3": GEMMA3_4B,
    "gpt2": GPT2,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
}


def parse(raw: dict, generation: dict | None = None, **changes: object):
    return parse_model_config({**raw, **changes}, "config.json", generation)


def without(raw: dict, *names: str) -> dict:
    return {name: value for name, value in raw.items() if name not in names}


# ---- whole configs


def test_llama_config_fills_every_field():
    config = parse(LLAMA)
    assert (config.model_type, config.hidden_size, config.intermediate_size) == ("llama", 2048, 8192)
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (16, 32, 8)
    assert (config.vocab_size, config.max_position_embeddings, config.head_dim) == (128256, 131072, 64)
    assert (config.rms_norm_eps, config.rope_theta, config.hidden_act) == (1e-5, 500000.0, "silu")
    assert config.rope_scaling == LLAMA["rope_scaling"]
    assert (config.attention_bias, config.qkv_bias, config.mlp_bias) == (False, False, False)
    assert (config.tie_word_embeddings, config.dtype, config.layer_norm_eps) == (True, "bfloat16", None)
    assert (config.bos_token_id, config.eos_token_ids) == (128000, (128001, 128008, 128009))
    assert config.rope_local_base_freq is None and config.query_pre_attn_scalar is None
    assert config.sliding_window is None and config.sliding_window_pattern is None and config.layer_types is None


def test_qwen3_config_has_its_own_head_dim_and_no_window():
    config = parse(QWEN3)
    assert (config.computed_head_dim, config.rope_theta, config.rms_norm_eps) == (128, 1e6, 1e-6)
    assert config.rope_scaling is None and config.sliding_window is None and config.layer_types is None
    assert config.eos_token_ids == (151645,)


def test_gemma3_config_resolves_its_window_pattern():
    config = parse(GEMMA3_1B)
    assert (config.hidden_act, config.query_pre_attn_scalar) == ("gelu_pytorch_tanh", 256.0)
    assert (config.rope_theta, config.rope_local_base_freq) == (1e6, 1e4)
    assert (config.sliding_window, config.sliding_window_pattern) == (512, 6)
    full = [layer for layer, kind in enumerate(config.layer_types) if kind == "full_attention"]
    assert full == [5, 11, 17, 23] and len(config.layer_types) == 26
    assert config.tie_word_embeddings and config.eos_token_ids == (1, 106)


def test_nested_gemma3_config_gets_what_the_class_defaults_say():
    config = parse(GEMMA3_4B)
    assert (config.model_type, config.hidden_size, config.num_hidden_layers) == ("gemma3_text", 2560, 34)
    assert (config.num_attention_heads, config.num_key_value_heads, config.computed_head_dim) == (8, 4, 256)
    assert (config.vocab_size, config.max_position_embeddings) == (262208, 131072)
    assert (config.rope_theta, config.rope_local_base_freq) == (1e6, 1e4)
    assert config.rope_scaling == {"rope_type": "linear", "factor": 8.0}
    assert (config.sliding_window, config.layer_types.count("full_attention")) == (1024, 5)
    assert (config.eos_token_ids, config.dtype, config.tie_word_embeddings) == ((1, 106), "bfloat16", True)


def test_nested_config_takes_its_type_from_outside_if_it_has_none():
    raw = {**GEMMA3_4B, "text_config": without(GEMMA3_4B["text_config"], "model_type")}
    assert parse(raw) == parse(GEMMA3_4B)


def test_nested_config_is_tied_by_the_outer_flag():
    assert parse(GEMMA3_4B, tie_word_embeddings=False).tie_word_embeddings is False


def test_gpt2_names_are_normalised():
    config = parse(GPT2)
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (768, 3072, 12)
    assert (config.num_attention_heads, config.num_key_value_heads, config.computed_head_dim) == (12, 12, 64)
    assert (config.max_position_embeddings, config.hidden_act, config.layer_norm_eps) == (1024, "gelu_new", 1e-5)
    assert config.attention_bias and config.qkv_bias and config.mlp_bias and config.tie_word_embeddings


def test_gpt2_context_is_n_ctx_where_n_positions_is_missing():
    assert parse(without(GPT2, "n_positions"), n_ctx=77).max_position_embeddings == 77
    assert parse(GPT2, n_inner=100).intermediate_size == 100


def test_qwen2_has_biases_on_q_k_and_v_only():
    config = parse(QWEN2)
    assert (config.qkv_bias, config.attention_bias, config.mlp_bias) == (True, False, False)
    assert config.computed_head_dim == 64


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_parsing_changes_nothing_in_its_input(name):
    raw = copy.deepcopy(FAMILIES[name])
    generation = {"eos_token_id": [7]}
    parse_model_config(raw, "config.json", generation)
    assert raw == FAMILIES[name] and generation == {"eos_token_id": [7]}


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_unknown_fields_are_ignored(name):
    assert parse(FAMILIES[name], some_new_field={"a": [1]}, pretraining_tp=2) == parse(FAMILIES[name])


# ---- transformers as the reference


def reference(raw: dict):
    from transformers import AutoConfig, logging

    logging.set_verbosity_error()
    config = AutoConfig.for_model(**copy.deepcopy(raw))
    return config.get_text_config()


@pytest.mark.parametrize("model_type", sorted(CLASS_DEFAULTS))
def test_class_defaults_are_those_of_transformers(model_type):
    theirs = reference({"model_type": model_type}).to_dict()
    defaults = CLASS_DEFAULTS[model_type]
    raw = {alias: theirs[alias] for name in defaults.required for alias in defaults.names_of(name) if alias in theirs}
    assert_agrees(parse_model_config({"model_type": model_type, **raw}, "config.json", None), theirs)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_hub_configs_agree_with_transformers(name):
    assert_agrees(parse(FAMILIES[name]), reference(FAMILIES[name]).to_dict(), skip=("eos", "tie"))


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_what_transformers_5_saves_reads_the_same(name):
    from transformers import AutoConfig

    saved = json.loads(AutoConfig.for_model(**copy.deepcopy(FAMILIES[name])).to_json_string(use_diff=True))
    ours, again = parse(FAMILIES[name]), parse_model_config(saved, "saved", None)
    assert again.rope_theta == ours.rope_theta and again.rope_local_base_freq == ours.rope_local_base_freq
    assert again.rope_scaling == ours.rope_scaling and again.dtype == ours.dtype
    assert (again.layer_types or ("full_attention",)) == (ours.layer_types or again.layer_types or ("full_attention",))
    assert again.computed_head_dim == ours.computed_head_dim and again.sliding_window == ours.sliding_window


def assert_agrees(ours, theirs: dict, skip: tuple[str, ...] = ()) -> None:
    """Compare with a transformers config's own dictionary, under its own names."""
    alias = {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    }
    for name in (*alias, "vocab_size"):
        assert getattr(ours, name) == theirs[name if name in theirs else alias[name]], name
    for name in ("num_key_value_heads", "head_dim", "intermediate_size", "query_pre_attn_scalar", "sliding_window"):
        if name in theirs and theirs[name] is not None:
            mine = ours.computed_head_dim if name == "head_dim" else getattr(ours, name)
            assert mine == theirs[name], name
    eps = ours.rms_norm_eps if "rms_norm_eps" in theirs else ours.layer_norm_eps
    assert eps == theirs.get("rms_norm_eps", theirs.get("layer_norm_epsilon"))
    activation = theirs.get("hidden_activation") or theirs.get("hidden_act") or theirs.get("activation_function")
    assert ours.hidden_act == activation
    rope = theirs.get("rope_parameters") or {}
    assert ours.rope_theta == rope.get("full_attention", rope).get("rope_theta", 10_000.0)
    assert ours.rope_local_base_freq == rope.get("sliding_attention", {}).get("rope_theta")
    expected_layers = theirs.get("layer_types") or ours.num_hidden_layers * ["full_attention"]
    if theirs["model_type"] != "mistral":  # whose class has no layer_types: every layer slides
        assert list(ours.layer_types or ours.num_hidden_layers * ["full_attention"]) == expected_layers
    if "tie" not in skip:
        assert ours.tie_word_embeddings == theirs["tie_word_embeddings"]
    if "eos" not in skip:
        ends = theirs["eos_token_id"]
        assert ours.eos_token_ids == (() if ends is None else (ends,))
        assert ours.bos_token_id == theirs["bos_token_id"]


# ---- normalisation


@pytest.mark.parametrize("field", ["mlp_bias", "attention_bias", "tie_word_embeddings", "rope_theta", "rms_norm_eps"])
def test_json_null_is_the_default(field):
    absent, null = parse(without(LLAMA, field)), parse(LLAMA, **{field: None})
    assert absent == null


def test_null_kv_heads_are_as_many_as_query_heads_and_absent_ones_the_class_default():
    assert parse(QWEN3, num_key_value_heads=None).num_key_value_heads == 16
    assert parse(without(QWEN3, "num_key_value_heads"), num_attention_heads=32).num_key_value_heads == 32
    assert parse(without(MISTRAL, "num_key_value_heads")).num_key_value_heads == 8
    assert parse(without(LLAMA, "num_key_value_heads")).num_key_value_heads == 32


def test_head_dim_is_explicit_inferred_or_decoupled():
    assert parse(LLAMA, head_dim=128).computed_head_dim == 128
    assert parse(without(LLAMA, "head_dim")).head_dim is None
    assert parse(without(LLAMA, "head_dim")).computed_head_dim == 64
    assert parse(GEMMA3_1B).computed_head_dim == 256 != 1152 // 4


def test_llama_biases_follow_their_flags_and_other_types_ignore_flags_their_class_lacks():
    config = parse(LLAMA, attention_bias=True, mlp_bias=True)
    assert config.attention_bias and config.qkv_bias and config.mlp_bias
    assert not parse(MISTRAL, attention_bias=True).attention_bias
    assert not parse(QWEN3, mlp_bias=True).mlp_bias and parse(QWEN3, attention_bias=True).attention_bias


def test_dtype_is_read_under_both_names_without_torchs_prefix():
    assert parse(without(LLAMA, "torch_dtype"), dtype="float32").dtype == "float32"
    assert parse(LLAMA, torch_dtype="torch.float16").dtype == "float16"
    assert parse(without(LLAMA, "torch_dtype")).dtype is None


# ---- layer types and windows


def test_layer_types_in_the_file_win_over_the_pattern():
    explicit = ["full_attention", "sliding_attention"] * 13
    assert parse(GEMMA3_1B, layer_types=explicit).layer_types == tuple(explicit)


def test_without_a_pattern_no_layer_types_are_made():
    assert parse(LLAMA).layer_types is None
    assert parse(LLAMA, sliding_window_pattern=2).layer_types is None


@pytest.mark.parametrize("name", ["sliding_window_pattern", "_sliding_window_pattern"])
def test_pattern_is_read_under_both_names(name):
    raw = without(GEMMA3_1B, "sliding_window_pattern")
    assert parse(raw, **{name: 3}).layer_types[:4] == (*2 * ("sliding_attention",), "full_attention", "sliding_attention")


def test_mistral_slides_in_every_layer_unless_its_window_is_null():
    assert parse(MISTRAL).layer_types == 32 * ("sliding_attention",)
    assert parse(MISTRAL, sliding_window=None).sliding_window is None
    assert parse(MISTRAL, sliding_window=None).layer_types is None


def test_qwen_slides_past_max_window_layers_only_if_asked_to():
    assert parse(QWEN2).sliding_window is None
    config = parse(QWEN2, use_sliding_window=True)
    assert config.sliding_window == 32768
    assert config.layer_types == 21 * ("full_attention",) + 3 * ("sliding_attention",)
    assert parse(QWEN2, use_sliding_window=True, max_window_layers=0).layer_types == 24 * ("sliding_attention",)


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


# ---- token ids


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 2}, None, (2,)),
        ({"eos_token_id": [3, 4]}, {"eos_token_id": [4, 5]}, (4, 5, 3)),
        ({"eos_token_id": 2}, {"eos_token_id": 9}, (9, 2)),
        ({"eos_token_id": None}, None, ()),
        ({"eos_token_id": None}, {"eos_token_id": 9}, (9,)),
        ({}, {"eos_token_id": [9]}, (9,)),
        ({}, None, (2,)),  # LlamaConfig's default, only where nobody says anything
        ({}, {"temperature": 0.6}, (2,)),
    ],
)
def test_end_tokens_are_those_of_both_files_generation_first(config, generation, expected):
    assert parse({**without(LLAMA, "eos_token_id"), **config}, generation).eos_token_ids == expected


@pytest.mark.parametrize("wrong", [-1, "2", True, [1, "2"], 1.5, {"a": 1}])
def test_wrong_token_ids_are_refused_by_name(wrong):
    with pytest.raises(CheckpointError, match="eos_token_id.*token id"):
        parse(LLAMA, eos_token_id=wrong)
    with pytest.raises(CheckpointError, match="generation_config.json.*eos_token_id"):
        parse(LLAMA, {"eos_token_id": wrong})


# ---- refusals


@pytest.mark.parametrize("model_type", ["mamba", "gpt_oss", "lama", "mistral3"])
def test_unsupported_model_type_lists_the_supported_ones(model_type):
    with pytest.raises(UnsupportedError, match=f"{model_type}.*gemma3, gemma3_text, gpt2, llama, mistral, qwen2, qwen3"):
        parse(LLAMA, model_type=model_type)


def test_multimodal_config_of_another_family_is_refused_though_its_text_part_is_known():
    with pytest.raises(UnsupportedError, match="mistral3"):
        parse({"model_type": "mistral3", "text_config": MISTRAL})
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


@pytest.mark.parametrize(
    ("raw", "field", "value"),
    [
        (GEMMA3_1B, "attn_logit_softcapping", 50.0),
        (GEMMA3_1B, "final_logit_softcapping", 30.0),
        (GEMMA3_1B, "use_bidirectional_attention", True),
        (LLAMA, "partial_rotary_factor", 0.5),
        (LLAMA, "no_rope_layers", [1, 1, 0]),
        (LLAMA, "attention_multiplier", 0.015),
        (LLAMA, "residual_multiplier", 0.22),
        (LLAMA, "logits_scaling", 8.0),
        (LLAMA, "embedding_multiplier", 12.0),
        (LLAMA, "altup_num_inputs", 4),
        (LLAMA, "num_local_experts", 8),
        (QWEN3, "num_experts", 128),
        (GPT2, "scale_attn_by_inverse_layer_idx", True),
        (GPT2, "scale_attn_weights", False),
        (GPT2, "add_cross_attention", True),
    ],
)
def test_settings_that_change_the_mathematics_are_refused_by_name(raw, field, value):
    with pytest.raises(UnsupportedError, match=f"'{field}'"):
        parse(raw, **{field: value})


@pytest.mark.parametrize(("raw", "field"), [(LLAMA, "hidden_act"), (GPT2, "activation_function")])
def test_unknown_activations_are_refused_with_the_known_ones(raw, field):
    with pytest.raises(UnsupportedError, match="activation 'relu2' is not supported; known: silu, "):
        parse(raw, **{field: "relu2"})


@pytest.mark.parametrize(
    ("raw", "field", "value"),
    [
        (LLAMA, "partial_rotary_factor", 1.0),
        (LLAMA, "logits_scaling", 1),
        (QWEN3, "num_experts", 0),
        (GPT2, "reorder_and_upcast_attn", True),
        (GPT2, "scale_attn_weights", True),
        (LLAMA, "hidden_act", "gelu"),
    ],
)
def test_neutral_values_of_such_settings_are_fine(raw, field, value):
    parse(raw, **{field: value})


@pytest.mark.parametrize("raw", [LLAMA, GEMMA3_4B])
def test_quantised_checkpoints_are_refused_by_their_method(raw):
    with pytest.raises(UnsupportedError, match="quant_method 'gptq'"):
        parse(raw, quantization_config={"quant_method": "gptq", "bits": 4})


@pytest.mark.parametrize(
    ("field", "value"),
    [
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
    ],
)
def test_wrong_types_and_sizes_are_refused_by_name(field, value):
    with pytest.raises(CheckpointError, match=f"config.json.*{field}") as caught:
        parse(LLAMA, **{field: value})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(CheckpointError, match="num_attention_heads 32.*num_key_value_heads 5"):
        parse(LLAMA, num_key_value_heads=5)
    with pytest.raises(CheckpointError, match="hidden_size 2050.*num_attention_heads 32"):
        parse(without(LLAMA, "head_dim"), hidden_size=2050)
    with pytest.raises(CheckpointError, match="head_dim 63 is odd"):
        parse(LLAMA, head_dim=63)


# ---- files


def write(folder: Path, raw: object, name: str = "config.json") -> Path:
    path = folder / name
    path.write_text(raw if isinstance(raw, str) else json.dumps(raw))
    return path


@pytest.mark.parametrize("as_type", [str, Path])
def test_a_folder_or_its_config_json_can_be_named_as_text_or_path(tmp_path, as_type):
    file = write(tmp_path, LLAMA)
    assert load_model_config(as_type(file)) == load_model_config(as_type(tmp_path)) == parse(LLAMA)


def test_generation_config_beside_it_adds_its_end_tokens(tmp_path):
    write(tmp_path, LLAMA)
    write(tmp_path, {"eos_token_id": [5, 128001]}, "generation_config.json")
    assert load_model_config(tmp_path).eos_token_ids == (5, 128001, 128008, 128009)


@pytest.mark.parametrize("name", ["llama3", "qwen3", "gemma3", "gpt2"])
def test_configs_that_transformers_5_saved_are_read(name):
    config = load_model_config(TINY / name)
    raw = json.loads((TINY / name / "config.json").read_text())
    assert_agrees(config, raw)


def test_a_missing_file_says_what_to_give(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match="config.json.*no such file; give"):
        load_model_config(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match="no such file"):
        load_model_config(tmp_path / "nowhere" / "config.json")


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "",
        "[]",
        "null",
        '"text"',
        "[" * 100_000,
        json.dumps(LLAMA).replace("1e-05", "NaN"),
        json.dumps(LLAMA).replace("1e-05", "Infinity"),
        json.dumps(LLAMA).replace("1e-05", "1e999"),
        json.dumps(LLAMA).replace("2048", "9" * 5000),
    ],
)
def test_damaged_json_is_one_clear_error(tmp_path, text):
    write(tmp_path, text)
    with pytest.raises(CheckpointError, match="config.json") as caught:
        load_model_config(tmp_path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_bytes_that_are_not_text_are_one_clear_error(tmp_path):
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(CheckpointError, match="config.json"):
        load_model_config(tmp_path)


@pytest.mark.parametrize("name", sorted(FAMILIES))
@pytest.mark.parametrize("value", [None, True, -1, 0, 2**70, 1.5, "x", [], {}, [None], float("nan")], ids=repr)
def test_no_value_of_any_field_ends_in_anything_but_a_config_or_a_clear_error(name, value):
    for field in [*FAMILIES[name], "rope_parameters", "layer_types", "text_config", "quantization_config"]:
        try:
            parse(FAMILIES[name], **{field: value})
        except GraphcoreError as error:
            assert "\n" not in str(error)
