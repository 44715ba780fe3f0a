"""gpt-oss 20B and 120B: attention sinks, a window in every other layer, biases, and clamped SwiGLU experts.

    Hugging Face  experts.gate_up_proj          [X, D, 2F] bf16, by input row; gate and up alternate
                  experts.gate_up_proj_blocks   [X, 2F, D] mxfp4, by output row; gate and up alternate
    GGUF          ffn_gate_exps, ffn_up_exps    [X, F, D]; or ffn_gate_up_exps [X, 2F, D], gate first
                  attn_q, attn_k, attn_v        or attn_qkv, in this order

Source: openai/gpt-oss, gpt_oss/torch/model.py; transformers, modeling_gpt_oss; llama.cpp, conversion of GptOssModel.
"""

from collections.abc import Mapping

from graphcore.activations import CLAMPED_SWIGLU, Gating
from graphcore.arch.architecture import Architecture, Shapes, TensorSource, gguf_name, split_layer
from graphcore.arch.config.class_defaults import ClassDefaults
from graphcore.arch.config.gguf_keys import WINDOW, GGUFKeys
from graphcore.arch.config.model_config import ExpertsConfig, ModelConfig
from graphcore.arch.folds import Fold, PickRows, Transpose
from graphcore.arch.rotary import GGUF_LEAVES, QKV, attention_of, layer_types, longest_context, rows_of_qkv
from graphcore.checkpoint.gguf_reader import MetadataScalar
from graphcore.nn.spec import BlockSpec, ModelSpec, MoESpec, NormSpec

LEAVES = {**GGUF_LEAVES, "post_attention_layernorm": "post_attention_norm"}
SINKS = "self_attn.sinks"
EXPERTS = "mlp.experts."
FUSED_PARTS = ("mlp.experts.gate_proj", "mlp.experts.up_proj")


class GptOss(Architecture):
    """The architecture of gpt-oss: pre-norm blocks, with norms that multiply in float32."""

    def spec(self, config: ModelConfig) -> ModelSpec:
        """Return the spec: rotary attention with sinks, and a mixture of experts in each layer."""
        norm = NormSpec("rms", config.norm_eps, scale_in_float32=True)
        attention = {kind: attention_of(config, kind, has_sinks=True) for kind in set(layer_types(config))}
        mlp = _experts_of(config)
        return ModelSpec(
            dim=config.hidden_size,
            vocab=config.vocab_size,
            blocks=tuple(BlockSpec(config.hidden_size, norm, attention[kind], mlp) for kind in layer_types(config)),
            norm=norm,
            context=longest_context(config),
            tied=config.tie_word_embeddings,
        )

    def hf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the stored tensor of the same name; for experts, the dense parameter of transformers."""
        index, leaf = split_layer(name)
        if not leaf.startswith(EXPERTS):
            return TensorSource(name)
        folds = _interleaved(leaf, config)
        if leaf.endswith(".bias"):
            return TensorSource(_stored_expert(index, leaf, "_bias"), folds)
        return TensorSource(_stored_expert(index, leaf, ""), (Transpose(), *folds))

    def hf_sources(self, name: str, config: ModelConfig) -> tuple[TensorSource, ...]:
        """Return the dense tensor, and for experts' weights also MXFP4 blocks, whose rows are output features."""
        index, leaf = split_layer(name)
        dense = self.hf_source(name, config)
        if not leaf.startswith(EXPERTS) or leaf.endswith(".bias"):
            return (dense,)
        return (dense, TensorSource(_stored_expert(index, leaf, "_blocks"), _interleaved(leaf, config)))

    def gguf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the tensor under llama.cpp's name; its converter separates gate and up."""
        index, leaf = split_layer(name)
        return TensorSource(f"blk.{index}.attn_sinks.weight" if leaf == SINKS else gguf_name(name, LEAVES))

    def gguf_sources(self, name: str, config: ModelConfig) -> tuple[TensorSource, ...]:
        """Return the separate tensor, and for q, k, v, gate and up also the rows of a fused one."""
        alone = self.gguf_source(name, config)
        module = split_layer(name)[1].rpartition(".")[0]
        if module in QKV:
            rows = rows_of_qkv(module, config)
            return alone, TensorSource(gguf_name(name, {module: "attn_qkv"}), (rows,))
        if module in FUSED_PARTS:
            begin = FUSED_PARTS.index(module) * config.intermediate_size
            rows = PickRows(begin, begin + config.intermediate_size, axis=_axis_of_rows(name))
            return alone, TensorSource(gguf_name(name, {module: "ffn_gate_up_exps"}), (rows,))
        return (alone,)

    def complete_gguf(self, config: ModelConfig, keys: GGUFKeys, shapes: Shapes) -> ModelConfig:
        """Return the config unchanged, after a check that the file states the window, as llama.cpp needs it."""
        keys.check_required((WINDOW,))
        keys.required_size(WINDOW)
        return config

    def gguf_fields(self, config: ModelConfig) -> Mapping[str, MetadataScalar]:
        """Return the keys of the window and the experts."""
        assert config.experts is not None, "every gpt_oss has experts"
        return {
            WINDOW: config.attention.sliding_window or 0,
            "expert_count": config.experts.num_local_experts,
            "expert_used_count": config.experts.num_experts_per_tok,
            "expert_feed_forward_length": config.intermediate_size,
        }


def _experts_of(config: ModelConfig) -> MoESpec:
    """Return the spec of the experts that a config describes."""
    experts = config.experts
    assert experts is not None, "the config readers give every gpt_oss its experts"
    limit, alpha = experts.swiglu_limit, experts.swiglu_alpha
    assert limit is not None, "gpt_oss has a default"
    assert alpha is not None, "gpt_oss has a default"
    return MoESpec(
        experts=experts.num_local_experts,
        top_k=experts.num_experts_per_tok,
        hidden=config.intermediate_size,
        gating=Gating(CLAMPED_SWIGLU, limit, alpha),
        bias=True,
        router_bias=True,
    )


def _axis_of_rows(name: str) -> int:
    """Return the axis of output features: of weights [X, O, I], or biases [X, O]."""
    return -1 if name.endswith(".bias") else -2


def _stored_expert(index: int | None, leaf: str, suffix: str) -> str:
    """Return Hugging Face's name: "mlp.experts.up_proj.weight" to "layers.3.mlp.experts.gate_up_proj" + suffix."""
    module = leaf.rpartition(".")[0]
    stored = f"{EXPERTS}gate_up_proj" if module in FUSED_PARTS else module
    return f"layers.{index}.{stored}{suffix}"


def _interleaved(leaf: str, config: ModelConfig) -> tuple[Fold, ...]:
    """Return the fold that picks even rows for gate, odd rows for up; none for down."""
    module = leaf.rpartition(".")[0]
    if module not in FUSED_PARTS:
        return ()
    return (PickRows(FUSED_PARTS.index(module), 2 * config.intermediate_size, step=2, axis=_axis_of_rows(leaf)),)


GPT_OSS = GptOss(
    ClassDefaults(
        model_type="gpt_oss",
        window_rule="pattern",
        bias_rule="attention_flag",
        vocab_size=201_088,
        hidden_size=2880,
        intermediate_size=2880,
        num_hidden_layers=36,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        head_dim=64,
        norm_eps=1e-5,
        rope_theta=150_000.0,
        sliding_window=128,
        sliding_window_pattern=2,
        attention_bias=True,
        rope_scaling={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
        yarn_truncate=False,  # openai/gpt-oss, gpt_oss/torch/model.py, does not round the ramp
        experts=ExpertsConfig(num_local_experts=128, num_experts_per_tok=4, swiglu_limit=7.0, swiglu_alpha=1.702),
        quant_methods=("mxfp4",),
    ),
    gguf_names=("gpt-oss",),
)
