"""Qwen 2 (biases on q, k, v) and Qwen 3 (per-head norms on q and k)."""

from graphcore.arch.architecture import Architecture, TensorSource, gguf_name
from graphcore.arch.rotary import GGUF_LEAVES, rotary_spec
from graphcore.checkpoint.model_config import ModelConfig
from graphcore.nn.spec import ModelSpec, NormSpec


class Qwen(Architecture):
    """Llama's block with biases or per-head norms; GGUF keeps the row order."""

    def __init__(self, model_type: str, has_qk_norm: bool) -> None:
        self.model_types = (model_type,)
        self.has_qk_norm = has_qk_norm

    def spec(self, config: ModelConfig) -> ModelSpec:
        """Return what the model computes."""
        return rotary_spec(config, NormSpec("rms", config.rms_norm_eps), self.has_qk_norm)

    def hf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the tensor of the same name."""
        return TensorSource(name)

    def gguf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return llama.cpp's tensor."""
        return TensorSource(gguf_name(name, GGUF_LEAVES))


QWEN2 = Qwen("qwen2", has_qk_norm=False)
QWEN3 = Qwen("qwen3", has_qk_norm=True)
