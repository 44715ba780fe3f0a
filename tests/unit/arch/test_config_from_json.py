"""config.json to ModelConfig: every field, name and nesting, and the files themselves."""

import copy
import json
from itertools import product as every_pair
from pathlib import Path

import pytest
from support.cases import in_case
from support.hub_configs import FAMILIES, GEMMA3_1B, GEMMA3_4B, GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, parse, without

from graphcore.arch.config_from_json import load_model_config, parse_model_config
from graphcore.errors import CheckpointError, CheckpointNotFoundError


def test_llama_config_fills_every_field():
    config = parse(LLAMA)
    assert (config.model_type, config.hidden_size, config.intermediate_size) == ("llama", 2048, 8192)
    attention = config.attention
    assert (config.num_hidden_layers, attention.num_attention_heads, attention.num_key_value_heads) == (16, 32, 8)
    assert (config.vocab_size, config.max_position_embeddings, config.attention.head_dim) == (128256, 131072, 64)
    assert (config.norm_eps, config.rope.theta, config.hidden_act) == (1e-5, 500000.0, "silu")
    assert config.rope.scaling == LLAMA["rope_scaling"]
    assert (config.attention.output_bias, config.attention.qkv_bias, config.mlp_bias) == (False, False, False)
    assert (config.tie_word_embeddings, config.dtype, config.experts) == (True, "bfloat16", None)
    assert (config.bos_token_id, config.eos_token_ids) == (128000, (128001, 128008, 128009))
    assert config.rope.local_theta is None
    assert config.attention.query_pre_attn_scalar is None
    assert config.attention.sliding_window is None
    assert config.attention.sliding_window_pattern is None
    assert config.attention.layer_types is None


def test_qwen3_config_has_its_own_head_dim_and_no_window():
    config = parse(QWEN3)
    assert (config.attention.head_dim, config.rope.theta, config.norm_eps) == (128, 1e6, 1e-6)
    assert config.rope.scaling is None
    assert config.attention.sliding_window is None
    assert config.attention.layer_types is None
    assert config.eos_token_ids == (151645,)


def test_gemma3_config_resolves_its_window_pattern():
    config = parse(GEMMA3_1B)
    assert (config.hidden_act, config.attention.query_pre_attn_scalar) == ("gelu_pytorch_tanh", 256.0)
    assert (config.rope.theta, config.rope.local_theta) == (1e6, 1e4)
    assert (config.attention.sliding_window, config.attention.sliding_window_pattern) == (512, 6)
    full = [layer for layer, kind in enumerate(config.attention.layer_types) if kind == "full_attention"]
    assert full == [5, 11, 17, 23]
    assert len(config.attention.layer_types) == 26
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (1, 106)


def test_nested_gemma3_config_gets_what_the_class_defaults_say():
    config = parse(GEMMA3_4B)
    assert (config.model_type, config.hidden_size, config.num_hidden_layers) == ("gemma3_text", 2560, 34)
    attention = config.attention
    assert (attention.num_attention_heads, attention.num_key_value_heads, attention.head_dim) == (8, 4, 256)
    assert (config.vocab_size, config.max_position_embeddings) == (262208, 131072)
    assert (config.rope.theta, config.rope.local_theta) == (1e6, 1e4)
    assert config.rope.scaling == {"rope_type": "linear", "factor": 8.0}
    assert (config.attention.sliding_window, config.attention.layer_types.count("full_attention")) == (1024, 5)
    assert (config.eos_token_ids, config.dtype, config.tie_word_embeddings) == ((1, 106), "bfloat16", True)


def test_nested_config_takes_its_type_from_outside_if_it_has_none():
    raw = {**GEMMA3_4B, "text_config": without(GEMMA3_4B["text_config"], "model_type")}
    assert parse(raw) == parse(GEMMA3_4B)


def test_nested_config_is_tied_by_the_outer_flag():
    assert parse(GEMMA3_4B, tie_word_embeddings=False).tie_word_embeddings is False


def test_an_empty_text_config_of_a_text_model_counts_as_absent():
    assert parse(LLAMA, text_config={}) == parse(LLAMA)
    assert parse({**GEMMA3_4B, "text_config": {}}).model_type == "gemma3_text"


def test_gpt2_names_are_normalised():
    config = parse(GPT2)
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (768, 3072, 12)
    attention = config.attention
    assert (attention.num_attention_heads, attention.num_key_value_heads, attention.head_dim) == (12, 12, 64)
    assert (config.max_position_embeddings, config.hidden_act, config.norm_eps) == (1024, "gelu_new", 1e-5)
    assert config.rope is None
    assert config.attention.output_bias
    assert config.attention.qkv_bias
    assert config.mlp_bias
    assert config.tie_word_embeddings


def test_gpt2_context_is_n_ctx_where_n_positions_is_missing():
    assert parse(without(GPT2, "n_positions"), n_ctx=77).max_position_embeddings == 77
    assert parse(GPT2, n_inner=100).intermediate_size == 100


def test_qwen2_has_biases_on_q_k_and_v_only():
    config = parse(QWEN2)
    assert (config.attention.qkv_bias, config.attention.output_bias, config.mlp_bias) == (True, False, False)
    assert config.attention.head_dim == 64


def test_parsing_changes_nothing_in_its_input():
    for name in sorted(FAMILIES):
        with in_case(name):
            raw = copy.deepcopy(FAMILIES[name])
            generation = {"eos_token_id": [7]}
            parse_model_config(raw, "config.json", generation)
            assert raw == FAMILIES[name]
            assert generation == {"eos_token_id": [7]}


def test_unknown_fields_are_ignored():
    for name in sorted(FAMILIES):
        with in_case(name):
            assert parse(FAMILIES[name], some_new_field={"a": [1]}, pretraining_tp=2) == parse(FAMILIES[name])


@pytest.mark.parametrize("field", ["mlp_bias", "attention_bias", "tie_word_embeddings", "rope_theta", "rms_norm_eps"])
def test_json_null_is_the_default(field):
    absent, null = parse(without(LLAMA, field)), parse(LLAMA, **{field: None})
    assert absent == null


def test_null_kv_heads_are_as_many_as_query_heads_and_absent_ones_the_class_default():
    assert parse(QWEN3, num_key_value_heads=None).attention.num_key_value_heads == 16
    assert parse(without(QWEN3, "num_key_value_heads"), num_attention_heads=32).attention.num_key_value_heads == 32
    assert parse(without(MISTRAL, "num_key_value_heads")).attention.num_key_value_heads == 8
    assert parse(without(LLAMA, "num_key_value_heads")).attention.num_key_value_heads == 32


def test_head_dim_is_explicit_inferred_or_decoupled():
    assert parse(without(QWEN3, "head_dim"), num_attention_heads=32).attention.head_dim == 128 != 2048 // 32
    assert parse(LLAMA, head_dim=128).attention.head_dim == 128
    assert parse(without(LLAMA, "head_dim")).attention.head_dim == 64
    assert parse(GEMMA3_1B).attention.head_dim == 256 != 1152 // 4


def test_llama_biases_follow_their_flags_and_other_types_ignore_flags_their_class_lacks():
    config = parse(LLAMA, attention_bias=True, mlp_bias=True)
    assert config.attention.output_bias
    assert config.attention.qkv_bias
    assert config.mlp_bias
    assert not parse(MISTRAL, attention_bias=True).attention.output_bias
    assert not parse(QWEN3, mlp_bias=True).mlp_bias
    assert parse(QWEN3, attention_bias=True).attention.output_bias


def test_dtype_is_read_under_both_names_without_torchs_prefix():
    assert parse(without(LLAMA, "torch_dtype"), dtype="float32").dtype == "float32"
    assert parse(LLAMA, torch_dtype="torch.float16").dtype == "float16"
    assert parse(without(LLAMA, "torch_dtype")).dtype is None


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


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ()),
        ([], ()),
        ("2", (2,)),
        (2.0, (2,)),
        ([2, None], (2,)),
        (["2", 3.0, None, 4], (2, 3, 4)),
    ],
    ids=str,
)
def test_token_ids_that_can_be_understood_are_taken_without_a_note(value, expected):
    for config in (parse(LLAMA, eos_token_id=value), parse(LLAMA, {"eos_token_id": value}, eos_token_id=None)):
        assert (config.eos_token_ids, config.notes) == (expected, ())


def test_token_ids_that_are_none_count_as_absent_with_one_note():
    for (value, expected), name in every_pair(
        [
            (-1, ()),
            (2**32 - 1, ()),
            (10**400, ()),
            (LLAMA["vocab_size"], ()),
            ([2, -1], (2,)),
            (True, ()),
            (1.5, ()),
            (float("nan"), ()),
            ("</s>", ()),
            ("", ()),
            ({"a": 1}, ()),
            ([[2], 3], (3,)),
            (["9" * 5000, 3], (3,)),
        ],
        ["bos_token_id", "eos_token_id"],
    ):
        with in_case(value, expected, name):
            stated = parse(LLAMA, **{name: value})
            beside = parse(LLAMA, {name: value}, **{name: None})
            for config, file in ((stated, "config.json"), (beside, "generation_config.json beside config.json")):
                found = config.eos_token_ids if name == "eos_token_id" else (config.bos_token_id,)
                assert found == (expected if name == "eos_token_id" else (next(iter(expected), None),))
                (note,) = config.notes
                assert note.startswith(f"{file}: ignored special token ids that are not in the vocabulary: {name} ")
                assert "\n" not in note
                assert len(note) < 300


def test_ids_of_no_token_are_named_in_one_note_together():
    config = parse(LLAMA, bos_token_id=-1, eos_token_id=[-1, -2, -3, 7], pad_token_id=-1)
    assert (config.bos_token_id, config.eos_token_ids) == (None, (7,))
    assert config.notes == (
        "config.json: ignored special token ids that are not in the vocabulary: bos_token_id -1, eos_token_id -1, "
        "eos_token_id -2, eos_token_id -3 and 1 more",
    )


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


def test_a_generation_config_that_means_nothing_is_ignored_with_a_note(tmp_path):
    write(tmp_path, LLAMA)
    file = write(tmp_path, "null", "generation_config.json")
    config = load_model_config(tmp_path)
    assert config == parse(LLAMA)
    assert config.notes == (f"{file}: holds None, not an object; it is ignored",)


def test_a_byte_order_mark_before_config_json_is_left_out(tmp_path):
    write(tmp_path, "\ufeff" + json.dumps(LLAMA))
    assert load_model_config(tmp_path) == parse(LLAMA)


def test_numbers_that_are_none_are_refused_only_where_they_are_read(tmp_path):
    """transformers writes Infinity for limits that are not there (time_step_limit) and reads it again."""
    write(tmp_path, json.dumps({**LLAMA, "time_step_limit": [0.0, float("inf")], "unknown": float("nan")}))
    assert load_model_config(tmp_path) == parse(LLAMA)
    for name in ("rms_norm_eps", "rope_theta", "hidden_size"):
        write(tmp_path, json.dumps({**LLAMA, name: float("nan")}))
        with pytest.raises(CheckpointError, match=rf"config.json: '{name}' must be .*, found nan"):
            load_model_config(tmp_path)


def test_a_missing_file_says_what_to_give(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match=r"config.json.*no such file; give"):
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
    with pytest.raises(CheckpointError, match=r"config.json") as caught:
        load_model_config(tmp_path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_bytes_that_are_not_text_are_one_clear_error(tmp_path):
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(CheckpointError, match=r"config.json"):
        load_model_config(tmp_path)
