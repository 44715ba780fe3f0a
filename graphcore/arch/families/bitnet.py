"""BitNet b1.58: Llama's block with a norm before each output projection, ternary weights and int8 activations.

    x += o_proj(attn_sub_norm(attention(q, k, v)))        x += down_proj(ffn_sub_norm(relu(gate)^2 * up))

Source: transformers, models/bitnet/modeling_bitnet.py; microsoft/BitNet for the GGUF names. GGUF keeps the row order.
"""

from dataclasses import replace

from graphcore.arch.architecture import Architecture, Shapes, TensorSource, gguf_name
from graphcore.arch.config.class_defaults import ClassDefaults
from graphcore.arch.config.gguf_keys import GGUFKeys
from graphcore.arch.config.model_config import ModelConfig
from graphcore.arch.rotary import GGUF_LEAVES, rotary_spec
from graphcore.nn.spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec, NormSpec

LEAVES = {**GGUF_LEAVES, "self_attn.attn_sub_norm": "attn_sub_norm", "mlp.ffn_sub_norm": "ffn_sub_norm"}


class BitNet(Architecture):
    """The architecture of BitNet b1.58 2B-4T and related models."""

    def spec(self, config: ModelConfig) -> ModelSpec:
        """Return the spec: a rotary model with norms before the output projections."""
        norm = NormSpec("rms", config.norm_eps)
        plain = rotary_spec(config, norm, has_qk_norm=False)
        return replace(plain, blocks=tuple(_with_sub_norms(block, norm) for block in plain.blocks))

    def hf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the stored tensor of the same name."""
        return TensorSource(name)

    def gguf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the tensor under llama.cpp's name."""
        return TensorSource(gguf_name(name, LEAVES))

    def gguf_defaults(self, gguf_name: str) -> ClassDefaults:
        """Return the defaults of the 2B-4T; for "bitnet" files (1bitLLM's 3B, llama.cpp's converter) with SiLU."""
        return replace(self.defaults, hidden_act="silu") if gguf_name == "bitnet" else self.defaults

    def complete_gguf(self, config: ModelConfig, keys: GGUFKeys, shapes: Shapes) -> ModelConfig:
        """Return the config with multiplied scales, as in the 2B-4T, which is an "autobitlinear" model."""
        return replace(config, ternary="multiplied")


def _with_sub_norms(block: BlockSpec, norm: NormSpec) -> BlockSpec:
    assert isinstance(block.mlp, MLPSpec), "rotary_spec makes no experts"
    assert isinstance(block.attention, AttentionSpec), "BitNet attends in every layer"
    return replace(block, attention=replace(block.attention, sub_norm=norm), mlp=replace(block.mlp, sub_norm=norm))


BITNET = BitNet(
    ClassDefaults(
        model_type="bitnet",
        window_rule="none",
        bias_rule="attention_flag",
        vocab_size=128_256,
        hidden_size=2560,
        intermediate_size=6912,
        num_hidden_layers=30,
        num_attention_heads=20,
        num_key_value_heads=5,
        max_position_embeddings=2048,
        norm_eps=1e-5,
        hidden_act="relu2",
        bos_token_id=128_000,
        eos_token_ids=(128_001,),
        rope_theta=500_000.0,
        quant_methods=("bitnet",),
    ),
    # The 2B-4T; its first upload, with an untied head; other models, see `gguf_defaults`.
    gguf_names=("bitnet-b1.58", "bitnet-25", "bitnet"),
)
