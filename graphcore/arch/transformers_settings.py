"""graphcore's `ModelConfig` under the names of transformers' config classes."""

from typing import Any

from graphcore.arch.config.model_config import ExpertsConfig, ModelConfig


def transformers_settings(config: ModelConfig, is_tied: bool) -> dict[str, Any]:
    """Return graphcore's config under the names of transformers' config classes, which ignore names they lack."""
    attention, experts = config.attention, config.experts
    scalar = attention.query_pre_attn_scalar
    optional = {
        "rope_parameters": config.rope_parameters,
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
        "attention_bias": attention.output_bias,
        "mlp_bias": config.mlp_bias,
        "sliding_window": attention.sliding_window,
        "use_sliding_window": attention.sliding_window is not None,
        "tie_word_embeddings": is_tied,
        **dict.fromkeys(names_of_activation, config.hidden_act),
        **{name: value for name, value in optional.items() if value is not None},
    }


def _expert_settings(experts: ExpertsConfig) -> dict[str, Any]:
    """Return the experts' settings; transformers needs lists."""
    return {**vars(experts), "mlp_only_layers": list(experts.mlp_only_layers)}
