"""OLMo 2 and OLMo 3: norms behind the sublayers alone, and norms of q and k over all heads.

    x += norm(attention(x));  x += norm(mlp(x))

OLMo 3 slides in three of four layers; a rope scaling is that of the full layers alone.

    GGUF          post_attention_norm, post_ffw_norm; attn_q_norm [H E], attn_k_norm [K E]
                  files of OLMo 3 have OLMo 2's general.architecture, and a sliding window

Source: transformers, modeling_olmo2, configuration_olmo3 and modeling_olmo3; llama.cpp, src/models/olmo2.cpp.
"""

from collections.abc import Mapping
from dataclasses import replace

from graphcore.arch.architecture import Architecture, Shapes, TensorSource, gguf_name
from graphcore.arch.config.class_defaults import ClassDefaults
from graphcore.arch.config.gguf_keys import WINDOW, WINDOW_PATTERN, GGUFKeys
from graphcore.arch.config.layer_types import read_gguf_layer_types
from graphcore.arch.config.model_config import ModelConfig
from graphcore.arch.rotary import POST_NORM_LEAVES, layer_types, rotary_spec, with_post_norms
from graphcore.checkpoint.gguf_reader import MetadataScalar
from graphcore.nn.spec import AttentionSpec, BlockSpec, ModelSpec, NormSpec

PATTERN = 4  # every fourth layer of OLMo 3 is full where layer_types is absent


class Olmo(Architecture):
    """The architecture of OLMo: post-norm blocks, with norms that multiply in float32."""

    def spec(self, config: ModelConfig) -> ModelSpec:
        """Return the spec: a rotary model with norms behind the sublayers."""
        model = rotary_spec(config, NormSpec("rms", config.norm_eps, scale_in_float32=True), has_qk_norm=True)
        return with_post_norms(replace(model, blocks=tuple(map(_normed_over_heads, model.blocks))))

    def hf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the stored tensor of the same name."""
        return TensorSource(name)

    def gguf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the tensor under llama.cpp's name."""
        return TensorSource(gguf_name(name, POST_NORM_LEAVES))

    def complete_gguf(self, config: ModelConfig, keys: GGUFKeys, shapes: Shapes) -> ModelConfig:
        """Return the config with each layer's type; in llama.cpp both types have the same rotary base."""
        if config.attention.sliding_window is None:
            return config
        assert config.rope is not None, "every OLMo rotates"
        kinds = read_gguf_layer_types(keys, config.num_hidden_layers, PATTERN)
        rope = replace(config.rope, local_theta=config.rope.theta)
        return replace(config, rope=rope, attention=replace(config.attention, layer_types=kinds))

    def gguf_fields(self, config: ModelConfig) -> Mapping[str, MetadataScalar | tuple[int, ...]]:
        """Return the keys of the window, and of the layers that slide."""
        window = config.attention.sliding_window
        slides = tuple(kind == "sliding_attention" for kind in layer_types(config))
        return {} if window is None else {WINDOW: window, WINDOW_PATTERN: slides}


def _normed_over_heads(block: BlockSpec) -> BlockSpec:
    assert isinstance(block.attention, AttentionSpec), "every layer of OLMo attends"
    return replace(block, attention=replace(block.attention, qk_norm_over_heads=True))


OLMO2 = Olmo(
    ClassDefaults(
        model_type="olmo2",
        window_rule="none",
        bias_rule="attention_flag",
        vocab_size=50_304,
        hidden_size=4096,
        intermediate_size=11_008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=None,
        max_position_embeddings=2048,
        norm_eps=1e-5,
        eos_token_ids=(50_279,),
    ),
    gguf_names=("olmo2",),
)
OLMO3 = Olmo(
    replace(
        OLMO2.defaults,
        model_type="olmo3",
        window_rule="pattern",
        rope_theta=500_000.0,
        rope_local_base_freq=500_000.0,
        sliding_window=4096,
        sliding_window_pattern=PATTERN,
        sizes_by_layer=(WINDOW_PATTERN,),
    ),
    gguf_names=("olmo2",),
    is_read_from_gguf=False,
    is_read_with_window=True,
)
