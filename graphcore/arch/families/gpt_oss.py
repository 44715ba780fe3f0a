"""gpt-oss 20B and 120B: sinks, every other layer slides, biases, and a mixture of clamped SwiGLU experts.

    Hugging Face  experts.gate_up_proj          [X, D, 2F] bf16, by input row; gate and up alternate
                  experts.gate_up_proj_blocks   [X, 2F, D] mxfp4, by output row; gate and up alternate
    GGUF          ffn_gate_exps, ffn_up_exps    [X, F, D]; or ffn_gate_up_exps [X, 2F, D], gate first
                  attn_q, attn_k, attn_v        or attn_qkv, in this order

Source: openai/gpt-oss, gpt_oss/torch/model.py; transformers, modeling_gpt_oss; llama.cpp, conversion of GptOssModel.
"""

from graphcore.arch.architecture import Architecture, TensorSource, gguf_name, split_layer
from graphcore.arch.folds import Fold, PickRows, Transpose
from graphcore.arch.rotary import GGUF_LEAVES, attention_of, layer_types
from graphcore.checkpoint.model_config import ModelConfig
from graphcore.nn.spec import BlockSpec, ModelSpec, MoESpec, NormSpec

LEAVES = {
    **GGUF_LEAVES,
    "post_attention_layernorm": "post_attention_norm",
    "mlp.router": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
SINKS = "self_attn.sinks"
EXPERTS = "mlp.experts."
FUSED_PARTS = ("mlp.experts.gate_proj", "mlp.experts.up_proj")
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


class GptOss(Architecture):
    """Pre-norm blocks; norms multiply in float32."""

    model_types = ("gpt_oss",)

    def spec(self, config: ModelConfig) -> ModelSpec:
        """Return what the model computes."""
        norm = NormSpec("rms", config.rms_norm_eps, scale_in_float32=True)
        attention = {kind: attention_of(config, kind, has_sinks=True) for kind in set(layer_types(config))}
        mlp = _experts_of(config)
        return ModelSpec(
            dim=config.hidden_size,
            vocab=config.vocab_size,
            blocks=tuple(BlockSpec(config.hidden_size, norm, attention[kind], mlp) for kind in layer_types(config)),
            norm=norm,
            context=config.max_position_embeddings,
            tied=config.tie_word_embeddings,
        )

    def hf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the tensor of the same name; for experts, transformers' own dense parameter."""
        index, leaf = split_layer(name)
        if not leaf.startswith(EXPERTS):
            return TensorSource(name)
        folds = _interleaved(leaf, config)
        if leaf.endswith(".bias"):
            return TensorSource(_stored_expert(index, leaf, "_bias"), folds)
        return TensorSource(_stored_expert(index, leaf, ""), (Transpose(), *folds))

    def hf_sources(self, name: str, config: ModelConfig) -> tuple[TensorSource, ...]:
        """Return the dense tensor or, for experts' weights, MXFP4 blocks, whose rows are output features already."""
        index, leaf = split_layer(name)
        dense = self.hf_source(name, config)
        if not leaf.startswith(EXPERTS) or leaf.endswith(".bias"):
            return (dense,)
        return (dense, TensorSource(_stored_expert(index, leaf, "_blocks"), _interleaved(leaf, config)))

    def gguf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return llama.cpp's tensor; its converter has taken gate and up apart."""
        index, leaf = split_layer(name)
        return TensorSource(f"blk.{index}.attn_sinks.weight" if leaf == SINKS else gguf_name(name, LEAVES))

    def gguf_sources(self, name: str, config: ModelConfig) -> tuple[TensorSource, ...]:
        """Return the tensor by itself, or fused with its neighbours."""
        alone = self.gguf_source(name, config)
        module = split_layer(name)[1].rpartition(".")[0]
        if module in QKV:
            rows = _rows_of_qkv(module, config)
            return alone, TensorSource(gguf_name(name, {module: "attn_qkv"}), (rows,))
        if module in FUSED_PARTS:
            begin = FUSED_PARTS.index(module) * config.intermediate_size
            rows = PickRows(begin, begin + config.intermediate_size, axis=_axis_of_rows(name))
            return alone, TensorSource(gguf_name(name, {module: "ffn_gate_up_exps"}), (rows,))
        return (alone,)


def _experts_of(config: ModelConfig) -> MoESpec:
    """Return the mixture of a config, whose reader gives every gpt_oss its experts."""
    assert config.num_local_experts is not None
    assert config.num_experts_per_tok is not None
    assert config.swiglu_limit is not None
    assert config.swiglu_alpha is not None
    return MoESpec(
        experts=config.num_local_experts,
        top_k=config.num_experts_per_tok,
        hidden=config.intermediate_size,
        limit=config.swiglu_limit,
        alpha=config.swiglu_alpha,
    )


def _axis_of_rows(name: str) -> int:
    """Return where output features lie: [X, O, I] weights, [X, O] biases."""
    return -1 if name.endswith(".bias") else -2


def _stored_expert(index: int | None, leaf: str, suffix: str) -> str:
    """Return Hugging Face's name: "mlp.experts.up_proj.weight" to "layers.3.mlp.experts.gate_up_proj" and suffix."""
    module = leaf.rpartition(".")[0]
    stored = f"{EXPERTS}gate_up_proj" if module in FUSED_PARTS else module
    return f"layers.{index}.{stored}{suffix}"


def _interleaved(leaf: str, config: ModelConfig) -> tuple[Fold, ...]:
    """Return every other row, from the first for gate, from the second for up; all of them for down."""
    module = leaf.rpartition(".")[0]
    if module not in FUSED_PARTS:
        return ()
    return (PickRows(FUSED_PARTS.index(module), 2 * config.intermediate_size, step=2, axis=_axis_of_rows(leaf)),)


def _rows_of_qkv(module: str, config: ModelConfig) -> PickRows:
    """Return the rows of q, k or v in attn_qkv."""
    queries = config.num_attention_heads * config.computed_head_dim
    keys = config.num_key_value_heads * config.computed_head_dim
    begin = (0, queries, queries + keys)[QKV.index(module)]
    return PickRows(begin, begin + (queries if module == QKV[0] else keys))


GPT_OSS = GptOss()
