"""GGUF metadata to ModelConfig: files made by llama.cpp's converter against the config.json they were made from."""

import contextlib
import json
from dataclasses import replace
from itertools import product as every_pair
from pathlib import Path

import numpy
import pytest
from support.cases import in_case

from graphcore.arch.config_from_gguf import config_from_gguf
from graphcore.arch.config_from_json import ModelConfig, load_model_config
from graphcore.arch.families.gemma import SoftCaps
from graphcore.arch.registry import GGUF_ARCHITECTURES
from graphcore.errors import CheckpointError, GraphcoreError, UnsupportedError

TINY = Path(__file__).parents[2] / "golden" / "tiny"

# What SmolLM2-135M-Instruct's GGUF says: no key_length, no rope scaling, a tokenizer.
SMOLLM2 = {
    "general.architecture": "llama",
    "llama.block_count": 30,
    "llama.context_length": 8192,
    "llama.embedding_length": 576,
    "llama.feed_forward_length": 1536,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.rope.freq_base": 100000.0,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "general.file_type": 3,
    "llama.vocab_size": 49152,
    "llama.rope.dimension_count": 64,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}
# What Gemma 3 270M's GGUF says: no local theta, no vocab_size, no rope.dimension_count.
GEMMA3 = {
    "general.architecture": "gemma3",
    "gemma3.context_length": 32768,
    "gemma3.embedding_length": 640,
    "gemma3.block_count": 18,
    "gemma3.feed_forward_length": 2048,
    "gemma3.attention.head_count": 4,
    "gemma3.attention.layer_norm_rms_epsilon": 9.999999974752427e-07,
    "gemma3.attention.key_length": 256,
    "gemma3.attention.value_length": 256,
    "gemma3.rope.freq_base": 1000000.0,
    "gemma3.attention.sliding_window": 512,
    "gemma3.attention.head_count_kv": 1,
    "tokenizer.ggml.tokens": ["t"] * 200,
    "tokenizer.ggml.bos_token_id": 2,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.eot_token_id": 106,
}
GPT2 = {
    "general.architecture": "gpt2",
    "gpt2.block_count": 12,
    "gpt2.context_length": 1024,
    "gpt2.embedding_length": 768,
    "gpt2.feed_forward_length": 3072,
    "gpt2.attention.head_count": 12,
    "gpt2.attention.layer_norm_epsilon": 9.999999747378752e-06,
    "gpt2.vocab_size": 50257,
}

# A Gemma 2 9B of the first converters: no window, no caps.
GEMMA2 = {
    "general.architecture": "gemma2",
    "gemma2.context_length": 8192,
    "gemma2.embedding_length": 3584,
    "gemma2.block_count": 42,
    "gemma2.feed_forward_length": 14336,
    "gemma2.attention.head_count": 16,
    "gemma2.attention.head_count_kv": 8,
    "gemma2.attention.layer_norm_rms_epsilon": 9.999999974752427e-07,
    "gemma2.attention.key_length": 256,
    "gemma2.attention.value_length": 256,
    "gemma2.vocab_size": 256000,
}

# A Phi 4 mini as the converter writes it: no head dim, and the width that rotates.
PHI4_MINI = {
    "general.architecture": "phi3",
    "phi3.context_length": 131072,
    "phi3.rope.scaling.original_context_length": 4096,
    "phi3.embedding_length": 3072,
    "phi3.feed_forward_length": 8192,
    "phi3.block_count": 32,
    "phi3.attention.head_count": 24,
    "phi3.attention.head_count_kv": 8,
    "phi3.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "phi3.rope.dimension_count": 96,
    "phi3.rope.freq_base": 10000.0,
    "phi3.rope.scaling.attn_factor": 1.1902381,
    "phi3.attention.sliding_window": 262144,
    "phi3.vocab_size": 200064,
}

# What microsoft/bitnet-b1.58-2B-4T-gguf says: no key_length, no tokenizer.ggml.pre.
BITNET = {
    "general.architecture": "bitnet-b1.58",
    "bitnet-b1.58.vocab_size": 128256,
    "bitnet-b1.58.context_length": 4096,
    "bitnet-b1.58.embedding_length": 2560,
    "bitnet-b1.58.block_count": 30,
    "bitnet-b1.58.feed_forward_length": 6912,
    "bitnet-b1.58.rope.dimension_count": 128,
    "bitnet-b1.58.attention.head_count": 20,
    "bitnet-b1.58.attention.head_count_kv": 5,
    "bitnet-b1.58.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "bitnet-b1.58.rope.freq_base": 500000.0,
    "general.file_type": 40,
    "tokenizer.ggml.bos_token_id": 128000,
    "tokenizer.ggml.eos_token_id": 128001,
}


def parse(
    metadata: dict, shapes: dict | None = None, freqs: list[float] | None = None, **changes: object
) -> ModelConfig:
    """Parse with keys added under the architecture's prefix; `__` stands for a dot, None removes."""
    prefix = metadata["general.architecture"]
    changed = {f"{prefix}.{key.replace('__', '.')}": value for key, value in changes.items()}
    merged = {key: value for key, value in {**metadata, **changed}.items() if value is not None}
    return config_from_gguf(merged, shapes or {}, freqs, "model.gguf")


def read_with_gguf_package(path: Path) -> ModelConfig:
    import gguf

    reader = gguf.GGUFReader(path)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    shapes = {tensor.name: tuple(int(size) for size in reversed(tensor.shape)) for tensor in reader.tensors}
    freqs = [tensor.data.tolist() for tensor in reader.tensors if tensor.name == "rope_freqs.weight"]
    return config_from_gguf(metadata, shapes, freqs[0] if freqs else None, str(path))


@pytest.mark.parametrize("name", ["llama3", "qwen3", "gemma3", "gpt2"])
def test_converted_models_say_what_their_config_json_says(name):
    ours, theirs = read_with_gguf_package(TINY / f"{name}.gguf"), load_model_config(TINY / name)
    assert ours.norm_eps == float(numpy.float32(theirs.norm_eps))  # as stored, not rounded back
    same = replace(theirs, dtype=None, norm_eps=ours.norm_eps, bos_token_id=None, eos_token_ids=())
    if name == "llama3":
        same = replace(same, rope=replace(theirs.rope, scaling=None, freq_divisors=ours.rope.freq_divisors))
    if name == "qwen3":
        same = replace(same, attention=replace(same.attention, layer_types=None))  # all full, said or unsaid
    assert ours == same


def test_rope_freqs_divide_to_the_frequencies_of_transformers():
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    raw = json.loads((TINY / "llama3" / "config.json").read_text())
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**raw), "cpu")
    config = read_with_gguf_package(TINY / "llama3.gguf")
    plain = config.rope.theta ** -(numpy.arange(0, config.attention.head_dim, 2) / config.attention.head_dim)
    # rope_freqs are float32, and so is transformers' result: a few units in the last place.
    numpy.testing.assert_allclose(plain / numpy.array(config.rope.freq_divisors), theirs.numpy(), rtol=5e-7)


def test_smollm2_takes_its_head_dim_from_the_rotated_width():
    config = parse(SMOLLM2)
    assert (config.model_type, config.attention.head_dim, config.rope.theta) == ("llama", 64, 1e5)
    assert (config.attention.num_attention_heads, config.attention.num_key_value_heads) == (9, 3)
    assert config.vocab_size == 49152
    assert (config.bos_token_id, config.eos_token_ids, config.tie_word_embeddings) == (1, (2,), True)
    assert parse(SMOLLM2, rope__dimension_count=None).attention.head_dim == 576 // 9
    assert parse(SMOLLM2, attention__key_length=32, rope__dimension_count=32).attention.head_dim == 32


def test_gemma3_gets_what_its_file_does_not_say():
    config = parse(GEMMA3)
    assert (config.rope.theta, config.rope.local_theta, config.rope.scaling) == (1e6, 1e4, None)
    assert (config.attention.sliding_window, config.attention.sliding_window_pattern) == (512, 6)
    assert config.attention.query_pre_attn_scalar == 256.0
    assert [layer for layer, kind in enumerate(config.attention.layer_types) if kind == "full_attention"] == [5, 11, 17]
    assert (config.hidden_act, config.vocab_size, config.eos_token_ids) == ("gelu_pytorch_tanh", 200, (1, 106))
    assert parse(GEMMA3, rope__freq_base=None).rope.theta == 1e6
    assert parse(GEMMA3, rope__freq_base_swa=2e4).rope.local_theta == 2e4


def test_gemma3_27b_scales_its_queries_by_hidden_over_heads():
    sizes = {"block_count": 62, "embedding_length": 5376, "attention__head_count": 32, "attention__head_count_kv": 16}
    narrow = {"attention__key_length": 128, "attention__value_length": 128}
    # As google/gemma-3-27b-it's config.json.
    assert parse(GEMMA3, **sizes, **narrow).attention.query_pre_attn_scalar == 168.0
    assert parse(GEMMA3, **{**sizes, "block_count": 48}, **narrow).attention.query_pre_attn_scalar == 128.0


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 8.0}, {"rope_type": "linear", "factor": 8.0}),
        ({"rope__scaling__factor": 8.0}, {"rope_type": "linear", "factor": 8.0}),
        ({"rope__scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 8.0}, None),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 0.0}, None),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 1.0}, None),
    ],
)
def test_linear_scaling_is_read_as_llama_cpp_does(keys, expected):
    assert parse(GEMMA3, **keys).rope.scaling == expected


def test_tying_and_biases_are_read_from_the_tensors():
    shapes = {"output.weight": (49152, 576), "blk.0.attn_q.bias": (576,)}
    config = parse(SMOLLM2, shapes)
    assert (config.tie_word_embeddings, config.attention.qkv_bias, config.attention.output_bias) == (False, True, False)
    assert parse(SMOLLM2, {"blk.0.attn_output.bias": (576,)}).attention.output_bias
    assert parse(SMOLLM2, {"blk.0.ffn_gate.bias": (1536,)}).mlp_bias


def test_qwen2_has_biases_on_q_k_and_v_only():
    metadata = {key.replace("llama.", "qwen2."): value for key, value in SMOLLM2.items()}
    config = parse({**metadata, "general.architecture": "qwen2"})
    assert (config.model_type, config.attention.qkv_bias, config.attention.output_bias) == ("qwen2", True, False)


def test_the_embedding_says_how_many_tokens_there_are():
    assert parse(SMOLLM2, {"token_embd.weight": (50000, 576)}).vocab_size == 50000
    assert parse(SMOLLM2, {"token_embd.weight": ()}).vocab_size == 49152  # whose shape is refused with the weights
    assert parse(GPT2, {"token_embd.weight": (50000, 768)}).vocab_size == 50257  # which its tensors are checked against
    assert parse({**SMOLLM2, "tokenizer.ggml.tokens": ["a"] * 7}, vocab_size=None).vocab_size == 7
    with pytest.raises(CheckpointError, match="vocabulary is unknown"):
        parse(SMOLLM2, vocab_size=None)


def test_the_official_bitnet_file_is_the_2b_4t():
    config = parse(BITNET)
    assert (config.model_type, config.hidden_act, config.ternary) == ("bitnet", "relu2", "multiplied")
    assert (config.max_position_embeddings, config.attention.head_dim, config.rope.theta) == (4096, 128, 5e5)
    assert (config.attention.num_attention_heads, config.attention.num_key_value_heads) == (20, 5)
    assert config.num_hidden_layers == 30
    assert config.tie_word_embeddings
    assert parse(BITNET, rope__dimension_count=None).attention.head_dim == 2560 // 20


def test_bitnets_first_upload_has_another_name_and_a_head():
    renamed = {key.replace("bitnet-b1.58", "bitnet-25"): value for key, value in BITNET.items()}
    config = parse({**renamed, "general.architecture": "bitnet-25"}, {"output.weight": (128256, 2560)})
    assert config == replace(parse(BITNET), tie_word_embeddings=False)


def test_the_architecture_bitnet_is_the_one_with_silu():
    renamed = {key.replace("bitnet-b1.58", "bitnet"): value for key, value in BITNET.items()}
    config = parse({**renamed, "general.architecture": "bitnet"})
    assert config == replace(parse(BITNET), hidden_act="silu")


@pytest.mark.parametrize(("has_ternary", "scaling"), [(False, None), (True, "divided")])
def test_llama_files_with_i2_s_tensors_have_int8_activations(has_ternary, scaling):
    assert config_from_gguf(SMOLLM2, {}, None, "model.gguf", has_ternary).ternary == scaling


def test_gpt_is_an_alias_of_gpt2():
    aliased = {key.replace("gpt2.", "gpt."): value for key, value in GPT2.items()}
    config = parse({**aliased, "general.architecture": "gpt"})
    assert config == parse(GPT2)
    assert (config.model_type, config.hidden_act, config.attention.head_dim) == ("gpt2", "gelu_new", 64)
    assert config.attention.output_bias
    assert config.attention.qkv_bias
    assert config.mlp_bias


def test_per_layer_arrays_of_one_value_are_that_value():
    assert parse(SMOLLM2, attention__head_count_kv=[3] * 30).attention.num_key_value_heads == 3
    with pytest.raises(UnsupportedError, match=r"llama.attention.head_count_kv differs by layer"):
        parse(SMOLLM2, attention__head_count_kv=[3, 9] * 15)


def test_missing_kv_heads_are_as_many_as_query_heads():
    assert parse(SMOLLM2, attention__head_count_kv=None).attention.num_key_value_heads == 9


@pytest.mark.parametrize("architecture", ["gptoss", "bitnet-b2", "gemma-1", "qwen2moe"])
def test_unknown_architecture_lists_the_known_ones(architecture):
    assert {"bitnet", "bitnet-25", "gpt-oss", "llama"} <= GGUF_ARCHITECTURES.keys()
    known = ", ".join(sorted(GGUF_ARCHITECTURES))
    with pytest.raises(UnsupportedError, match=f"{architecture}.*known: {known}"):
        parse({**SMOLLM2, "general.architecture": architecture})


def test_missing_keys_are_listed_all_at_once():
    with pytest.raises(CheckpointError) as caught:
        config_from_gguf({"general.architecture": "llama", "llama.block_count": 2}, {}, None, "model.gguf")
    for key in ("context_length", "embedding_length", "feed_forward_length", "layer_norm_rms_epsilon"):
        assert f"llama.{key}" in str(caught.value).replace("attention.", "")
    assert "block_count" not in str(caught.value)
    with pytest.raises(CheckpointError, match=r"general.architecture"):
        config_from_gguf({}, {}, None, "model.gguf")


def test_keys_that_change_the_mathematics_are_refused_by_name():
    for metadata, key, value in [
        (SMOLLM2, "expert_group_count", 8),
        (SMOLLM2, "attention.scale", 0.5),
        (SMOLLM2, "logit_scale", 0.25),
        (SMOLLM2, "residual_scale", 0.2),
        (SMOLLM2, "embedding_scale", 12.0),
        (SMOLLM2, "attention.causal", False),
        (SMOLLM2, "attention.value_length", 32),
        (GEMMA3, "final_logit_softcapping", 30.0),
        (GEMMA3, "attn_logit_softcapping", 50.0),
        (GEMMA3, "rope.dimension_count", 128),
        (GEMMA3, "rope.scaling.type", "longrope"),
        (GEMMA3, "rope.scaling.attn_factor", 1.2),
    ]:
        with in_case(metadata, key, value), pytest.raises(UnsupportedError, match=key.replace(".", r"\.")):
            parse(metadata, **{key.replace(".", "__"): value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("embedding_length", 0),
        ("embedding_length", 2**60),
        ("embedding_length", "576"),
        ("embedding_length", True),
        ("block_count", 10**6),
        ("block_count", -1),
        ("attention.layer_norm_rms_epsilon", float("nan")),
        ("attention.layer_norm_rms_epsilon", 0.0),
        ("rope.freq_base", -1.0),
        ("rope.scaling.factor", -2.0),
        ("rope.scaling.type", 2),
        ("attention.head_count_kv", [3] * 29),
        ("attention.head_count_kv", [3]),
        ("feed_forward_length", [1536] * 31),
        ("block_count", [30] * 30),
    ],
)
def test_wrong_values_are_refused_by_name(key, value):
    with pytest.raises(CheckpointError, match=f"model.gguf: .*llama.{key}") as caught:
        parse(SMOLLM2, **{key.replace(".", "__"): value})
    assert "\n" not in str(caught.value)


def test_a_gemma2_file_has_llama_cpps_window_and_caps_unless_it_states_them():
    old = parse(GEMMA2)
    assert (old.sliding_window, old.layer_types[:3]) == (
        4096,
        ["sliding_attention", "full_attention", "sliding_attention"],
    )
    assert (old.own, old.query_pre_attn_scalar, old.hidden_act) == (SoftCaps(50.0, 30.0), 256.0, "gelu_pytorch_tanh")
    assert parse(GEMMA2, attention__sliding_window_pattern=3).layer_types[1:3] == [
        "sliding_attention",
        "full_attention",
    ]
    stated = parse(GEMMA2, attention__sliding_window=512, attn_logit_softcapping=0.0, final_logit_softcapping=7.0)
    assert (stated.sliding_window, stated.own) == (512, SoftCaps(0.0, 7.0))
    with pytest.raises(CheckpointError, match=r"'gemma2\.attn_logit_softcapping' must be 0 or above, found -1"):
        parse(GEMMA2, attn_logit_softcapping=-1.0)


def test_the_query_scalar_of_gemma2_27b_is_hidden_over_heads():
    sizes = {"attention__key_length": 128, "attention__value_length": 128, "attention__head_count": 32}
    assert parse(GEMMA2, block_count=46, embedding_length=4608, **sizes).query_pre_attn_scalar == 144.0


def phi4_mini(short: int = 48, long: int = 48, **changes: object) -> ModelConfig:
    keys = {f"phi3.{key.replace('__', '.')}": value for key, value in changes.items()}
    return config_from_gguf({**PHI4_MINI, **keys}, {}, None, "model.gguf", rope_factors=([1.0] * short, [2.0] * long))


def test_a_phi3_file_has_heads_that_rotate_in_part_and_longrope():
    config = phi4_mini()
    assert (config.head_dim, config.rope.width, config.sliding_window) == (128, 96, 262_144)
    assert config.rope.scaling == {
        "rope_type": "longrope",
        "original_max_position_embeddings": 4096,
        "attention_factor": 1.1902381,
    }
    assert (config.rope.short_factors, config.rope.long_factors) == ((1.0,) * 48, (2.0,) * 48)
    assert parse(PHI4_MINI, rope__scaling__attn_factor=None).rope.scaling is None
    assert phi4_mini(rope__scaling__attn_factor=0.0).rope.scaling["attention_factor"] == 1.0


def test_longrope_that_is_not_whole_is_refused_by_name():
    with pytest.raises(UnsupportedError, match=r"attn_factor is 1\.1902381, but the file has no rope_factors_long"):
        parse(PHI4_MINI)
    with pytest.raises(CheckpointError, match=r"rope_factors_short\.weight has 64 values, .* 96 features need 48"):
        phi4_mini(short=64)
    with pytest.raises(UnsupportedError, match=r"rope\.scaling\.factor beside rope_factors_long is not supported"):
        phi4_mini(rope__scaling__factor=8.0)
    with pytest.raises(UnsupportedError, match=r"rope\.scaling\.type 'yarn' is not supported"):
        phi4_mini(rope__scaling__type="yarn")


def test_a_stablelm_file_is_told_from_a_12b_by_its_tensors():
    """llama.cpp's rule (stablelm.cpp); converters state a parallel residual for older sequential models, too."""
    keys = {key.replace("phi3", "stablelm"): value for key, value in PHI4_MINI.items() if "scaling" not in key}
    keys |= {"general.architecture": "stablelm", "stablelm.attention.layer_norm_epsilon": 1e-5}
    keys["stablelm.use_parallel_residual"] = True
    norms = {"blk.0.attn_norm.weight": (3072,), "blk.0.ffn_norm.weight": (3072,), "blk.0.attn_q.bias": (3072,)}
    config = parse(keys, {**norms, "token_embd.weight": (200064, 3072)})
    assert (config.rope.width, config.attention.qkv_bias, config.attention.output_bias) == (96, True, False)
    with pytest.raises(UnsupportedError, match=r"has no blk\.0\.ffn_norm\.weight"):
        parse(keys, {"blk.0.attn_norm.weight": (3072,)})
    with pytest.raises(UnsupportedError, match=r"has blk\.0\.attn_q_norm\.weight"):
        parse(keys, {**norms, "blk.0.attn_q_norm.weight": (24, 128)})


def test_yarn_on_a_base_of_one_is_refused():
    with pytest.raises(CheckpointError, match=r"'llama\.rope\.freq_base' must be other than 1 with rope_type 'yarn'"):
        parse(SMOLLM2, rope__freq_base=1.0, rope__scaling__type="yarn", rope__scaling__factor=4.0)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(CheckpointError, match="num_attention_heads 9 is not a multiple of num_key_value_heads 4"):
        parse(SMOLLM2, attention__head_count_kv=4)


def test_a_query_weight_of_another_width_is_refused():
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q\.weight has 576 rows, 9 heads of 32"):
        parse(SMOLLM2, {"blk.0.attn_q.weight": (576, 576)}, rope__dimension_count=32)


@pytest.mark.parametrize("freqs", [[1.0] * 31, [1.0] * 31 + [0.0], [1.0] * 31 + [float("nan")], [1.0] * 31 + [-1.0]])
def test_wrong_rope_freqs_are_refused(freqs):
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight has"):
        parse(SMOLLM2, freqs=freqs)
    assert parse(SMOLLM2, freqs=[1.0] * 32).rope.freq_divisors == (1.0,) * 32


def test_no_value_of_any_key_ends_in_anything_but_a_config_or_a_clear_error():
    for metadata, value in every_pair(
        [SMOLLM2, GEMMA2, GEMMA3, GPT2, BITNET], [True, -1, 0, 2**64 - 1, 1.5, "x", [], [0], [-1, 2], float("inf")]
    ):
        with in_case(metadata, value):
            for key in metadata:
                with contextlib.suppress(GraphcoreError):
                    config_from_gguf({**metadata, key: value}, {}, None, "model.gguf")


def test_a_window_by_layer_is_refused_where_the_type_has_none():
    with pytest.raises(UnsupportedError, match=r"llama.attention.sliding_window_pattern is not supported for mistral"):
        parse(SMOLLM2, attention__sliding_window=4096, attention__sliding_window_pattern=[True, False])


def test_a_special_token_id_of_no_token_counts_as_absent_with_a_note():
    """llama.cpp's rule: "bad special token ... using default id" (llama-vocab.cpp)."""
    for value, key in every_pair(
        [2**32 - 1, -1, 49152, 10**30, True, "</s>"],
        ["bos", "eos", "eot", "eom", "unknown", "padding", "mask", "fim_pre"],
    ):
        with in_case(value, key):
            name = f"tokenizer.ggml.{key}_token_id"
            config, absent = (parse({**SMOLLM2, name: one}) for one in (value, None))
            assert config == absent
            assert config.notes == (
                f"model.gguf: ignored special token ids that are not in the vocabulary: {name} {value!r}",
            )
            assert absent.notes == ()


def test_a_token_id_is_compared_with_the_tokens_where_the_embedding_has_more_rows():
    config = parse({**SMOLLM2, "tokenizer.ggml.tokens": ["t"] * 3, "tokenizer.ggml.eos_token_id": 3})
    assert config.eos_token_ids == ()
    assert len(config.notes) == 1
