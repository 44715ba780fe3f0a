"""BitNet b1.58: Llama's block with a norm before each output projection, ternary weights and int8 activations.

    x += o_proj(attn_sub_norm(attention(q, k, v)))        x += down_proj(ffn_sub_norm(relu(gate)^2 * up))

Source: transformers, models/bitnet/modeling_bitnet.py; microsoft/BitNet for the GGUF names. GGUF keeps the row order.
"""

from dataclasses import replace

from graphcore.arch.architecture import Architecture, TensorSource, gguf_name
from graphcore.arch.rotary import GGUF_LEAVES, rotary_spec
from graphcore.checkpoint.model_config import ModelConfig
from graphcore.nn.spec import BlockSpec, MLPSpec, ModelSpec, NormSpec

LEAVES = {**GGUF_LEAVES, "self_attn.attn_sub_norm": "attn_sub_norm", "mlp.ffn_sub_norm": "ffn_sub_norm"}


class BitNet(Architecture):
    """The 2B-4T and its kin."""

    model_types = ("bitnet",)

    def spec(self, config: ModelConfig) -> ModelSpec:
        """Return what the model computes."""
        norm = NormSpec("rms", config.rms_norm_eps)
        plain = rotary_spec(config, norm, has_qk_norm=False)
        return replace(plain, blocks=tuple(_with_sub_norms(block, norm) for block in plain.blocks))

    def hf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the tensor of the same name."""
        return TensorSource(name)

    def gguf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return llama.cpp's tensor."""
        return TensorSource(gguf_name(name, LEAVES))


def _with_sub_norms(block: BlockSpec, norm: NormSpec) -> BlockSpec:
    assert isinstance(block.mlp, MLPSpec), "rotary_spec makes no experts"
    return replace(block, attention=replace(block.attention, sub_norm=norm), mlp=replace(block.mlp, sub_norm=norm))


BITNET = BitNet()
