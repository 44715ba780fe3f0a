"""Code that the rotary families (Llama, Qwen, Gemma, ...) share: tensor names, ropes and most of the spec."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from graphcore.arch.config.model_config import ModelConfig, RopeParameters, RopeScaling
from graphcore.arch.config.rope_parameters import ORIGINAL
from graphcore.arch.folds import PickRows
from graphcore.nn.rope_spec import (
    DivisorScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    ProportionalScaling,
    RopeSpec,
    YarnScaling,
)
from graphcore.nn.spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec, NormSpec

# llama.cpp's tensor names, by decoder module; families that differ override entries.
GGUF_LEAVES: Mapping[str, str] = MappingProxyType(
    {
        "embed_tokens": "token_embd",
        "norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "mlp.router": "ffn_gate_inp",
        "mlp.experts.gate_proj": "ffn_gate_exps",
        "mlp.experts.up_proj": "ffn_up_exps",
        "mlp.experts.down_proj": "ffn_down_exps",
    }
)
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")  # decoder modules that files may fuse


FUSED_MLP = ("mlp.gate_proj", "mlp.up_proj")  # the same for the MLP


def rows_of_gate_and_up(module: str, config: ModelConfig) -> PickRows:
    """Return the fold that picks gate or up out of the rows of a tensor [2F, D] that has both, gate first."""
    begin = FUSED_MLP.index(module) * config.intermediate_size
    return PickRows(begin, begin + config.intermediate_size)


def rows_of_qkv(module: str, config: ModelConfig) -> PickRows:
    """Return the fold that picks q, k or v out of the rows of a tensor that has all three, in this order."""
    queries = config.attention.num_attention_heads * config.attention.head_dim
    keys = config.attention.num_key_value_heads * config.attention.head_dim
    begin = (0, queries, queries + keys)[QKV.index(module)]
    return PickRows(begin, begin + (queries if module == QKV[0] else keys))


# The decoder's names of the experts' weights that files may fuse into one tensor, gate before up.
GATE_AND_UP = ("mlp.experts.gate_proj.weight", "mlp.experts.up_proj.weight")


def half_of_experts(leaf: str, width: int) -> PickRows:
    """Return the fold that picks gate or up out of a fused tensor [X, 2F, D].

    Args:
        leaf: one of `GATE_AND_UP`.
        width: number of hidden features of an expert, F.
    """
    begin = GATE_AND_UP.index(leaf) * width
    return PickRows(begin, begin + width, axis=-2)


POST_NORM_LEAVES: Mapping[str, str] = MappingProxyType(
    {
        **GGUF_LEAVES,
        "post_attention_layernorm": "post_attention_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    }
)
"""llama.cpp's tensor names of models whose norms are behind the sublayers."""


def rope_of(rope: RopeParameters) -> RopeSpec:
    """Return the spec of the rotary embedding of a model's full-attention layers."""
    if rope.freq_divisors is not None:
        return RopeSpec(rope.theta, DivisorScaling(rope.freq_divisors), rope.width)
    scaling = rope.scaling
    if scaling is None or scaling["rope_type"] == "dynamic":  # its frequencies change beyond the longest context only
        return RopeSpec(rope.theta, width=rope.width)
    if scaling["rope_type"] == "linear":
        return RopeSpec(rope.theta, LinearScaling(float(scaling["factor"])), rope.width)
    if scaling["rope_type"] == "proportional":
        share, factor = float(scaling["partial_rotary_factor"]), float(scaling["factor"])
        return RopeSpec(rope.theta, ProportionalScaling(share, factor))
    if scaling["rope_type"] == "yarn":
        return RopeSpec(rope.theta, _yarn_of(scaling), rope.width)
    if scaling["rope_type"] == "longrope":
        return RopeSpec(rope.theta, _longrope_of(rope, scaling), rope.width)
    assert scaling["rope_type"] == "llama3", f"the config reader let rope_type {scaling['rope_type']!r} through"
    bands = Llama3Scaling(
        factor=float(scaling["factor"]),
        low_freq_factor=float(scaling["low_freq_factor"]),
        high_freq_factor=float(scaling["high_freq_factor"]),
        original_context=int(scaling[ORIGINAL]),
    )
    return RopeSpec(rope.theta, bands, rope.width)


def _yarn_of(scaling: RopeScaling) -> YarnScaling:
    return YarnScaling(
        factor=float(scaling["factor"]),
        original_context=int(scaling[ORIGINAL]),
        attention_factor=float(scaling["attention_factor"]),
        beta_fast=float(scaling["beta_fast"]),
        beta_slow=float(scaling["beta_slow"]),
        rounds_ramp=bool(scaling["truncate"]),
    )


def _longrope_of(rope: RopeParameters, scaling: RopeScaling) -> LongScaling:
    assert rope.short_factors is not None, "the config readers give longrope both lists"
    assert rope.long_factors is not None, "the config readers give longrope both lists"
    original, factor = int(scaling[ORIGINAL]), float(scaling["attention_factor"])
    return LongScaling(rope.short_factors, rope.long_factors, original, factor)


def longest_context(config: ModelConfig) -> int:
    """Return the longest context in tokens: the stated one, or its extension by a rope scaling if that is longer.

    Published recipes for long contexts (Qwen 2.5) add a scaling and leave max_position_embeddings as it was. Files of
    Gemma 3, the type with a theta of its own for sliding layers, state the extended context, as do those of Llama 3.
    """
    stated, rope = config.max_position_embeddings, config.rope
    if rope is None or rope.scaling is None or rope.local_theta is not None:
        return stated
    if rope.scaling["rope_type"] not in ("linear", "llama3", "yarn"):
        return stated
    original = float(rope.scaling.get(ORIGINAL, stated))
    if rope.scaling["rope_type"] == "llama3" and stated > original:
        return stated
    return max(stated, int(original * float(rope.scaling["factor"])))


def layer_types(config: ModelConfig) -> tuple[str, ...]:
    """Return each layer's attention type: the stored one; else sliding in all layers if there is a window, or full."""
    if config.attention.layer_types is not None:
        return config.attention.layer_types
    everywhere = "sliding_attention" if config.attention.sliding_window else "full_attention"
    return (everywhere,) * config.num_hidden_layers


def attention_of(
    config: ModelConfig, layer_type: str, qk_norm: NormSpec | None = None, has_sinks: bool = False, cap: float = 0.0
) -> AttentionSpec:
    """Return the attention spec of a layer type; sliding layers have a window and, in Gemma, their own rotary base."""
    attention, rope = config.attention, config.rope
    assert rope is not None, f"the config reader gave a {config.model_type} no rotation"
    is_sliding = layer_type == "sliding_attention"
    has_local_rope = is_sliding and rope.local_theta is not None
    return AttentionSpec(
        heads=attention.num_attention_heads,
        kv_heads=attention.num_key_value_heads,
        head_dim=attention.head_dim,
        scale=(attention.query_pre_attn_scalar or attention.head_dim) ** -0.5,
        window=attention.sliding_window if is_sliding else None,
        qk_norm=qk_norm,
        rope=RopeSpec(rope.local_theta or 0.0) if has_local_rope else rope_of(rope),
        qkv_bias=attention.qkv_bias,
        output_bias=attention.output_bias,
        sinks=has_sinks,
        cap=cap,
    )


def rotary_spec(
    config: ModelConfig,
    norm: NormSpec,
    has_qk_norm: bool,
    sandwich: bool = False,
    embedding_scale: float = 1.0,
    cap: float = 0.0,
    gated: bool = True,
) -> ModelSpec:
    """Return the spec of a rotary model.

    Args:
        config: config of the model.
        norm: spec of all norms of the model, including those of q and k.
        has_qk_norm: True if q and k are normalised per head.
        sandwich: True if each sublayer's output is also normalised (Gemma 2 and 3).
        embedding_scale: factor of token embeddings.
        cap: bound of attention scores (Gemma 2); 0 for none.
        gated: False for an MLP without a gate (StarCoder 2).
    """
    mlp = MLPSpec(config.intermediate_size, config.hidden_act, gated, config.mlp_bias)
    blocks = tuple(
        BlockSpec(
            dim=config.hidden_size,
            norm=norm,
            attention=attention_of(config, layer_type, norm if has_qk_norm else None, cap=cap),
            mlp=mlp,
            sandwich=sandwich,
            int8_activations=config.ternary,
        )
        for layer_type in layer_types(config)
    )
    return ModelSpec(
        dim=config.hidden_size,
        vocab=config.vocab_size,
        blocks=blocks,
        norm=norm,
        context=longest_context(config),
        embedding_scale=embedding_scale,
        tied=config.tie_word_embeddings,
    )


def with_post_norms(model: ModelSpec) -> ModelSpec:
    """Return the spec with norms behind the sublayers instead of before them (OLMo 2, EXAONE 4)."""
    return replace(model, blocks=tuple(replace(one, sandwich=True, pre_norm=False) for one in model.blocks))
