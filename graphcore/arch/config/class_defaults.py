"""The defaults of settings that a config.json omits. Each model type's values are in its family's file.

Files on the Hub omit settings that equal the defaults of the transformers class that wrote them; nested text configs
omit even the sizes. So these defaults are part of the checkpoint. Source: transformers 5.23,
models/*/configuration_*.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from graphcore.arch.config.model_config import DeltaConfig, ExpertsConfig

LAYER_TYPES = ("sliding_attention", "full_attention")
DELTA_LAYER_TYPES = ("linear_attention", "full_attention")  # of model types with a gated delta rule
CONV_LAYER_TYPES = ("conv", "full_attention")  # of model types with gated short convolutions
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@dataclass(frozen=True)
class ClassDefaults:
    """The defaults and rules of one model type; fields that are not listed are described in `ModelConfig`.

    Attributes:
        num_key_value_heads: number of kv heads; None, or an explicit null in the file, for as many as query heads.
        intermediate_size: hidden width of the MLP; None for four times hidden_size.
        sliding_window: default window in tokens.
        window_rule: rule for the sliding layers if layer_types is absent: none; every layer; every layer if
            use_sliding_window is set ("every_opt_in"); with "opt_in" only those from max_window_layers on; or all
            except each sliding_window_pattern-th, with "pattern_opt_in" only if sliding_window is not null. With
            "delta" no layer slides, and all except each full_attention_interval-th have a delta rule. With "conv" no
            layer slides, and all except those of full_attn_idxs have a convolution.
        max_window_layers: default index of the first sliding layer, for "opt_in".
        bias_rule: rule for the biases of projections: none; the flags attention_bias and mlp_bias; the flag
            attention_bias alone; that flag for q, k and v only ("qkv_flag"); always on q, k and v; or always
            everywhere.
        norm_eps: epsilon of the type's norm, RMSNorm or LayerNorm.
        has_rope: True if positions are rotary; else they are learned, and the head width is hidden_size / heads.
        has_layer_norm: True if the type's norm is LayerNorm.
        sliding_window_pattern: default distance between full-attention layers, for "pattern".
        full_attention_interval: default distance between layers that attend, for "delta".
        delta: default sizes of layers with a delta rule; None for model types without them.
        partial_rotary_factor: default share of a head's features that rotate; None for model types that rotate all.
        original_context: default of original_max_position_embeddings, for types that read it beside the rotary
            settings alone; None for types that read it among them, too.
        rope_types: names of rope types that older files of this type have, with today's.
        attention_bias: default of the flag attention_bias.
        rope_scaling: default scaling; None for none.
        yarn_truncate: default of YaRN's truncate, which rounds the ramp to whole pairs.
        quant_methods: supported values of quantization_config.quant_method.
        own_names: names of a field in this type's files, tried before the usual name.
        own_neutral: values that change nothing for this type, by field of config.json, for fields that mean something
            else in other types or that only this type has; None for a field that is computed.
        own_neutral_gguf: values that change nothing for this type, by key of a GGUF file.
        computed_gguf: keys of a GGUF file that this type computes and others refuse.
        sizes_by_layer: keys of a GGUF file that may have a value for each layer.
        required: fields that a flat config.json must have.
    """

    model_type: str
    window_rule: Literal["none", "every", "every_opt_in", "opt_in", "pattern", "pattern_opt_in", "delta", "conv"]
    bias_rule: Literal["none", "flags", "attention_flag", "qkv_flag", "qkv", "everywhere"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int | None
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None
    max_position_embeddings: int
    head_dim: int | None = None
    norm_eps: float = 1e-6
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    has_rope: bool = True
    has_layer_norm: bool = False
    rope_theta: float = 10_000.0
    rope_local_base_freq: float | None = None
    sliding_window: int | None = None
    max_window_layers: int = 0
    query_pre_attn_scalar: float | None = None
    sliding_window_pattern: int = 6
    full_attention_interval: int = 4
    delta: DeltaConfig | None = None
    partial_rotary_factor: float | None = None
    original_context: int | None = None
    rope_types: Mapping[str, str] = field(default_factory=dict)
    attention_bias: bool = False
    rope_scaling: Mapping[str, str | float] | None = None
    yarn_truncate: bool = True
    experts: ExpertsConfig | None = None
    quant_methods: tuple[str, ...] = ()
    own_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    own_neutral: Mapping[str, tuple[object, ...] | None] = field(default_factory=dict)
    own_neutral_gguf: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    computed_gguf: tuple[str, ...] = ()
    sizes_by_layer: tuple[str, ...] = ()
    required: tuple[str, ...] = SIZES

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Return the default of a setting such as "bos_token_id" as a tuple."""
        if name == "eos_token_id":
            return self.eos_token_ids
        return (self.bos_token_id,) if name == "bos_token_id" and self.bos_token_id is not None else ()
