"""Gemma 3 text models, 270M to 27B: sandwich norms, five sliding layers to each full one, two rotations."""

from graphcore.arch.architecture import Architecture, TensorSource, gguf_name
from graphcore.arch.folds import AddOne
from graphcore.arch.rotary import GGUF_LEAVES, rotary_spec
from graphcore.checkpoint.model_config import ModelConfig
from graphcore.nn.spec import ModelSpec, NormSpec

LEAVES = {
    **GGUF_LEAVES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


class Gemma3(Architecture):
    """Norms hold 1 + w and multiply in float32; embeddings are scaled by sqrt(dim)."""

    model_types = ("gemma3_text",)
    hf_prefixes = ("model.", "language_model.model.", "model.language_model.", "")
    ignored = ("rotary_emb.inv_freq", "vision_tower.", "multi_modal_projector.")

    def spec(self, config: ModelConfig) -> ModelSpec:
        """Return what the model computes."""
        norm = NormSpec("rms", config.rms_norm_eps, scale_in_float32=True)
        return rotary_spec(config, norm, has_qk_norm=True, is_gemma=True)

    def hf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the tensor of the same name; norms are stored as their distance from one."""
        return TensorSource(name, (AddOne(),) if name.endswith("norm.weight") else ())

    def gguf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return llama.cpp's tensor; its converter has added the one."""
        return TensorSource(gguf_name(name, LEAVES))


GEMMA3 = Gemma3()
