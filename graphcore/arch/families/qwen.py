"""Qwen 2 (biases on q, k, v) and Qwen 3 (per-head norms on q and k)."""

from dataclasses import dataclass

from graphcore.arch.architecture import Architecture, TensorSource, gguf_name
from graphcore.arch.config.class_defaults import ClassDefaults
from graphcore.arch.config.model_config import ModelConfig
from graphcore.arch.rotary import GGUF_LEAVES, rotary_spec
from graphcore.nn.spec import ModelSpec, NormSpec


@dataclass(frozen=True)
class Qwen(Architecture):
    """The architecture of Qwen: Llama's block with biases or per-head norms; GGUF keeps the row order.

    Attributes:
        has_qk_norm: True if q and k are normalised per head (Qwen 3).
    """

    has_qk_norm: bool = False

    def spec(self, config: ModelConfig) -> ModelSpec:
        """Return the spec: a rotary model with RMSNorm."""
        return rotary_spec(config, NormSpec("rms", config.norm_eps), self.has_qk_norm)

    def hf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the stored tensor of the same name."""
        return TensorSource(name)

    def gguf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the tensor under llama.cpp's name."""
        return TensorSource(gguf_name(name, GGUF_LEAVES))


QWEN2 = Qwen(
    ClassDefaults(
        model_type="qwen2",
        window_rule="opt_in",
        bias_rule="qkv",
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=22_016,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        max_position_embeddings=32_768,
        sliding_window=4096,
        max_window_layers=28,
        quant_methods=("bitnet",),
    ),
    gguf_names=("qwen2",),
)
QWEN3 = Qwen(
    ClassDefaults(
        model_type="qwen3",
        window_rule="opt_in",
        bias_rule="attention_flag",
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=22_016,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        max_position_embeddings=32_768,
        head_dim=128,
        sliding_window=4096,
        max_window_layers=28,
        quant_methods=("bitnet",),
    ),
    gguf_names=("qwen3",),
    has_qk_norm=True,
)
