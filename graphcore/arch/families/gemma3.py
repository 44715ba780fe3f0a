"""Gemma 3 text models, 270M to 27B: sandwich norms, five sliding layers for each full one, two rotary tables."""

from collections.abc import Mapping

from graphcore.arch.architecture import Shapes
from graphcore.arch.config.class_defaults import ClassDefaults
from graphcore.arch.config.gguf_keys import GGUFKeys
from graphcore.arch.config.model_config import ModelConfig
from graphcore.arch.families.gemma import SANDWICH_LEAVES, Gemma, gemma_norm, with_query_scalar
from graphcore.arch.rotary import rotary_spec
from graphcore.checkpoint.gguf_reader import MetadataScalar
from graphcore.nn.spec import ModelSpec

LAYERS_OF_27B = 62  # the 27B is the only one whose query scalar is hidden / heads, not head_dim


class Gemma3(Gemma):
    """The architecture of Gemma 3: Gemma's norms and embeddings, sandwich norms, and norms of q and k."""

    leaves = SANDWICH_LEAVES

    def spec(self, config: ModelConfig) -> ModelSpec:
        """Return the spec: a rotary model with sandwich norms, and norms of q and k."""
        scale = config.hidden_size**0.5
        return rotary_spec(config, gemma_norm(config), has_qk_norm=True, sandwich=True, embedding_scale=scale)

    def complete_gguf(self, config: ModelConfig, keys: GGUFKeys, shapes: Shapes) -> ModelConfig:
        """Return the config with the query scalar, which GGUF does not store."""
        return with_query_scalar(config, LAYERS_OF_27B)

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
