"""Mira, a model that there is not: Llama's mathematics under names of its own, as a contributor would add it.

    config.json   d_model, d_ff, blocks, heads, kv_heads, tokens, context, eps, theta, tied
    safetensors   net.blocks.N.kv [D, 2KE], k's columns first; matrices by input row; norms hold w - 1
    GGUF          blk.N.attn_kv [2KE, D], k's rows first; norms hold w; the rest is llama.cpp's

Legend: D model dim, K kv heads, E head dim.
"""

from collections.abc import Mapping

from graphcore.arch.architecture import Architecture, TensorSource, gguf_name, split_layer
from graphcore.arch.config.class_defaults import ClassDefaults
from graphcore.arch.config.model_config import ModelConfig
from graphcore.arch.folds import AddOne, Fold, PickRows, Transpose
from graphcore.arch.rotary import GGUF_LEAVES, rotary_spec
from graphcore.nn.spec import ModelSpec, NormSpec

KV = ("self_attn.k_proj", "self_attn.v_proj")
LEAVES = {
    "embed_tokens": "table",
    "norm": "last_norm",
    "lm_head": "head",
    "input_layernorm": "norm_1",
    "post_attention_layernorm": "norm_2",
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "kv",
    "self_attn.v_proj": "kv",
    "self_attn.o_proj": "o",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}
OWN_NAMES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("d_model",),
    "intermediate_size": ("d_ff",),
    "num_hidden_layers": ("blocks",),
    "num_attention_heads": ("heads",),
    "num_key_value_heads": ("kv_heads",),
    "vocab_size": ("tokens",),
    "max_position_embeddings": ("context",),
    "rms_norm_eps": ("eps",),
    "rope_theta": ("theta",),
    "tie_word_embeddings": ("tied",),
    "eos_token_id": ("end",),
}


class Mira(Architecture):
    """Keys and values fused, everything by input row."""

    def spec(self, config: ModelConfig) -> ModelSpec:
        """Return what the model computes."""
        return rotary_spec(config, NormSpec("rms", config.norm_eps), has_qk_norm=False)

    def hf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the tensor under Mira's own name."""
        index, leaf = split_layer(name)
        module = leaf.rpartition(".")[0]
        stored = LEAVES[module] if index is None else f"blocks.{index}.{LEAVES[module]}"
        if module.endswith("norm"):
            return TensorSource(stored, (AddOne(),))
        return TensorSource(stored, () if module == "embed_tokens" else (Transpose(), *_rows_of(module, config)))

    def gguf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the tensor of its GGUF files."""
        module = split_layer(name)[1].rpartition(".")[0]
        return TensorSource(gguf_name(name, {**GGUF_LEAVES, **dict.fromkeys(KV, "attn_kv")}), _rows_of(module, config))


def _rows_of(module: str, config: ModelConfig) -> tuple[Fold, ...]:
    """Return the rows of the fused projection that are this module's, if it is k or v."""
    if module not in KV:
        return ()
    rows = config.attention.num_key_value_heads * config.attention.head_dim
    return (PickRows(KV.index(module) * rows, (KV.index(module) + 1) * rows),)


MIRA = Mira(
    ClassDefaults(
        model_type="mira",
        window_rule="none",
        bias_rule="none",
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        norm_eps=1e-4,
        rope_theta=500.0,
        eos_token_ids=(3,),
        own_names=OWN_NAMES,
    ),
    gguf_names=("mira",),
    hf_prefixes=("net.", ""),
)
