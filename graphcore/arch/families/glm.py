"""GLM 4 0414 (9B, 32B, Z1; `glm4`) and GLM 4 9B and Edge (`glm`): adjacent features of a part of each head rotate.

    norms         glm4 also normalises what attention and MLP return, before it is added (sandwich); glm does not
    biases        on q, k and v

    Hugging Face  mlp.gate_up_proj [2F, D], gate first
                  post_self_attn_layernorm, post_attention_layernorm, post_mlp_layernorm   behind attention, before and
                                                                                           behind the MLP (glm4)
    GGUF          ffn_up [2F, D], gate first
                  post_attention_norm, ffn_norm, post_ffw_norm                             the same three norms
                  attn_q, attn_k, attn_v; or attn_qkv, in this order (chatglm)

Both pair features 2i and 2i + 1 of a head's rotated part, so the rows of q and k are reordered at load (`SplitPairs`).

Source: transformers, modeling_glm and modeling_glm4; llama.cpp, src/models/glm4.cpp and chatglm.cpp.
"""

from dataclasses import dataclass, replace

from graphcore.arch.architecture import Architecture, Shapes, TensorSource, gguf_name, split_layer
from graphcore.arch.config.class_defaults import ClassDefaults
from graphcore.arch.config.gguf_keys import GGUFKeys
from graphcore.arch.config.model_config import ModelConfig
from graphcore.arch.folds import Fold, SplitPairs
from graphcore.arch.rotary import FUSED_MLP, GGUF_LEAVES, QKV, rotary_spec, rows_of_gate_and_up, rows_of_qkv
from graphcore.errors import UnsupportedError
from graphcore.nn.spec import ModelSpec, NormSpec

SANDWICH_LEAVES = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}
LEAVES = {**GGUF_LEAVES, "mlp.gate_proj": "ffn_up"}
GGUF_SANDWICH_LEAVES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
SECTIONS = "rope.dimension_sections"


@dataclass(frozen=True)
class Glm(Architecture):
    """The architecture of dense GLM 4 models.

    Attributes:
        is_sandwich: True if each sublayer's output is normalised, too (`glm4`).
    """

    is_sandwich: bool = False

    def spec(self, config: ModelConfig) -> ModelSpec:
        """Return the spec: a rotary model with RMSNorm, with norms behind each sublayer if it is a sandwich."""
        model = rotary_spec(config, NormSpec("rms", config.norm_eps), has_qk_norm=False)
        return replace(model, blocks=tuple(replace(one, sandwich=self.is_sandwich) for one in model.blocks))

    def hf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the stored tensor: gate and up are halves of one, and q and k are in the order of pairs."""
        index, leaf = split_layer(name)
        module, _, parameter = leaf.rpartition(".")
        if module in FUSED_MLP:
            return TensorSource(f"layers.{index}.mlp.gate_up_proj.{parameter}", (rows_of_gate_and_up(module, config),))
        if self.is_sandwich and module in SANDWICH_LEAVES:
            return TensorSource(f"layers.{index}.{SANDWICH_LEAVES[module]}.{parameter}")
        return TensorSource(name, _split_pairs(module, config))

    def gguf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the tensor under llama.cpp's name, whose rows are in the order of safetensors."""
        module = split_layer(name)[1].rpartition(".")[0]
        leaves = {**LEAVES, **(GGUF_SANDWICH_LEAVES if self.is_sandwich else {})}
        folds = (rows_of_gate_and_up(module, config),) if module in FUSED_MLP else _split_pairs(module, config)
        return TensorSource(gguf_name(name, leaves), folds)

    def gguf_sources(self, name: str, config: ModelConfig) -> tuple[TensorSource, ...]:
        """Return the separate tensor, and for q, k and v also the rows of a fused one."""
        alone, module = self.gguf_source(name, config), split_layer(name)[1].rpartition(".")[0]
        if module not in QKV:
            return (alone,)
        folds = (rows_of_qkv(module, config), *alone.folds)
        return alone, TensorSource(gguf_name(name, {module: "attn_qkv"}), folds)

    def complete_gguf(self, config: ModelConfig, keys: GGUFKeys, shapes: Shapes) -> ModelConfig:
        """Return the config with biases of a fused q, k and v.

        Raises:
            UnsupportedError: the file is of a multimodal GLM, whose q and k are in another order.
        """
        if keys.fields.raw.get(keys.name(SECTIONS)) is not None:
            raise UnsupportedError(
                f"{keys.fields.source}: {keys.name(SECTIONS)} is not supported: a multimodal GLM has its rows of q and "
                "k in another order; use a text model"
            )
        has_bias = config.attention.qkv_bias or "blk.0.attn_qkv.bias" in shapes
        return replace(config, attention=replace(config.attention, qkv_bias=has_bias))


def _split_pairs(module: str, config: ModelConfig) -> tuple[Fold, ...]:
    """Return the fold from adjacent rotary pairs to halves, of the rows of q and k; none for other modules."""
    heads = {QKV[0]: config.attention.num_attention_heads, QKV[1]: config.attention.num_key_value_heads}
    assert config.rope is not None, "every GLM rotates"
    return (SplitPairs(heads[module], config.rope.width),) if module in heads else ()


GLM4 = Glm(
    ClassDefaults(
        model_type="glm4",
        window_rule="none",
        bias_rule="qkv_flag",
        vocab_size=151_552,
        hidden_size=4096,
        intermediate_size=13_696,
        num_hidden_layers=40,
        num_attention_heads=32,
        num_key_value_heads=2,
        max_position_embeddings=131_072,
        head_dim=128,
        norm_eps=1.5625e-7,
        eos_token_ids=(151_329, 151_336, 151_338),
        partial_rotary_factor=0.5,
        attention_bias=True,
        own_neutral={"partial_rotary_factor": None},
    ),
    gguf_names=("glm4",),
    is_sandwich=True,
)
GLM = Glm(replace(GLM4.defaults, model_type="glm"), gguf_names=("chatglm",))
