"""GLM 4.5, 4.5-Air, 4.6 and 4.7, mixtures of experts: the first layers are dense, and half of each head rotates.

    Hugging Face  mlp.gate.weight [X, D], mlp.gate.e_score_correction_bias [X]     router, selection bias
                  mlp.experts.7.gate_proj [F, D]; or mlp.experts.gate_up_proj [X, 2F, D], gate first (transformers 5)
                  mlp.shared_experts.gate_proj ...                                  [n_shared_experts * F, D]
    GGUF          ffn_gate_inp.weight, exp_probs_b.bias
                  ffn_gate_exps ..., ffn_gate_shexp ...
                  post_attention_norm                                               norm before the MLP or the experts

Experts are chosen by the sigmoid of their scores plus the selection bias, their shares are without it
(`ScoredRouting`). Multi-token-prediction layers, stored behind the last layer, are left out.

Source: transformers, configuration_glm4_moe and modeling_glm4_moe; llama.cpp, src/models/glm4-moe.cpp.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from graphcore.arch.architecture import Shapes, TensorSource, gguf_name, split_layer
from graphcore.arch.config.class_defaults import ClassDefaults
from graphcore.arch.config.gguf_keys import GGUFKeys
from graphcore.arch.config.model_config import ExpertsConfig, ModelConfig
from graphcore.arch.config.typed_fields import LARGEST_SIZE, Fields
from graphcore.arch.families.qwen_moe import EXPERTS, QwenMoe, expert_settings_of, expert_width, mixture_spec
from graphcore.arch.rotary import GGUF_LEAVES, rotary_spec
from graphcore.checkpoint.gguf_reader import MetadataScalar
from graphcore.nn.spec import ModelSpec, NormSpec
from graphcore.routing import SCORES, ScoredRouting

LEAVES = {
    **GGUF_LEAVES,
    "post_attention_layernorm": "post_attention_norm",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
SELECTION_BIAS = "mlp.selection_bias"
SHARED, STORED_SHARED = "mlp.shared_expert.", "mlp.shared_experts."


@dataclass(frozen=True)
class GlmMoeSettings:
    """The settings that only GLM's mixtures have.

    Attributes:
        has_qk_norm: True if q and k are normalised per head (GLM 4.5, 4.6 and 4.7, not Air).
    """

    has_qk_norm: bool

    def cut(self, num_layers: int) -> "GlmMoeSettings":
        """Return the settings of the model's first layers: the same."""
        return self


@dataclass(frozen=True)
class GlmMoe(QwenMoe):
    """The architecture of GLM's mixtures: pre-norm blocks, a partial rotation, and a shared expert without a gate."""

    def spec(self, config: ModelConfig) -> ModelSpec:
        """Return the spec: dense layers, then layers with experts."""
        assert isinstance(config.own, GlmMoeSettings), "the config readers give every GLM its own settings"
        model = rotary_spec(config, NormSpec("rms", config.norm_eps), config.own.has_qk_norm)
        mixture = replace(mixture_spec(config), selection_bias=True, shared_gate=False, scores_in_float32=True)
        dense = expert_settings_of(config).mlp_only_layers
        blocks = (block if at in dense else replace(block, mlp=mixture) for at, block in enumerate(model.blocks))
        return replace(model, blocks=tuple(blocks))

    def own_settings(self, config: ModelConfig) -> Mapping[str, object]:
        """Return whether q and k are normalised."""
        assert isinstance(config.own, GlmMoeSettings), "the config readers give every GLM its own settings"
        return {"use_qk_norm": config.own.has_qk_norm}

    def hf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the stored tensor; for experts, the parameter of transformers that holds all of a layer."""
        index, leaf = split_layer(name)
        if leaf == SELECTION_BIAS:
            return TensorSource(f"layers.{index}.mlp.gate.e_score_correction_bias")
        if leaf.startswith(SHARED):
            return TensorSource(f"layers.{index}.{STORED_SHARED}{leaf.removeprefix(SHARED)}")
        return super().hf_source(name, config)

    def gguf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the tensor under llama.cpp's name."""
        index, leaf = split_layer(name)
        return TensorSource(f"blk.{index}.exp_probs_b.bias" if leaf == SELECTION_BIAS else gguf_name(name, LEAVES))

    def gguf_sources(self, name: str, config: ModelConfig) -> tuple[TensorSource, ...]:
        """Return the tensor of this projection; for gate and up of experts also the rows of a fused one."""
        is_of_experts = split_layer(name)[1].startswith(EXPERTS)
        return super().gguf_sources(name, config) if is_of_experts else (self.gguf_source(name, config),)

    def complete_json(self, config: ModelConfig, fields: Fields) -> ModelConfig:
        """Return the config with norms of q and k, dense layers, the shared experts and layers that predict more."""
        num_layers = config.num_hidden_layers
        shared = fields.count("n_shared_experts", LARGEST_SIZE, 1)
        dense = fields.count("first_k_dense_replace", LARGEST_SIZE, 1)
        predicting = fields.count("num_nextn_predict_layers", LARGEST_SIZE, 1)
        own = GlmMoeSettings(bool(fields.flag("use_qk_norm")))
        experts = _with_layers(expert_settings_of(config), shared, min(dense, num_layers))
        return replace(config, experts=experts, own=own, num_predicting_layers=predicting)

    def complete_gguf(self, config: ModelConfig, keys: GGUFKeys, shapes: Shapes) -> ModelConfig:
        """Return the config with norms of q and k, which the tensors show, dense layers and the shared experts."""
        shared = keys.fields.count(keys.name("expert_shared_count"), LARGEST_SIZE)
        dense = keys.fields.count(keys.name("leading_dense_block_count"), LARGEST_SIZE)
        own = GlmMoeSettings("blk.0.attn_q_norm.weight" in shapes)
        experts = _with_layers(expert_settings_of(config), shared, min(dense, config.num_hidden_layers))
        return replace(config, experts=experts, own=own)

    def gguf_fields(self, config: ModelConfig) -> Mapping[str, MetadataScalar | tuple[int, ...]]:
        """Return the keys of the experts, of their choice, and of the rotation."""
        experts, rope = expert_settings_of(config), config.rope
        assert experts.routing is not None, "GLM's experts have scores of their own"
        assert rope is not None, "every GLM rotates"
        return {
            **super().gguf_fields(config),
            "expert_shared_count": (experts.shared_expert_intermediate_size or 0) // expert_width(experts),
            "leading_dense_block_count": len(experts.mlp_only_layers),
            "expert_gating_func": SCORES[experts.routing.function],
            "expert_group_count": experts.routing.groups,
            "expert_group_used_count": experts.routing.used_groups,
            "expert_weights_norm": experts.routing.normalises,
            "expert_weights_scale": experts.routing.factor,
            "rope.dimension_count": rope.width or config.attention.head_dim,
        }


def _with_layers(experts: ExpertsConfig, shared: int, num_dense: int) -> ExpertsConfig:
    """Return the experts' settings with the width of `shared` shared experts, and the first layers without experts."""
    width = shared * expert_width(experts) or None
    return replace(experts, shared_expert_intermediate_size=width, mlp_only_layers=tuple(range(num_dense)))


GLM4_MOE = GlmMoe(
    ClassDefaults(
        model_type="glm4_moe",
        window_rule="none",
        bias_rule="qkv_flag",
        vocab_size=151_552,
        hidden_size=4096,
        intermediate_size=10_944,
        num_hidden_layers=46,
        num_attention_heads=96,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        norm_eps=1e-5,
        partial_rotary_factor=0.5,
        experts=ExpertsConfig(
            num_local_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=1408,
            routing=ScoredRouting("sigmoid"),
        ),
        own_names={"num_local_experts": ("n_routed_experts",), "num_nextn_predict_layers": ("num_mtp_layers",)},
        own_neutral={
            "n_routed_experts": None,
            "n_shared_experts": None,
            "partial_rotary_factor": None,
            "scoring_func": ("sigmoid",),
        },
        computed_gguf=("expert_shared_count", "nextn_predict_layers"),
    ),
    gguf_names=("glm4moe",),
)
