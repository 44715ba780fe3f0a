"""Gemma 3 text models, 270M to 27B: sandwich norms, five sliding layers for each full one, two rotary tables."""

from collections.abc import Mapping
from dataclasses import replace

from graphcore.arch.architecture import Architecture, Shapes, TensorSource, gguf_name
from graphcore.arch.config.class_defaults import ClassDefaults
from graphcore.arch.config.gguf_keys import GGUFKeys
from graphcore.arch.config.model_config import ModelConfig
from graphcore.arch.folds import AddOne
from graphcore.arch.rotary import GGUF_LEAVES, rotary_spec
from graphcore.checkpoint.gguf_reader import MetadataScalar
from graphcore.nn.spec import ModelSpec, NormSpec

LEAVES = {
    **GGUF_LEAVES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
LAYERS_OF_27B = 62  # the 27B is the only one whose query scalar is hidden / heads, not head_dim


class Gemma3(Architecture):
    """The architecture of Gemma 3: norms hold 1 + w and multiply in float32; embeddings are scaled by sqrt(dim)."""

    def spec(self, config: ModelConfig) -> ModelSpec:
        """Return the spec: a rotary model with sandwich norms, and norms of q and k."""
        norm = NormSpec("rms", config.norm_eps, scale_in_float32=True)
        return rotary_spec(config, norm, has_qk_norm=True, is_gemma=True)

    def hf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the stored tensor of the same name; norms are stored as w, and the decoder needs 1 + w."""
        return TensorSource(name, (AddOne(),) if name.endswith("norm.weight") else ())

    def gguf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the tensor under llama.cpp's name; its converter has already added 1 to norms."""
        return TensorSource(gguf_name(name, LEAVES))

    def complete_gguf(self, config: ModelConfig, keys: GGUFKeys, shapes: Shapes) -> ModelConfig:
        """Return the config with the query scalar, which GGUF does not store."""
        is_27b = config.num_hidden_layers == LAYERS_OF_27B
        attention = config.attention
        scalar = config.hidden_size / attention.num_attention_heads if is_27b else attention.head_dim
        return replace(config, attention=replace(attention, query_pre_attn_scalar=float(scalar)))

    def gguf_fields(self, config: ModelConfig) -> Mapping[str, MetadataScalar]:
        """Return the keys of the window, and the rotary base of sliding layers."""
        attention = config.attention
        found: dict[str, MetadataScalar] = {"attention.sliding_window": attention.sliding_window or 0}
        if attention.sliding_window_pattern is not None:
            found["attention.sliding_window_pattern"] = attention.sliding_window_pattern
        if config.rope is not None and config.rope.local_theta is not None:
            found["rope.freq_base_swa"] = config.rope.local_theta
        return found


GEMMA3 = Gemma3(
    ClassDefaults(
        model_type="gemma3_text",
        window_rule="pattern",
        bias_rule="attention_flag",
        vocab_size=262_208,
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=26,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=131_072,
        head_dim=256,
        hidden_act="gelu_pytorch_tanh",
        tie_word_embeddings=True,
        bos_token_id=2,
        eos_token_ids=(1,),
        rope_theta=1_000_000.0,
        rope_local_base_freq=10_000.0,
        sliding_window=4096,
        query_pre_attn_scalar=256.0,
        own_names={"hidden_act": ("hidden_activation",)},
        required=("hidden_size", "intermediate_size", "num_hidden_layers"),
    ),
    gguf_names=("gemma3",),
    nested_in="gemma3",
    hf_prefixes=("model.", "language_model.model.", "model.language_model.", ""),
    ignored=("rotary_emb.inv_freq", "vision_tower.", "multi_modal_projector."),
)
