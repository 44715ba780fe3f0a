"""StableLM (3B-4E1T, Zephyr 3B) and StableLM 2 1.6B: Llama's block with LayerNorm; a quarter of each head rotates.

Tensors have Llama's names in safetensors and in GGUF files; q, k and v may have biases. StableLM 2 12B is refused: its
attention and MLP read one norm (use_parallel_residual), and each head has a LayerNorm of its own (qk_layernorm).

Source: transformers, configuration_stablelm and modeling_stablelm; llama.cpp, src/models/stablelm.cpp, which tells a
12B by its tensors: converters state use_parallel_residual for older sequential models, too.
"""

from collections.abc import Mapping
from dataclasses import replace

from graphcore.arch.architecture import Architecture, Shapes, TensorSource, gguf_name
from graphcore.arch.config.class_defaults import ClassDefaults
from graphcore.arch.config.gguf_keys import GGUFKeys
from graphcore.arch.config.model_config import ModelConfig
from graphcore.arch.config.typed_fields import Fields
from graphcore.arch.rotary import GGUF_LEAVES, rotary_spec
from graphcore.checkpoint.gguf_reader import MetadataScalar
from graphcore.errors import UnsupportedError
from graphcore.nn.spec import ModelSpec, NormSpec

QUERY_NORM, MLP_NORM = "blk.0.attn_q_norm.weight", "blk.0.ffn_norm.weight"


class StableLM(Architecture):
    """The architecture of StableLM: a rotary decoder with LayerNorm whose heads rotate in part."""

    def spec(self, config: ModelConfig) -> ModelSpec:
        """Return the spec: a rotary model with LayerNorm."""
        return rotary_spec(config, NormSpec("layer", config.norm_eps), has_qk_norm=False)

    def own_settings(self, config: ModelConfig) -> Mapping[str, object]:
        """Return the settings of norms and biases."""
        return {"layer_norm_eps": config.norm_eps, "use_qkv_bias": config.attention.qkv_bias}

    def hf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the stored tensor of the same name."""
        return TensorSource(name)

    def gguf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the tensor under llama.cpp's name."""
        return TensorSource(gguf_name(name, GGUF_LEAVES))

    def complete_json(self, config: ModelConfig, fields: Fields) -> ModelConfig:
        """Return the config with biases of q, k and v if use_qkv_bias is true."""
        has_bias = bool(fields.flag("use_qkv_bias"))
        return replace(config, attention=replace(config.attention, qkv_bias=has_bias))

    def complete_gguf(self, config: ModelConfig, keys: GGUFKeys, shapes: Shapes) -> ModelConfig:
        """Return the config unchanged, after a check that the file is not of StableLM 2 12B.

        Raises:
            UnsupportedError: the file has norms of heads, or no norm before the MLP.
        """
        is_parallel = "blk.0.attn_norm.weight" in shapes and MLP_NORM not in shapes
        if QUERY_NORM in shapes or is_parallel:
            what = f"has {QUERY_NORM}" if QUERY_NORM in shapes else f"has no {MLP_NORM}"
            raise UnsupportedError(
                f"{keys.fields.source}: {what}: norms of heads (qk_layernorm) and a parallel residual, as in StableLM "
                "2 12B, are not supported"
            )
        return config

    def gguf_fields(self, config: ModelConfig) -> Mapping[str, MetadataScalar]:
        """Return the key of the order of attention and MLP."""
        return {"use_parallel_residual": False}


STABLELM = StableLM(
    ClassDefaults(
        model_type="stablelm",
        window_rule="none",
        bias_rule="none",
        vocab_size=50_304,
        hidden_size=2560,
        intermediate_size=6912,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        max_position_embeddings=4096,
        norm_eps=1e-5,
        bos_token_id=0,
        eos_token_ids=(0,),
        has_layer_norm=True,
        partial_rotary_factor=0.25,
        own_names={"layer_norm_epsilon": ("layer_norm_eps",)},
        own_neutral={"partial_rotary_factor": None, "qk_layernorm": (False,), "use_parallel_residual": (False,)},
    ),
    gguf_names=("stablelm",),
)
