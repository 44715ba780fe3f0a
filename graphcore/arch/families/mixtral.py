"""Mixtral 8x7B and 8x22B: Mistral's block with a mixture of experts in each layer.

    Hugging Face  block_sparse_moe.gate              router, [X, D]
                  block_sparse_moe.experts.7.w1      [F, D] gate; w3 [F, D] up; w2 [D, F] down: one tensor per expert
                  mlp.gate, mlp.experts.gate_up_proj [X, 2F, D], gate first; mlp.experts.down_proj: transformers 5
    GGUF          ffn_gate_inp                       router; general.architecture is Llama's, with an expert_count
                  ffn_gate_exps, ffn_up_exps         [X, F, D]; ffn_down_exps [X, D, F]
                  ffn_gate.7, ffn_up.7, ffn_down.7   files of 2023: one tensor per expert

The shares of a token's experts are a softmax over their scores alone.

Source: transformers, modeling_mixtral and conversion_mapping; llama.cpp, src/models/llama.cpp.
"""

from collections.abc import Mapping
from dataclasses import replace

from graphcore.activations import Gating
from graphcore.arch.architecture import TensorSource, split_layer
from graphcore.arch.config.class_defaults import ClassDefaults
from graphcore.arch.config.model_config import ExpertsConfig, ModelConfig
from graphcore.arch.families.llama import Llama
from graphcore.arch.families.qwen_moe import EXPERTS, NEUTRAL_GGUF, ROUTER
from graphcore.arch.rotary import GATE_AND_UP, half_of_experts
from graphcore.checkpoint.gguf_reader import MetadataScalar
from graphcore.nn.spec import ModelSpec, MoESpec

MATRICES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


class Mixtral(Llama):
    """The architecture of Mixtral: Llama's, with experts instead of the MLP."""

    def spec(self, config: ModelConfig) -> ModelSpec:
        """Return the spec: that of Llama, with experts."""
        model, mixture = super().spec(config), experts_of_width(config)
        return replace(model, blocks=tuple(replace(block, mlp=mixture) for block in model.blocks))

    def hf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the stored tensor; for experts, the stack of those stored one by one."""
        index, leaf = split_layer(name)
        if leaf == ROUTER:
            return TensorSource(f"layers.{index}.block_sparse_moe.gate.weight")
        if leaf.startswith(EXPERTS):
            projection = MATRICES[leaf.removeprefix(EXPERTS).removesuffix(".weight")]
            return TensorSource(f"layers.{index}.block_sparse_moe.experts.{projection}.weight")
        return TensorSource(name)

    def hf_sources(self, name: str, config: ModelConfig) -> tuple[TensorSource, ...]:
        """Return the stored tensor, and for routers and experts also the parameter of transformers 5."""
        usual, (index, leaf) = self.hf_source(name, config), split_layer(name)
        if leaf == ROUTER:
            return usual, TensorSource(f"layers.{index}.mlp.gate.weight")
        if leaf in GATE_AND_UP:
            fused = f"layers.{index}.{EXPERTS}gate_up_proj"
            return usual, TensorSource(fused, (half_of_experts(leaf, config.intermediate_size),))
        return (usual, TensorSource(name.removesuffix(".weight"))) if leaf.startswith(EXPERTS) else (usual,)

    def gguf_fields(self, config: ModelConfig) -> Mapping[str, MetadataScalar]:
        """Return the keys of the window and the experts."""
        return {**super().gguf_fields(config), **expert_fields(config)}


def experts_of_width(config: ModelConfig) -> MoESpec:
    """Return the spec of experts that have the hidden width of the config's MLP, intermediate_size."""
    assert config.experts is not None, "the config readers give every mixture its experts"
    experts, top_k = config.experts.num_local_experts, config.experts.num_experts_per_tok
    return MoESpec(experts, top_k, config.intermediate_size, Gating(config.hidden_act))


def expert_fields(config: ModelConfig) -> Mapping[str, MetadataScalar]:
    """Return the GGUF metadata of the experts; their hidden width is feed_forward_length."""
    assert config.experts is not None, "the config readers give every mixture its experts"
    return {"expert_count": config.experts.num_local_experts, "expert_used_count": config.experts.num_experts_per_tok}


MIXTRAL = Mixtral(
    ClassDefaults(
        model_type="mixtral",
        window_rule="every",
        bias_rule="none",
        vocab_size=32_000,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        norm_eps=1e-5,
        bos_token_id=1,
        eos_token_ids=(2,),
        rope_theta=1_000_000.0,
        experts=ExpertsConfig(num_local_experts=8, num_experts_per_tok=2),
        own_neutral_gguf=NEUTRAL_GGUF,
    ),
    gguf_names=("llama",),
    is_read_from_gguf=False,
)
