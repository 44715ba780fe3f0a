"""StarCoder 2 (3B, 7B, 15B): LayerNorm, biases, rotary attention with a window in every layer, an MLP without a gate.

    decoder           Hugging Face    GGUF
    mlp.up_proj       mlp.c_fc        ffn_up
    mlp.down_proj     mlp.c_proj      ffn_down

llama.cpp's converter does not store the window, and llama.cpp attends to all tokens; a file that has the key (as those
of task=pack do) runs with it.

Source: transformers, configuration_starcoder2 and modeling_starcoder2; llama.cpp, src/models/starcoder2.cpp.
"""

from collections.abc import Mapping
from dataclasses import replace

from graphcore.arch.architecture import Architecture, Shapes, TensorSource, gguf_name, split_layer
from graphcore.arch.config.class_defaults import ClassDefaults
from graphcore.arch.config.gguf_keys import WINDOW, GGUFKeys
from graphcore.arch.config.model_config import ModelConfig
from graphcore.arch.config.typed_fields import Fields
from graphcore.arch.rotary import GGUF_LEAVES, rotary_spec
from graphcore.checkpoint.gguf_reader import MetadataScalar
from graphcore.nn.spec import ModelSpec, NormSpec

HF_LEAVES = {"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}


class StarCoder2(Architecture):
    """The architecture of StarCoder 2: a rotary decoder with LayerNorm and a plain GELU MLP."""

    def spec(self, config: ModelConfig) -> ModelSpec:
        """Return the spec: a rotary model with LayerNorm, and an MLP without a gate."""
        return rotary_spec(config, NormSpec("layer", config.norm_eps), has_qk_norm=False, gated=False)

    def own_settings(self, config: ModelConfig) -> Mapping[str, object]:
        """Return the settings of norms and biases."""
        return {"norm_epsilon": config.norm_eps, "use_bias": config.attention.output_bias}

    def hf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the stored tensor; the MLP's projections have GPT-2's names."""
        index, leaf = split_layer(name)
        module, _, parameter = leaf.rpartition(".")
        stored = HF_LEAVES.get(module)
        return TensorSource(name if stored is None else f"layers.{index}.{stored}.{parameter}")

    def gguf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the tensor under llama.cpp's name."""
        return TensorSource(gguf_name(name, GGUF_LEAVES))

    def complete_json(self, config: ModelConfig, fields: Fields) -> ModelConfig:
        """Return the config with biases in all projections, unless use_bias is false."""
        stated = fields.flag("use_bias")
        has_bias = True if stated is None else stated
        attention = replace(config.attention, qkv_bias=has_bias, output_bias=has_bias)
        return replace(config, mlp_bias=has_bias, attention=attention)

    def complete_gguf(self, config: ModelConfig, keys: GGUFKeys, shapes: Shapes) -> ModelConfig:
        """Return the config with biases of the MLP if the file has them."""
        return replace(config, mlp_bias="blk.0.ffn_up.bias" in shapes)

    def gguf_fields(self, config: ModelConfig) -> Mapping[str, MetadataScalar]:
        """Return the key of the window, which llama.cpp ignores."""
        window = config.attention.sliding_window
        return {} if window is None else {WINDOW: window}


STARCODER2 = StarCoder2(
    ClassDefaults(
        model_type="starcoder2",
        window_rule="every",
        bias_rule="none",
        vocab_size=49_152,
        hidden_size=3072,
        intermediate_size=12_288,
        num_hidden_layers=30,
        num_attention_heads=24,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        norm_eps=1e-5,
        hidden_act="gelu_pytorch_tanh",
        tie_word_embeddings=True,
        bos_token_id=50_256,
        eos_token_ids=(50_256,),
        has_layer_norm=True,
        own_names={"layer_norm_epsilon": ("norm_epsilon",)},
    ),
    gguf_names=("starcoder2",),
)
