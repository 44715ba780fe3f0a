"""Llama 2 and 3, SmolLM2, TinyLlama, and Mistral: pre-norm blocks, gated SiLU, no per-head norms."""

from graphcore.arch.architecture import Architecture, TensorSource, gguf_name, split_layer
from graphcore.arch.folds import SplitPairs
from graphcore.arch.rotary import GGUF_LEAVES, rotary_spec
from graphcore.checkpoint.model_config import ModelConfig
from graphcore.nn.spec import ModelSpec, NormSpec


class Llama(Architecture):
    """The plain rotary decoder."""

    model_types = ("llama", "mistral")

    def spec(self, config: ModelConfig) -> ModelSpec:
        """Return what the model computes."""
        return rotary_spec(config, NormSpec("rms", config.rms_norm_eps), has_qk_norm=False)

    def hf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the tensor of the same name."""
        return TensorSource(name)

    def gguf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return llama.cpp's tensor; its q and k rows are in interleaved rotary order."""
        leaf = split_layer(name)[1]
        heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
        module = leaf.rpartition(".")[0]
        folds = (SplitPairs(heads[module]),) if module in heads else ()
        return TensorSource(gguf_name(name, GGUF_LEAVES), folds)


LLAMA = Llama()
