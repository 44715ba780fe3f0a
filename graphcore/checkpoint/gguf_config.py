"""GGUF metadata to `ModelConfig`: what the keys say, and what only the architecture's name or the tensors say.

    general.architecture = a,  a.block_count, a.embedding_length, ...  ->  num_hidden_layers, hidden_size, ...
    not stored: the activation, Gemma's window pattern and query scalar, tying, biases; rope_freqs.weight is a tensor

Source: llama.cpp, gguf-py/gguf/constants.py (keys) and src/llama-model.cpp (defaults when a key is missing).
"""

import math
from collections.abc import Mapping, Sequence, Sized
from dataclasses import replace

from graphcore.checkpoint.config_fields import Fields
from graphcore.checkpoint.config_layers import MOST_LAYERS, layer_types_of_pattern
from graphcore.checkpoint.config_ternary import TernaryScaling
from graphcore.checkpoint.gguf_keys import GGUFKeys, gguf_keys
from graphcore.checkpoint.model_config import ModelConfig
from graphcore.checkpoint.quoted import quoted
from graphcore.checkpoint.rope_parameters import RopeScaling, read_scaling
from graphcore.errors import CheckpointError, UnsupportedError

REQUIRED = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count")
GEMMA3_27B_LAYERS = 62  # the one Gemma 3 whose query scalar is hidden / heads rather than head_dim
END_TOKENS = ("eos", "eot", "eom")  # end of sequence, of turn, of message: each ends generation


def config_from_gguf(
    metadata: Mapping[str, object],
    tensor_shapes: Mapping[str, tuple[int, ...]],
    rope_freqs: Sequence[float] | None,
    source: str,
    has_ternary: bool = False,
) -> ModelConfig:
    """Return the typed configuration of a GGUF file.

    Args:
        metadata: its key-value pairs, arrays as sequences; not changed.
        tensor_shapes: of every tensor, torch order (rows first).
        rope_freqs: [head_dim / 2] the values of rope_freqs.weight, if the file has it.
        source: the file, for messages.
        has_ternary: it holds i2_s tensors, whose models were trained with int8 activations whatever they are called.

    Raises:
        CheckpointError: a key is missing, of the wrong type, out of range, or contradicts another or a shape.
        UnsupportedError: the architecture, or a key that changes the mathematics, is not supported.
    """
    keys = gguf_keys(Fields(metadata, source))
    keys.refuse_unknown_mathematics()
    config = _sizes(keys, tensor_shapes).check(source)
    _check_heads(keys, config, tensor_shapes)
    config = _with_norm_and_tensors(config, keys, tensor_shapes)
    config = _with_rope(config, keys, rope_freqs)
    config = _with_window(config, keys)
    config = _with_experts(config, keys)
    config = replace(config, ternary=_ternary_scaling(keys, has_ternary))
    return _with_token_ids(config, keys).check(source)


def _eps_key(keys: GGUFKeys) -> str:
    return "attention.layer_norm_rms_epsilon" if keys.defaults.has_rope else "attention.layer_norm_epsilon"


def _sizes(keys: GGUFKeys, shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    keys.check_required((*REQUIRED, _eps_key(keys)))
    heads = keys.required_size("attention.head_count")
    num_layers = keys.required_size("block_count")
    if num_layers > MOST_LAYERS:
        raise keys.fields.wrong(keys.name("block_count"), num_layers, f"at most {MOST_LAYERS}")
    has_rope = keys.defaults.has_rope
    return ModelConfig(
        model_type=keys.defaults.model_type,
        hidden_size=keys.required_size("embedding_length"),
        intermediate_size=keys.required_size("feed_forward_length"),
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=keys.size("attention.head_count_kv") or heads,
        vocab_size=_vocab_size(keys, shapes),
        max_position_embeddings=keys.required_size("context_length"),
        head_dim=(keys.size("attention.key_length") or keys.size("rope.dimension_count")) if has_rope else None,
        hidden_act=keys.defaults.hidden_act,
    )


def _vocab_size(keys: GGUFKeys, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the embedding's rows; its key, or the number of tokens, where the file has no embedding.

    GPT-2's key comes first: its tensors are checked against what the file says of itself.
    """
    embedding = shapes.get("token_embd.weight")
    if embedding is not None and (keys.defaults.has_rope or not keys.size("vocab_size")):
        return embedding[0]
    tokens = keys.fields.raw.get("tokenizer.ggml.tokens")
    num_tokens = len(tokens) if isinstance(tokens, Sized) else 0
    vocab_size = keys.size("vocab_size") or num_tokens
    if vocab_size:
        return vocab_size
    raise CheckpointError(
        f"{keys.fields.source}: Missing required tensor: token_embd.weight; the file has no {keys.name('vocab_size')} "
        "or tokenizer.ggml.tokens either, so its vocabulary is unknown; fetch it again or convert it anew"
    )


def _check_heads(keys: GGUFKeys, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse heads that are rotated in part, whose values are narrower, or that the query weight contradicts."""
    head_dim, source = config.computed_head_dim, keys.fields.source
    for key in ("rope.dimension_count", "attention.value_length"):
        width = keys.size(key)
        if width is not None and width != head_dim:
            raise UnsupportedError(
                f"{source}: {keys.name(key)} is {width}, the head dim is {head_dim}; only equal ones are supported"
            )
    rows = config.num_attention_heads * head_dim
    query = shapes.get("blk.0.attn_q.weight")
    if query is not None and query[0] != rows:
        raise CheckpointError(
            f"{source}: blk.0.attn_q.weight has {query[0]} rows, {config.num_attention_heads} heads of {head_dim} "
            f"need {rows}; heads rotated in part are not supported"
        )


def _with_norm_and_tensors(config: ModelConfig, keys: GGUFKeys, shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    """Read the epsilon, and from the tensors' names what no key says: tying and biases."""
    eps = keys.fields.positive(keys.name(_eps_key(keys)))
    assert eps is not None, "the epsilon was checked to be there"
    is_biased = keys.defaults.bias_rule == "everywhere"
    attention_bias = is_biased or "blk.0.attn_output.bias" in shapes
    return replace(
        config,
        rms_norm_eps=eps,
        layer_norm_eps=None if keys.defaults.has_rope else eps,
        attention_bias=attention_bias,
        qkv_bias=attention_bias or keys.defaults.bias_rule == "qkv" or "blk.0.attn_q.bias" in shapes,
        mlp_bias=is_biased or "blk.0.ffn_gate.bias" in shapes,
        tie_word_embeddings="output.weight" not in shapes,
    )


def _with_rope(config: ModelConfig, keys: GGUFKeys, rope_freqs: Sequence[float] | None) -> ModelConfig:
    if not keys.defaults.has_rope:
        return config
    local = keys.fields.positive(keys.name("rope.freq_base_swa")) or keys.defaults.rope_local_base_freq
    return replace(
        config,
        rope_theta=keys.fields.positive(keys.name("rope.freq_base")) or keys.defaults.rope_theta,
        rope_scaling=_rope_scaling(keys),
        rope_local_base_freq=local if keys.defaults.rope_local_base_freq else None,
        rope_freq_divisors=None if rope_freqs is None else _divisors(rope_freqs, config, keys.fields.source),
    )


def _rope_scaling(keys: GGUFKeys) -> RopeScaling | None:
    """Return linear scaling or None; a factor without a type is linear, and a factor of 0 or 1 is none."""
    rope_type = keys.fields.text(keys.name("rope.scaling.type")) or "linear"
    if rope_type not in ("none", "linear", "yarn"):
        raise UnsupportedError(
            f"{keys.fields.source}: {keys.name('rope.scaling.type')} {quoted(rope_type)} is not supported; "
            "known: none, linear, yarn"
        )
    if rope_type == "yarn":
        return _yarn(keys)
    names = (keys.name("rope.scaling.factor"), keys.name("rope.scale_linear"))
    factor = keys.fields.number(*names) or 1.0
    if factor < 0:
        raise keys.fields.wrong(names[0], factor, "above zero")
    return None if rope_type == "none" or factor == 1.0 else {"rope_type": "linear", "factor": factor}


def _yarn(keys: GGUFKeys) -> RopeScaling | None:
    """Read the keys as a config.json's; whether the ramp is rounded is not stored, so the class default counts."""
    keys.check_required(("rope.scaling.factor", "rope.scaling.original_context_length"))
    names = {
        "factor": "factor",
        "original_context_length": "original_max_position_embeddings",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    }
    found = {name: keys.fields.raw.get(keys.name(f"rope.scaling.{key}")) for key, name in names.items()}
    where = f"{keys.fields.source}: {keys.name('rope.scaling')}"
    return read_scaling(Fields({"rope_type": "yarn", **found}, where), keys.defaults)


def _divisors(rope_freqs: Sequence[float], config: ModelConfig, source: str) -> tuple[float, ...]:
    divisors = tuple(float(divisor) for divisor in rope_freqs)
    if len(divisors) != config.computed_head_dim // 2:
        raise CheckpointError(
            f"{source}: rope_freqs.weight has {len(divisors)} values, heads of {config.computed_head_dim} need "
            f"{config.computed_head_dim // 2}; fetch the file again"
        )
    if not all(math.isfinite(divisor) and divisor > 0 for divisor in divisors):
        raise CheckpointError(f"{source}: rope_freqs.weight has values that are not above zero; fetch the file again")
    return divisors


def _with_window(config: ModelConfig, keys: GGUFKeys) -> ModelConfig:
    name = keys.name("attention.sliding_window")
    if keys.defaults.window_rule != "pattern":
        if keys.fields.raw.get(name) not in (None, 0):
            raise UnsupportedError(
                f"{keys.fields.source}: {name} is {quoted(keys.fields.raw[name])}, but the file does not say which "
                "layers slide; use the safetensors checkpoint"
            )
        return config
    keys.check_required(("attention.sliding_window",))
    pattern = keys.size("attention.sliding_window_pattern") or keys.defaults.sliding_window_pattern
    config = replace(
        config,
        sliding_window=keys.required_size("attention.sliding_window"),
        sliding_window_pattern=pattern,
        layer_types=layer_types_of_pattern(config.num_hidden_layers, pattern),
    )
    if keys.defaults.query_pre_attn_scalar is None:
        return config
    is_27b = config.num_hidden_layers == GEMMA3_27B_LAYERS
    scalar = config.hidden_size / config.num_attention_heads if is_27b else config.computed_head_dim
    return replace(config, query_pre_attn_scalar=float(scalar))


def _with_experts(config: ModelConfig, keys: GGUFKeys) -> ModelConfig:
    """Read the experts' number and width; their activation's limit and alpha are not stored."""
    if keys.defaults.num_local_experts is None:
        return config
    keys.check_required(("expert_count", "expert_used_count"))
    return replace(
        config,
        intermediate_size=keys.size("expert_feed_forward_length") or config.intermediate_size,
        num_local_experts=keys.required_size("expert_count"),
        num_experts_per_tok=keys.required_size("expert_used_count"),
        swiglu_limit=keys.defaults.swiglu_limit,
        swiglu_alpha=keys.defaults.swiglu_alpha,
    )


def _ternary_scaling(keys: GGUFKeys, has_ternary: bool) -> TernaryScaling | None:
    """Return the order of the class that the files of an architecture are converted from."""
    if keys.defaults.model_type == "bitnet":
        return "multiplied"  # the 2B-4T is an "autobitlinear" model
    return "divided" if has_ternary else None  # Llama3-8B-1.58 and Falcon3 are "bitlinear" ones


def _with_token_ids(config: ModelConfig, keys: GGUFKeys) -> ModelConfig:
    bos = keys.fields.token_ids("tokenizer.ggml.bos_token_id")
    ends = (token for end in END_TOKENS for token in keys.fields.token_ids(f"tokenizer.ggml.{end}_token_id"))
    return replace(config, bos_token_id=bos[0] if bos else None, eos_token_ids=tuple(dict.fromkeys(ends)))
