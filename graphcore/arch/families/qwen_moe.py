"""Qwen 3 mixtures of experts (30B-A3B, 235B-A22B): Qwen 3's attention, and experts instead of the MLP in most layers.

    Hugging Face  mlp.gate                      router, [X, D]
                  mlp.experts.7.gate_proj       [F, D]; published files have one tensor per expert
                  mlp.experts.gate_up_proj      [X, 2F, D], gate first; parameters of transformers 5
                  mlp.experts.down_proj         [X, D, F]
    GGUF          ffn_gate_inp                  router
                  ffn_gate_exps, ffn_up_exps    [X, F, D]; or ffn_gate_up_exps [X, 2F, D], gate first
                  ffn_down_exps                 [X, D, F]

GGUF has no key for norm_topk_prob: llama.cpp always renormalises the weights of a token's experts to sum to one, and so
does graphcore for GGUF files. In llama.cpp every layer has experts.

Source: transformers, modeling_qwen3_moe; llama.cpp, src/models/qwen3moe.cpp.
"""

from collections.abc import Mapping
from dataclasses import replace

from graphcore.activations import Gating
from graphcore.arch.architecture import TensorSource, gguf_name, split_layer
from graphcore.arch.config.class_defaults import ClassDefaults
from graphcore.arch.config.model_config import ExpertsConfig, ModelConfig
from graphcore.arch.families.qwen import Qwen
from graphcore.arch.folds import PickRows
from graphcore.arch.rotary import GATE_AND_UP, half_of_experts
from graphcore.checkpoint.gguf_reader import MetadataScalar
from graphcore.nn.spec import ModelSpec, MoESpec

ROUTER = "mlp.router.weight"
EXPERTS = "mlp.experts."


class QwenMoe(Qwen):
    """The architecture of Qwen 3 mixtures: Qwen 3's block, with experts in all layers except `mlp_only_layers`."""

    def spec(self, config: ModelConfig) -> ModelSpec:
        """Return the spec: that of Qwen 3, with experts instead of the MLP."""
        experts, model, mixture = expert_settings_of(config), super().spec(config), mixture_spec(config)
        blocks = tuple(
            block if layer in experts.mlp_only_layers else replace(block, mlp=mixture)
            for layer, block in enumerate(model.blocks)
        )
        return replace(model, blocks=blocks)

    def hf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the stored tensor; for experts, the parameter of transformers that holds all of a layer."""
        index, leaf = split_layer(name)
        if leaf == ROUTER:
            return TensorSource(f"layers.{index}.mlp.gate.weight")
        if leaf in GATE_AND_UP:
            return TensorSource(f"layers.{index}.{EXPERTS}gate_up_proj", (half_of_fused(leaf, config),))
        return TensorSource(name.removesuffix(".weight") if leaf.startswith(EXPERTS) else name)

    def hf_sources(self, name: str, config: ModelConfig) -> tuple[TensorSource, ...]:
        """Return the stored tensor; for experts, the stack of those stored one by one, and transformers' parameter."""
        usual = self.hf_source(name, config)
        return (TensorSource(name), usual) if split_layer(name)[1].startswith(EXPERTS) else (usual,)

    def gguf_sources(self, name: str, config: ModelConfig) -> tuple[TensorSource, ...]:
        """Return the tensor of this projection, and for gate and up also the rows of a fused one."""
        alone, leaf = self.gguf_source(name, config), split_layer(name)[1]
        if leaf not in GATE_AND_UP:
            return (alone,)
        fused = gguf_name(name, {leaf.removesuffix(".weight"): "ffn_gate_up_exps"})
        return alone, TensorSource(fused, (half_of_fused(leaf, config),))

    def gguf_fields(self, config: ModelConfig) -> Mapping[str, MetadataScalar | tuple[int, ...]]:
        """Return the keys of the experts."""
        experts = expert_settings_of(config)
        return {
            "expert_count": experts.num_local_experts,
            "expert_used_count": experts.num_experts_per_tok,
            "expert_feed_forward_length": expert_width(experts),
        }


def mixture_spec(config: ModelConfig) -> MoESpec:
    """Return the spec of the experts of a layer, and of the shared expert where there is one."""
    experts = expert_settings_of(config)
    return MoESpec(
        experts=experts.num_local_experts,
        top_k=experts.num_experts_per_tok,
        hidden=expert_width(experts),
        gating=Gating(config.hidden_act),
        shares=experts.routing or ("chosen" if experts.norm_topk_prob else "all"),
        shared_hidden=experts.shared_expert_intermediate_size or 0,
    )


def expert_settings_of(config: ModelConfig) -> ExpertsConfig:
    """Return the settings of the experts of a mixture."""
    assert config.experts is not None, "the config readers give every mixture its experts"
    return config.experts


def expert_width(experts: ExpertsConfig) -> int:
    """Return the hidden width of one expert."""
    assert experts.moe_intermediate_size is not None, "the config readers give these experts their width"
    return experts.moe_intermediate_size


def half_of_fused(leaf: str, config: ModelConfig) -> PickRows:
    """Return the fold that picks the experts' gate or up projection out of the fused tensor."""
    return half_of_experts(leaf, expert_width(expert_settings_of(config)))


NEUTRAL_GGUF = {"expert_gating_func": (0, 1, 3)}
"""Softmax over all scores (1) and over the chosen ones (3) are the same where shares are made to sum to one."""

QWEN3_MOE = QwenMoe(
    ClassDefaults(
        model_type="qwen3_moe",
        window_rule="every_opt_in",
        bias_rule="attention_flag",
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=24,
        num_attention_heads=32,
        num_key_value_heads=4,
        max_position_embeddings=32_768,
        sliding_window=4096,
        experts=ExpertsConfig(
            num_local_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=False
        ),
        own_neutral_gguf=NEUTRAL_GGUF,
    ),
    gguf_names=("qwen3moe",),
    has_qk_norm=True,
)
