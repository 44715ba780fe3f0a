"""The reader of GGUF metadata: `ModelConfig` from its keys, the architecture's defaults, and the tensors' shapes.

    general.architecture = a,  a.block_count, a.embedding_length, ...  ->  num_hidden_layers, hidden_size, ...
    not stored as keys: the activation, Gemma's query scalar, tying, biases; rope_freqs.weight is a tensor

Source: llama.cpp, gguf-py/gguf/constants.py (keys) and src/llama-model.cpp (defaults when a key is missing).
"""

import math
from collections.abc import Mapping, Sequence, Sized
from dataclasses import replace

from graphcore.arch.architecture import Architecture
from graphcore.arch.config.gguf_keys import NO_WINDOW, WINDOW, YARN_ATTENTION, GGUFKeys
from graphcore.arch.config.layer_types import (
    MOST_LAYERS,
    layer_types_of_pattern,
    note_on_gguf_window,
    read_gguf_window,
)
from graphcore.arch.config.model_config import AttentionConfig, ModelConfig, RopeParameters, RopeScaling, read_head_dim
from graphcore.arch.config.refusals import refuse_unknown_gguf_mathematics
from graphcore.arch.config.rope_parameters import ORIGINAL, check_yarn_base, read_scaling
from graphcore.arch.config.typed_fields import LARGEST_SIZE, Fields
from graphcore.arch.registry import GGUF_ARCHITECTURES, MIXED_GGUF, WINDOWED_GGUF
from graphcore.checkpoint.token_ids import SpecialIds, read_special_ids
from graphcore.errors import CheckpointError, UnsupportedError, quoted
from graphcore.routing import SCORES, ScoredRouting

REQUIRED = ("block_count", "context_length", "embedding_length", "attention.head_count")
BEGIN_TOKEN = "tokenizer.ggml.bos_token_id"
END_TOKENS = tuple(f"tokenizer.ggml.{end}_token_id" for end in ("eos", "eot", "eom"))
"""Keys of the ends of a sequence, of a turn and of a message: each of them ends generation."""


def config_from_gguf(
    metadata: Mapping[str, object],
    tensor_shapes: Mapping[str, tuple[int, ...]],
    rope_freqs: Sequence[float] | None,
    source: str,
    has_ternary: bool = False,
    rope_factors: tuple[Sequence[float], Sequence[float]] | None = None,
) -> ModelConfig:
    """Return the typed configuration of a GGUF file.

    Args:
        metadata: values of the file's metadata by key, arrays as sequences; not changed.
        tensor_shapes: shape of each tensor by name, in torch order (rows first).
        rope_freqs: values of rope_freqs.weight, one for each pair that rotates; None if the file does not have it.
        source: name of the file, for messages.
        has_ternary: True if the file holds i2_s tensors, which always belong to models with int8 activations.
        rope_factors: values of rope_factors_short.weight and rope_factors_long.weight, one for each pair that rotates;
            None if the file does not have them.

    Raises:
        CheckpointError: a key is missing, of the wrong type, out of range, or contradicts another or a shape.
        UnsupportedError: the architecture, or a key that changes the mathematics, is not supported.
    """
    architecture, keys = _architecture(Fields(metadata, source))
    refuse_unknown_gguf_mathematics(keys)
    width_key = _width_key(keys)
    keys.check_required((*REQUIRED, width_key, _eps_key(keys)))
    hidden_size, (num_layers, predicting) = keys.required_size("embedding_length"), _num_layers(keys)
    attention = _attention(keys, tensor_shapes, hidden_size, num_layers)
    eps = keys.fields.positive(keys.name(_eps_key(keys)))
    assert eps is not None, "the epsilon was checked to be there"
    vocab_size = _vocab_size(keys, tensor_shapes)
    special = _special_ids(keys, vocab_size)
    ends = (token for end in END_TOKENS for token in special.ids.get(end, ()))
    config = ModelConfig(
        model_type=keys.defaults.model_type,
        hidden_size=hidden_size,
        intermediate_size=keys.required_size(width_key),
        num_hidden_layers=num_layers,
        num_predicting_layers=predicting,
        vocab_size=vocab_size,
        max_position_embeddings=keys.required_size("context_length"),
        attention=attention,
        rope=_rope(keys, attention.head_dim, rope_freqs, rope_factors) if keys.defaults.has_rope else None,
        norm_eps=eps,
        hidden_act=keys.defaults.hidden_act,
        mlp_bias=keys.defaults.bias_rule == "everywhere" or "blk.0.ffn_gate.bias" in tensor_shapes,
        tie_word_embeddings="output.weight" not in tensor_shapes,
        bos_token_id=next(iter(special.ids.get(BEGIN_TOKEN, ())), None),
        eos_token_ids=tuple(dict.fromkeys(ends)),
        ternary="divided" if has_ternary else None,  # Llama3-8B-1.58 and Falcon3 are "bitlinear" models
        notes=(*special.note(source), *note_on_gguf_window(keys)),
    )
    return architecture.complete_gguf(_with_experts(config, keys), keys, tensor_shapes)


def _architecture(fields: Fields) -> tuple[Architecture, GGUFKeys]:
    name = fields.text("general.architecture")
    if name is None:
        raise CheckpointError(f"{fields.source}: lacks general.architecture; fetch the file again or convert it anew")
    if name not in GGUF_ARCHITECTURES:
        raise UnsupportedError(
            f"{fields.source}: architecture {quoted(name)} is not supported; "
            f"known: {', '.join(sorted(GGUF_ARCHITECTURES))}; "
            "choose a checkpoint of one of these"
        )
    architecture = GGUF_ARCHITECTURES[name]
    if fields.raw.get(f"{name}.{WINDOW}") not in NO_WINDOW:
        architecture = WINDOWED_GGUF.get(name, architecture)
    if fields.raw.get(f"{name}.expert_count") not in (None, 0):
        architecture = MIXED_GGUF.get(name, architecture)
    return architecture, GGUFKeys(fields, name, architecture.gguf_defaults(name))


def _num_layers(keys: GGUFKeys) -> tuple[int, int]:
    """Return the number of layers, and of multi-token-prediction (MTP) layers after the last one."""
    count, predicting = keys.required_size("block_count"), keys.size("nextn_predict_layers") or 0
    if not 0 < count - predicting <= MOST_LAYERS:
        wanted = f"above nextn_predict_layers ({predicting})" if predicting else f"at most {MOST_LAYERS}"
        raise keys.fields.wrong(keys.name("block_count"), count, wanted)
    return count - predicting, predicting


def _width_key(keys: GGUFKeys) -> str:
    """Return the key of the MLP's width; files in which all layers have experts may have only the experts' width."""
    stated, of_experts = "feed_forward_length", "expert_feed_forward_length"
    has_experts = keys.defaults.experts is not None and keys.fields.raw.get(keys.name(of_experts)) is not None
    return of_experts if has_experts and keys.fields.raw.get(keys.name(stated)) in (None, 0) else stated


def _eps_key(keys: GGUFKeys) -> str:
    return "attention.layer_norm_epsilon" if keys.defaults.has_layer_norm else "attention.layer_norm_rms_epsilon"


def _vocab_size(keys: GGUFKeys, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the number of the embedding's rows; without an embedding, the key's value or the number of tokens."""
    embedding = shapes.get("token_embd.weight")
    if embedding:  # a damaged file may have a tensor without dimensions
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


def _special_ids(keys: GGUFKeys, vocab_size: int) -> SpecialIds:
    """Return the special token ids of the file; as in llama.cpp, those beyond its tokens count as absent."""
    tokens = keys.fields.raw.get("tokenizer.ggml.tokens")
    num_tokens = len(tokens) if isinstance(tokens, Sized) and len(tokens) else vocab_size
    names = [name for name in keys.fields.raw if name.startswith("tokenizer.ggml.") and name.endswith("_token_id")]
    return read_special_ids(keys.fields.raw, names, min(num_tokens, vocab_size))


def _attention(
    keys: GGUFKeys, shapes: Mapping[str, tuple[int, ...]], hidden_size: int, num_layers: int
) -> AttentionConfig:
    """Read heads and windows from the keys, and biases from the tensors' names."""
    heads, has_rope = keys.required_size("attention.head_count"), keys.defaults.has_rope
    kv_heads = keys.size("attention.head_count_kv") or heads
    stated = keys.size("attention.key_length") if has_rope else None
    if has_rope and keys.defaults.partial_rotary_factor is None:
        stated = stated or keys.size("rope.dimension_count")
    head_dim = read_head_dim(stated, hidden_size, (heads, kv_heads), has_rope, keys.fields.source)
    _check_heads(keys, heads, head_dim, shapes)
    has_output_bias = keys.defaults.bias_rule == "everywhere" or "blk.0.attn_output.bias" in shapes
    window, pattern = read_gguf_window(keys)
    return AttentionConfig(
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        qkv_bias=has_output_bias or keys.defaults.bias_rule == "qkv" or "blk.0.attn_q.bias" in shapes,
        output_bias=has_output_bias,
        sliding_window=window,
        sliding_window_pattern=pattern,
        layer_types=None if pattern is None else layer_types_of_pattern(num_layers, pattern),
    )


def _check_heads(keys: GGUFKeys, heads: int, head_dim: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse heads that are partly rotated, have values of another width, or do not match the query weight's shape.

    Model types that rotate a part of a head have its width in the file, and their query weight also holds gates.
    """
    source, is_partial = keys.fields.source, keys.defaults.partial_rotary_factor is not None
    for key in ("attention.value_length",) if is_partial else ("rope.dimension_count", "attention.value_length"):
        width = None if key in keys.defaults.computed_gguf else keys.size(key)
        if width is not None and width != head_dim:
            raise UnsupportedError(
                f"{source}: {keys.name(key)} is {width}, the head dim is {head_dim}; only equal ones are supported"
            )
    if "attention.key_length" in (*keys.defaults.sizes_by_layer, *keys.defaults.computed_gguf):
        return  # heads of the first layer may have another width, or keys another than queries; the family checks all
    query = shapes.get("blk.0.attn_q.weight")
    # Without a rotation (GPT-2) there is no such tensor, and the family's own check refuses it by its name.
    if keys.defaults.has_rope and not is_partial and query is not None and query[0] != heads * head_dim:
        raise CheckpointError(
            f"{source}: blk.0.attn_q.weight has {query[0]} rows, {heads} heads of {head_dim} "
            f"need {heads * head_dim}; metadata and weights are of different models, or heads are rotated in part, "
            "which is not supported"
        )


def _rope(
    keys: GGUFKeys,
    head_dim: int,
    rope_freqs: Sequence[float] | None,
    rope_factors: tuple[Sequence[float], Sequence[float]] | None,
) -> RopeParameters:
    local = keys.fields.positive(keys.name("rope.freq_base_swa")) or keys.defaults.rope_local_base_freq
    width, source = _rotated_width(keys, head_dim), keys.fields.source
    pairs = (width or head_dim) // 2
    short, long = rope_factors or (None, None)
    theta = keys.fields.positive(keys.name("rope.freq_base")) or keys.defaults.rope_theta
    scaling = _rope_scaling(keys, rope_factors is not None)
    check_yarn_base(theta, scaling, keys.fields, keys.name("rope.freq_base"))
    return RopeParameters(
        theta=theta,
        scaling=scaling,
        local_theta=local if keys.defaults.rope_local_base_freq else None,
        freq_divisors=None if rope_freqs is None else _divisors("rope_freqs", rope_freqs, pairs, source),
        width=width,
        short_factors=None if short is None else _divisors("rope_factors_short", short, pairs, source),
        long_factors=None if long is None else _divisors("rope_factors_long", long, pairs, source),
    )


def _rotated_width(keys: GGUFKeys, head_dim: int) -> int | None:
    """Return the number of features of a head that rotate; None for all."""
    if keys.defaults.partial_rotary_factor is None:
        return None
    width = keys.size("rope.dimension_count") or int(head_dim * keys.defaults.partial_rotary_factor)
    if width % 2 or width > head_dim:
        raise keys.fields.wrong(keys.name("rope.dimension_count"), width, f"even and at most the head dim {head_dim}")
    return None if width == head_dim else width


def _rope_scaling(keys: GGUFKeys, has_factors: bool) -> RopeScaling | None:
    """Return longrope if the file has its divisors, else linear or YaRN scaling, or None.

    A factor without a type is linear; a factor of 0 or 1 is none.
    """
    rope_type = keys.fields.text(keys.name("rope.scaling.type")) or "linear"
    if has_factors and rope_type != "yarn":
        return _longrope(keys)
    if has_factors or rope_type not in ("none", "linear", "yarn"):
        raise UnsupportedError(
            f"{keys.fields.source}: {keys.name('rope.scaling.type')} {quoted(rope_type)} is not supported; "
            "known: none, linear, yarn"
        )
    names = (keys.name("rope.scaling.factor"), keys.name("rope.scale_linear"))
    factor = keys.fields.number(*names) or 1.0
    if factor < 0:
        raise keys.fields.wrong(names[0], factor, "above zero")
    if rope_type == "none" or factor == 1.0:
        return None
    return _scaling(keys, rope_type, factor)


def _longrope(keys: GGUFKeys) -> RopeScaling:
    """Return the LongRoPE scaling; the original context is context_length by default, as in llama.cpp.

    Raises:
        UnsupportedError: frequencies are also divided by a factor.
    """
    factor = keys.name("rope.scaling.factor")
    if keys.fields.number(factor) not in (None, 0.0, 1.0):
        raise UnsupportedError(f"{keys.fields.source}: {factor} beside rope_factors_long is not supported; remove it")
    original = keys.size("rope.scaling.original_context_length") or keys.required_size("context_length")
    attention_factor = keys.fields.number(keys.name("rope.scaling.attn_factor")) or 1.0
    return {"rope_type": "longrope", ORIGINAL: original, "attention_factor": attention_factor}


def _scaling(keys: GGUFKeys, rope_type: str, factor: float) -> RopeScaling | None:
    """Return a scaling, read as from a config.json; YaRN's `truncate` is not stored, so the default counts.

    llama.cpp's converter stores YaRN's attention factor where config.json has one. llama.cpp itself infers it from the
    factor, which gives the same number for published models.
    """
    names = {
        "original_context_length": ORIGINAL,
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    }
    found = {name: keys.fields.raw.get(keys.name(f"rope.scaling.{key}")) for key, name in names.items()}
    found = {name: value for name, value in found.items() if value != 0}  # 0 means unset in llama.cpp
    multiplier = keys.fields.number(keys.name("rope.scaling.yarn_log_multiplier"))
    if multiplier:
        found |= {"mscale": 1.0, "mscale_all_dim": multiplier}
    elif rope_type == "yarn" and keys.fields.number(keys.name(YARN_ATTENTION)) not in (None, 0.0, 1.0):
        found |= {"attention_factor": keys.fields.raw[keys.name(YARN_ATTENTION)]}
    where = f"{keys.fields.source}: {keys.name('rope.scaling')}"
    stated = Fields({"rope_type": rope_type, "factor": factor, **found}, where)
    return read_scaling(stated, keys.defaults, keys.required_size("context_length"))


def _divisors(name: str, values: Sequence[float], pairs: int, source: str) -> tuple[float, ...]:
    divisors = tuple(float(divisor) for divisor in values)
    if len(divisors) != pairs:
        raise CheckpointError(
            f"{source}: {name}.weight has {len(divisors)} values, heads that rotate {2 * pairs} features need {pairs}; "
            "fetch the file again"
        )
    if not all(math.isfinite(divisor) and divisor > 0 for divisor in divisors):
        raise CheckpointError(f"{source}: {name}.weight has values that are not above zero; fetch the file again")
    return divisors


def _with_experts(config: ModelConfig, keys: GGUFKeys) -> ModelConfig:
    """Add the experts' number and width; the parameters of their activation are not stored, so defaults are used."""
    if keys.defaults.experts is None:
        return config
    keys.check_required(("expert_count", "expert_used_count"))
    routing = None if keys.defaults.experts.routing is None else _routing(keys, keys.defaults.experts.routing)
    experts = replace(
        keys.defaults.experts,
        num_local_experts=keys.required_size("expert_count"),
        num_experts_per_tok=keys.required_size("expert_used_count"),
        # without scores of their own no key says otherwise, and llama.cpp computes nothing else
        norm_topk_prob=routing is None or routing.normalises,
        routing=routing,
    ).check(keys.fields.source)
    if experts.moe_intermediate_size is None:
        width = keys.size("expert_feed_forward_length") or config.intermediate_size
        return replace(config, intermediate_size=width, experts=experts)
    keys.check_required(("expert_feed_forward_length",))
    width = keys.required_size("expert_feed_forward_length")
    shared = keys.size("expert_shared_feed_forward_length") or width
    if experts.shared_expert_intermediate_size is None:
        return replace(config, experts=replace(experts, moe_intermediate_size=width))
    experts = replace(experts, moe_intermediate_size=width, shared_expert_intermediate_size=shared)
    return replace(config, experts=experts)


def _routing(keys: GGUFKeys, usual: ScoredRouting) -> ScoredRouting:
    """Return the rule of experts with scores of their own; as in llama.cpp, shares without a key are not normalised.

    Raises:
        UnsupportedError: the score function is unknown.
    """
    name = keys.name("expert_gating_func")
    number = keys.fields.count(name, LARGEST_SIZE) or SCORES[usual.function]
    known = {value: function for function, value in SCORES.items()}
    if number not in known:
        raise UnsupportedError(f"{keys.fields.source}: {name} {number} is not supported; known: {known}")
    return usual._replace(
        function=known[number],
        groups=keys.fields.count(keys.name("expert_group_count"), LARGEST_SIZE) or 1,
        used_groups=keys.fields.count(keys.name("expert_group_used_count"), LARGEST_SIZE) or 1,
        normalises=bool(keys.fields.flag(keys.name("expert_weights_norm"))),
        factor=keys.fields.number(keys.name("expert_weights_scale")) or 1.0,
    )
