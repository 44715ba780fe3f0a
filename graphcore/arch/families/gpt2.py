"""GPT-2: LayerNorm with bias, learned positions, fused qkv, plain GELU MLP.

Hugging Face stores projections by input row (Conv1D); GGUF by output row. Both fuse q, k, v in this order.
"""

from graphcore.arch.architecture import Architecture, TensorSource, gguf_name, split_layer
from graphcore.arch.folds import Fold, PickRows, Transpose
from graphcore.arch.gpt2_gguf import check_gpt2_tensors
from graphcore.checkpoint.checkpoint import Checkpoint
from graphcore.checkpoint.model_config import ModelConfig
from graphcore.nn.spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec, NormSpec

HF_LEAVES = {
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
    "embed_tokens": "wte",
    "norm": "ln_f",
    "lm_head": "lm_head",
}
GGUF_LEAVES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
}
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
POSITIONS = "embed_tokens.positions"
BY_INPUT_ROW = (*QKV, "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")


class GPT2(Architecture):
    """The one family here without rotation."""

    model_types = ("gpt2",)
    hf_prefixes = ("", "transformer.")
    ignored = (".attn.bias", ".attn.masked_bias")

    def spec(self, config: ModelConfig) -> ModelSpec:
        """Return what the model computes."""
        assert config.layer_norm_eps is not None, "the config reader gives every gpt2 a layer_norm_eps"
        norm = NormSpec("layer", config.layer_norm_eps)
        heads, head_dim = config.num_attention_heads, config.computed_head_dim
        attention = AttentionSpec(heads, heads, head_dim, head_dim**-0.5, qkv_bias=True, output_bias=True)
        mlp = MLPSpec(config.intermediate_size, config.hidden_act, gated=False, bias=True)
        block = BlockSpec(config.hidden_size, norm, attention, mlp, int8_activations=config.ternary)
        return ModelSpec(
            dim=config.hidden_size,
            vocab=config.vocab_size,
            blocks=(block,) * config.num_hidden_layers,
            norm=norm,
            context=config.max_position_embeddings,
            positions=config.max_position_embeddings,
            tied=config.tie_word_embeddings,
        )

    def hf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the tensor under GPT-2's own names, its Conv1D weights transposed."""
        if name == POSITIONS:
            return TensorSource("wpe.weight")
        index, leaf = split_layer(name)
        module, _, parameter = leaf.rpartition(".")
        stored = f"{'attn.c_attn' if module in QKV else HF_LEAVES[module]}.{parameter}"
        transposes = (Transpose(),) if module in BY_INPUT_ROW and parameter == "weight" else ()
        prefix = "" if index is None else f"h.{index}."
        return TensorSource(prefix + stored, (*transposes, *_rows_of(module, config)))

    def gguf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return llama.cpp's tensor."""
        if name == POSITIONS:
            return TensorSource("position_embd.weight")
        leaves = {**GGUF_LEAVES, **dict.fromkeys(QKV, "attn_qkv")}
        module = split_layer(name)[1].rpartition(".")[0]
        return TensorSource(gguf_name(name, leaves), _rows_of(module, config))

    def check_gguf(self, checkpoint: Checkpoint, config: ModelConfig, num_layers: int) -> None:
        """Check that names and shapes are GPT-2's."""
        check_gpt2_tensors(checkpoint, config, num_layers)


def _rows_of(module: str, config: ModelConfig) -> tuple[Fold, ...]:
    """Return the rows of the fused projection that are this module's, if it is one of q, k, v."""
    if module not in QKV:
        return ()
    part = QKV.index(module)
    return (PickRows(part * config.hidden_size, (part + 1) * config.hidden_size),)


GPT_2 = GPT2()
