"""graphcore's `ModelConfig` under the names of transformers' config classes."""

from typing import Any

from graphcore.arch.config.model_config import ExpertsConfig, ModelConfig
from graphcore.arch.registry import ARCHITECTURES


def transformers_settings(config: ModelConfig, is_tied: bool) -> dict[str, Any]:
    """Return graphcore's config under the names of transformers' config classes, which ignore names they lack."""
    attention, experts, defaults = config.attention, config.experts, ARCHITECTURES[config.model_type].defaults
    scalar = attention.query_pre_attn_scalar
    optional = {
        "rope_parameters": _rope_settings(config),
        "layer_types": config.layer_types,
        "query_pre_attn_scalar": int(scalar) if scalar and scalar.is_integer() else scalar,
        **({} if experts is None else _expert_settings(experts)),
    }
    names_of_activation = ("hidden_act", "hidden_activation", "activation_function")
    return {
        "model_type": config.model_type,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "n_inner": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": attention.num_attention_heads,
        "num_key_value_heads": attention.num_key_value_heads,
        "head_dim": attention.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_eps,
        "layer_norm_epsilon": config.norm_eps,
        "attention_bias": attention.qkv_bias if defaults.bias_rule == "qkv_flag" else attention.output_bias,
        "mlp_bias": config.mlp_bias,
        "sliding_window": attention.sliding_window,
        "use_sliding_window": attention.sliding_window is not None,
        "tie_word_embeddings": is_tied,
        "pad_token_id": None,  # some classes' own is beyond a small vocabulary
        **({} if config.delta is None else vars(config.delta)),
        **dict.fromkeys(names_of_activation, config.hidden_act),
        **{name: value for name, value in optional.items() if value is not None},
        **ARCHITECTURES[config.model_type].own_settings(config),
    }


def _rope_settings(config: ModelConfig) -> dict[str, Any] | None:
    """Return the rotary settings; where a part of a head may rotate, also its share."""
    found, rope = config.rope_parameters, config.rope
    if rope is None or ARCHITECTURES[config.model_type].defaults.partial_rotary_factor is None:
        return found
    head_dim = config.attention.head_dim
    return {**(found or {}), "partial_rotary_factor": (rope.width or head_dim) / head_dim}


def _expert_settings(experts: ExpertsConfig) -> dict[str, Any]:
    """Return the experts' settings; transformers needs lists, and the numbers of shared experts and dense layers."""
    names_of_top_k = ("num_experts_per_tok", "top_k_experts")
    found = {
        **vars(experts),
        **dict.fromkeys(names_of_top_k, experts.num_experts_per_tok),
        "num_experts": experts.num_local_experts,
        "mlp_only_layers": list(experts.mlp_only_layers),
    }
    routing, shared = found.pop("routing"), experts.shared_expert_intermediate_size or 0
    if routing is None:
        return found
    return {
        **found,
        "n_group": routing.groups,
        "topk_group": routing.used_groups,
        "routed_scaling_factor": routing.factor,
        "n_routed_experts": experts.num_local_experts,
        "n_shared_experts": shared // (experts.moe_intermediate_size or 1),
        "first_k_dense_replace": len(experts.mlp_only_layers),
    }
