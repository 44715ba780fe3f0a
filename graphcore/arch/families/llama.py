"""Llama 2 and 3, SmolLM2, TinyLlama, and Mistral: pre-norm blocks, gated SiLU, no per-head norms.

Mistral Small 3.1 and later are the text models of multimodal ones (Mistral3ForConditionalGeneration).
"""

from collections.abc import Mapping

from graphcore.arch.architecture import Architecture, TensorSource, gguf_name, split_layer
from graphcore.arch.config.class_defaults import ClassDefaults
from graphcore.arch.config.gguf_keys import WINDOW
from graphcore.arch.config.model_config import ModelConfig
from graphcore.arch.folds import SplitPairs
from graphcore.arch.rotary import GGUF_LEAVES, rotary_spec
from graphcore.checkpoint.gguf_reader import MetadataScalar
from graphcore.nn.spec import ModelSpec, NormSpec

# Names and parts of multimodal Mistral models, whose text models are Mistral's or Ministral's.
MISTRAL_PREFIXES = ("model.", "language_model.model.", "model.language_model.", "")
MISTRAL_UNUSED = {"vision_tower.": "vision", "multi_modal_projector.": "its projector"}


class Llama(Architecture):
    """The architecture of Llama, the plain rotary decoder."""

    def spec(self, config: ModelConfig) -> ModelSpec:
        """Return the spec: a rotary model with RMSNorm."""
        return rotary_spec(config, NormSpec("rms", config.norm_eps), has_qk_norm=False)

    def hf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the stored tensor of the same name."""
        return TensorSource(name)

    def gguf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the tensor under llama.cpp's name; its rows of q and k are in interleaved rotary order."""
        leaf = split_layer(name)[1]
        heads = {
            "self_attn.q_proj": config.attention.num_attention_heads,
            "self_attn.k_proj": config.attention.num_key_value_heads,
        }
        module = leaf.rpartition(".")[0]
        folds = (SplitPairs(heads[module]),) if module in heads else ()
        return TensorSource(gguf_name(name, GGUF_LEAVES), folds)

    def gguf_fields(self, config: ModelConfig) -> Mapping[str, MetadataScalar]:
        """Return the key of Mistral's window, which llama.cpp ignores."""
        window = config.attention.sliding_window
        return {} if window is None else {WINDOW: window}


LLAMA = Llama(
    ClassDefaults(
        model_type="llama",
        window_rule="none",
        bias_rule="flags",
        vocab_size=32_000,
        hidden_size=4096,
        intermediate_size=11_008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=None,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_ids=(2,),
        quant_methods=("bitnet",),
    ),
    gguf_names=("llama",),  # also Mistral, SmolLM2 and TinyLlama
)
MISTRAL = Llama(
    ClassDefaults(
        model_type="mistral",
        window_rule="every",
        bias_rule="none",
        vocab_size=32_000,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        bos_token_id=1,
        eos_token_ids=(2,),
        sliding_window=4096,
        quant_methods=("bitnet",),
    ),
    gguf_names=("llama",),
    is_read_from_gguf=False,
    is_read_with_window=True,
    nested_in="mistral3",
    nested_ties=True,
    hf_prefixes=MISTRAL_PREFIXES,
    unused=MISTRAL_UNUSED,
)
