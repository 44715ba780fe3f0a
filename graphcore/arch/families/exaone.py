"""EXAONE 4 (1.2B, 32B): norms behind the sublayers alone, norms of q and k per head.

    x += norm(attention(x));  x += norm(mlp(x))

If there is a window, three of four layers slide, and the full ones do not rotate; else all layers are full and rotate.

    GGUF          post_attention_norm, post_ffw_norm

Source: transformers, configuration_exaone4 and modeling_exaone4; llama.cpp, src/models/exaone4.cpp, in which only
models of 64 layers slide.
"""

from collections.abc import Mapping
from dataclasses import replace

from graphcore.arch.architecture import Architecture, Shapes, TensorSource, gguf_name
from graphcore.arch.config.class_defaults import ClassDefaults
from graphcore.arch.config.gguf_keys import WINDOW, WINDOW_PATTERN, GGUFKeys
from graphcore.arch.config.layer_types import read_gguf_layer_types
from graphcore.arch.config.model_config import ModelConfig
from graphcore.arch.config.typed_fields import Fields
from graphcore.arch.rotary import POST_NORM_LEAVES, layer_types, rotary_spec, with_post_norms
from graphcore.checkpoint.gguf_reader import MetadataScalar
from graphcore.nn.spec import AttentionSpec, BlockSpec, ModelSpec, NormSpec

PATTERN = 4  # every fourth layer is full where layer_types is absent


class Exaone4(Architecture):
    """The architecture of EXAONE 4: post-norm blocks, with a rotation of sliding layers alone if any slides."""

    def spec(self, config: ModelConfig) -> ModelSpec:
        """Return the spec: a rotary model with norms behind the sublayers."""
        model = rotary_spec(config, NormSpec("rms", config.norm_eps), has_qk_norm=True)
        if config.attention.sliding_window is not None:
            kinds = zip(model.blocks, layer_types(config), strict=True)
            blocks = (block if kind == "sliding_attention" else _not_rotated(block) for block, kind in kinds)
            model = replace(model, blocks=tuple(blocks))
        return with_post_norms(model)

    def hf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the stored tensor of the same name."""
        return TensorSource(name)

    def gguf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the tensor under llama.cpp's name."""
        return TensorSource(gguf_name(name, POST_NORM_LEAVES))

    def complete_json(self, config: ModelConfig, fields: Fields) -> ModelConfig:
        """Return the config with a type for each layer."""
        return replace(config, attention=replace(config.attention, layer_types=layer_types(config)))

    def complete_gguf(self, config: ModelConfig, keys: GGUFKeys, shapes: Shapes) -> ModelConfig:
        """Return the config with a type for each layer."""
        num_layers = config.num_hidden_layers
        if config.attention.sliding_window is None:
            kinds: tuple[str, ...] = ("full_attention",) * num_layers
        else:
            kinds = read_gguf_layer_types(keys, num_layers, PATTERN)
        return replace(config, attention=replace(config.attention, layer_types=kinds))

    def gguf_fields(self, config: ModelConfig) -> Mapping[str, MetadataScalar | tuple[int, ...]]:
        """Return the keys of the window, and of the layers that slide."""
        window = config.attention.sliding_window
        slides = tuple(kind == "sliding_attention" for kind in layer_types(config))
        return {} if window is None else {WINDOW: window, WINDOW_PATTERN: slides}


def _not_rotated(block: BlockSpec) -> BlockSpec:
    assert isinstance(block.attention, AttentionSpec), "every layer of EXAONE attends"
    return replace(block, attention=replace(block.attention, rope=None))


EXAONE4 = Exaone4(
    ClassDefaults(
        model_type="exaone4",
        window_rule="pattern_opt_in",
        bias_rule="none",
        vocab_size=102_400,
        hidden_size=4096,
        intermediate_size=16_384,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        max_position_embeddings=2048,
        norm_eps=1e-5,
        bos_token_id=0,
        eos_token_ids=(2,),
        sliding_window=4096,
        sliding_window_pattern=PATTERN,
        sizes_by_layer=(WINDOW_PATTERN,),
    ),
    gguf_names=("exaone4",),
)
