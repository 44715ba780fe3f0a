"""Qwen 3 Next, Qwen 3.5 and 3.6, dense and mixtures: three of four layers have a gated delta rule instead of attention.

    attention    q_proj's rows hold, for each head, the query and then the output gate; part of a head rotates
    norms        1 + w, except the norm of the delta rule's outputs, which is w

    Hugging Face  linear_attn.in_proj_qkv, in_proj_z, in_proj_a, in_proj_b     Qwen 3.5: one matrix each
                  linear_attn.in_proj_qkvz, in_proj_ba                         Qwen 3 Next: grouped by key head
                  linear_attn.A_log, conv1d.weight [C, 1, W]
                  mlp.shared_expert.gate_proj ..., mlp.shared_expert_gate [1, D]
    GGUF          attn_qkv, attn_gate (z), ssm_alpha (a), ssm_beta (b)         Qwen 3.5; value heads are tiled
                  attn_qkv, attn_gate or ssm_in (both); ssm_ba                 Qwen 3 Next; value heads are grouped
                  ssm_a = -exp(A_log), ssm_conv1d [C, W], ssm_dt.bias; norms are stored as 1 + w
                  ffn_gate_shexp ..., ffn_gate_inp_shexp [D]

llama.cpp tiles the value heads of Qwen 3.5, and with them the columns of ssm_out. Columns of packed rows cannot be
moved, so a model from such a file computes with tiled heads (`DeltaSpec.tiled`).

For text, all three axes of these models' M-RoPE have the same positions, so plain RoPE is computed.

Source: transformers 5.23, modeling_qwen3_next, modeling_qwen3_5, modeling_qwen3_5_moe, and the mapping of GGUF tensors
in integrations/gguf; llama.cpp, conversion of Qwen3NextModel and of Qwen 3.5.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from graphcore.arch.architecture import Shapes, TensorSource, gguf_name, split_layer
from graphcore.arch.config.class_defaults import SIZES, ClassDefaults
from graphcore.arch.config.gguf_keys import GGUFKeys
from graphcore.arch.config.layer_types import layer_types_of_pattern
from graphcore.arch.config.model_config import DeltaConfig, ExpertsConfig, ModelConfig
from graphcore.arch.families.qwen_moe import EXPERTS, NEUTRAL_GGUF, QwenMoe, mixture_spec
from graphcore.arch.folds import AddOne, AsOneRow, Fold, GroupHeads, NegatedExp, PickParts, WithoutChannelAxis
from graphcore.arch.rotary import GGUF_LEAVES, attention_of, layer_types, longest_context
from graphcore.checkpoint.gguf_reader import MetadataScalar
from graphcore.nn.spec import AttentionSpec, BlockSpec, DeltaSpec, MLPSpec, ModelSpec, NormSpec

LEAVES = {
    **GGUF_LEAVES,
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.gate_proj": "attn_q",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
DELTA = "linear_attn."
QUERY_AND_GATE = ("self_attn.q_proj", "self_attn.gate_proj")
IN_QKVZ = ("linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight")
IN_BA = ("linear_attn.in_proj_b.weight", "linear_attn.in_proj_a.weight")
LAYER_KEYS = ("ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "ssm.inner_size")
ROPE_SECTIONS = (11, 11, 10, 0)  # pairs for each axis of M-RoPE's positions; llama.cpp requires the key


@dataclass(frozen=True)
class QwenDelta(QwenMoe):
    """The architecture of Qwen 3 Next and later: delta rules, gated attention, MLPs or mixtures with a shared expert.

    Attributes:
        has_fused_inputs: True if checkpoints store the delta rule's inputs as two matrices, grouped by key head.
        is_tiled_in_gguf: True if the value heads of GGUF files are tiled.
    """

    has_qk_norm: bool = True
    hf_prefixes: tuple[str, ...] = ("model.", "model.language_model.", "language_model.model.", "")
    unused: Mapping[str, str] = field(default_factory=lambda: {"visual.": "vision", "mtp.": "multi-token prediction"})
    has_fused_inputs: bool = False
    is_tiled_in_gguf: bool = False

    def spec(self, config: ModelConfig) -> ModelSpec:
        """Return the spec: delta rules, and attention with an output gate in some layers."""
        norm = NormSpec("rms", config.norm_eps, scale_in_float32=True)
        attends = replace(attention_of(config, "full_attention", norm), output_gate=True)
        mixers: dict[str, AttentionSpec | DeltaSpec] = {
            "full_attention": attends,
            "linear_attention": _delta_spec(config),
        }
        dense = MLPSpec(config.intermediate_size, config.hidden_act)
        without_experts = range(config.num_hidden_layers) if config.experts is None else config.experts.mlp_only_layers
        blocks = tuple(
            BlockSpec(
                config.hidden_size, norm, mixers[kind], dense if layer in without_experts else mixture_spec(config)
            )
            for layer, kind in enumerate(layer_types(config))
        )
        return ModelSpec(
            dim=config.hidden_size,
            vocab=config.vocab_size,
            blocks=blocks,
            norm=norm,
            context=longest_context(config),
            tied=config.tie_word_embeddings,
        )

    def hf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the stored tensor; norms are stored as w, and several weights of the decoder share one tensor."""
        index, leaf = split_layer(name)
        here = f"layers.{index}."
        tiled = self._tiled(leaf, config)
        if leaf == "linear_attn.rate":
            return TensorSource(f"{here}linear_attn.A_log", (NegatedExp(), *tiled))
        if leaf == "linear_attn.conv1d.weight":
            return TensorSource(name, (WithoutChannelAxis(), *tiled))
        if tiled:
            return TensorSource(name, tiled)
        if leaf.startswith(QUERY_AND_GATE):
            module, _, parameter = leaf.rpartition(".")
            return TensorSource(f"{here}self_attn.q_proj.{parameter}", (_query_or_gate(module, config),))
        if self.has_fused_inputs and leaf in (*IN_QKVZ, *IN_BA):
            fused = "in_proj_qkvz" if leaf in IN_QKVZ else "in_proj_ba"
            return TensorSource(f"{here}linear_attn.{fused}.weight", (_rows_of_fused(leaf, config),))
        if leaf.endswith("norm.weight") and not leaf.startswith(DELTA):
            return TensorSource(name, (AddOne(),))
        return super().hf_source(name, config)

    def gguf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the tensor under llama.cpp's name; a file's value heads may be in another order than the config's."""
        index, leaf = split_layer(name)
        folds = self._ungrouped(leaf, config)
        if leaf == "linear_attn.rate":
            return TensorSource(f"blk.{index}.ssm_a", folds)
        if leaf == "linear_attn.dt_bias":
            return TensorSource(f"blk.{index}.ssm_dt.bias", folds)
        if leaf == "mlp.shared_expert_gate.weight":
            return TensorSource(gguf_name(name, LEAVES), (AsOneRow(),))
        if leaf.startswith(QUERY_AND_GATE):
            return TensorSource(gguf_name(name, LEAVES), (_query_or_gate(leaf.rpartition(".")[0], config),))
        if self.has_fused_inputs and leaf in IN_BA:
            return TensorSource(f"blk.{index}.ssm_ba.weight", (_rows_of_fused(leaf, config),))
        return TensorSource(gguf_name(name, LEAVES), folds)

    def gguf_sources(self, name: str, config: ModelConfig) -> tuple[TensorSource, ...]:
        """Return the tensor, and for inputs of Qwen 3 Next's delta rule also the rows of an older file's fused one."""
        index, leaf = split_layer(name)
        if leaf.startswith(EXPERTS):
            return super().gguf_sources(name, config)
        usual = self.gguf_source(name, config)
        if not self.has_fused_inputs or leaf not in IN_QKVZ:
            return (usual,)
        return usual, TensorSource(f"blk.{index}.ssm_in.weight", (_rows_of_fused(leaf, config),))

    def _ungrouped(self, leaf: str, config: ModelConfig) -> tuple[Fold, ...]:
        """Return the folds from a GGUF file's order of value heads to the config's."""
        delta = _delta_of(config)
        if not self.is_tiled_in_gguf or delta.is_tiled:
            return ()
        keys = delta.linear_num_key_heads
        return _reordered(leaf, delta, keys, delta.linear_num_value_heads // keys)

    def _tiled(self, leaf: str, config: ModelConfig) -> tuple[Fold, ...]:
        """Return the folds from safetensors' order of value heads to the config's, if it is a GGUF file's."""
        delta = _delta_of(config)
        if not delta.is_tiled:
            return ()
        keys = delta.linear_num_key_heads
        return _reordered(leaf, delta, delta.linear_num_value_heads // keys, keys)

    def complete_gguf(self, config: ModelConfig, keys: GGUFKeys, shapes: Shapes) -> ModelConfig:
        """Return the config with the delta rule's sizes, the layer types, and the width of the shared expert."""
        keys.check_required(LAYER_KEYS)
        value_heads, values = keys.required_size("ssm.time_step_rank"), keys.required_size("ssm.inner_size")
        if values % value_heads:
            raise keys.fields.wrong(keys.name("ssm.inner_size"), values, f"a multiple of the {value_heads} value heads")
        key_heads = keys.required_size("ssm.group_count")
        delta = DeltaConfig(
            linear_num_key_heads=key_heads,
            linear_num_value_heads=value_heads,
            linear_key_head_dim=keys.required_size("ssm.state_size"),
            linear_value_head_dim=values // value_heads,
            linear_conv_kernel_dim=keys.required_size("ssm.conv_kernel"),
            is_tiled=self.is_tiled_in_gguf and value_heads > key_heads,
        ).check(keys.fields.source)
        interval = keys.size("full_attention_interval") or self.defaults.full_attention_interval
        kinds = layer_types_of_pattern(config.num_hidden_layers, interval, "linear_attention")
        return replace(config, delta=delta, attention=replace(config.attention, layer_types=kinds))

    def as_gguf(self, config: ModelConfig) -> ModelConfig:
        """Return the config as it is read back from a GGUF file, whose value heads may be tiled."""
        delta = _delta_of(config)
        is_tiled = self.is_tiled_in_gguf and delta.linear_num_value_heads > delta.linear_num_key_heads
        return replace(config, delta=replace(delta, is_tiled=is_tiled))

    def gguf_fields(self, config: ModelConfig) -> Mapping[str, MetadataScalar | tuple[int, ...]]:
        """Return the keys of the delta rule, of M-RoPE and of the experts."""
        delta = _delta_of(config)
        kinds = layer_types(config)
        attends = kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds) + 1
        found: dict[str, MetadataScalar | tuple[int, ...]] = {
            "ssm.conv_kernel": delta.linear_conv_kernel_dim,
            "ssm.state_size": delta.linear_key_head_dim,
            "ssm.group_count": delta.linear_num_key_heads,
            "ssm.time_step_rank": delta.linear_num_value_heads,
            "ssm.inner_size": delta.linear_num_value_heads * delta.linear_value_head_dim,
            "full_attention_interval": attends,
        }
        if self.is_tiled_in_gguf:
            found["rope.dimension_sections"] = ROPE_SECTIONS
        if config.experts is not None:
            assert config.experts.shared_expert_intermediate_size is not None, "these mixtures have a shared expert"
            found |= super().gguf_fields(config)
            found["expert_shared_feed_forward_length"] = config.experts.shared_expert_intermediate_size
        return found


def _reordered(leaf: str, delta: DeltaConfig, inner: int, outer: int) -> tuple[Fold, ...]:
    """Return the folds of a weight whose value heads go from `outer` runs of `inner` to `inner` runs of `outer`."""
    if not leaf.startswith(DELTA) or 1 in (inner, outer):
        return ()
    width = delta.linear_value_head_dim
    match leaf.removeprefix(DELTA):
        case "norm.weight":
            return ()
        case "in_proj_qkv.weight" | "conv1d.weight":
            first = 2 * delta.linear_num_key_heads * delta.linear_key_head_dim
            return (GroupHeads(inner, outer, width, first=first),)
        case "in_proj_z.weight":
            return (GroupHeads(inner, outer, width),)
        case "out_proj.weight":
            return (GroupHeads(inner, outer, width, of_columns=True),)
    return (GroupHeads(inner, outer, 1),)


def _delta_of(config: ModelConfig) -> DeltaConfig:
    assert config.delta is not None, "the config readers give every model of this family its delta rule"
    return config.delta


def _delta_spec(config: ModelConfig) -> DeltaSpec:
    delta = _delta_of(config)
    return DeltaSpec(
        key_heads=delta.linear_num_key_heads,
        value_heads=delta.linear_num_value_heads,
        key_dim=delta.linear_key_head_dim,
        value_dim=delta.linear_value_head_dim,
        width=delta.linear_conv_kernel_dim,
        eps=config.norm_eps,
        tiled=delta.is_tiled,
    )


def _query_or_gate(module: str, config: ModelConfig) -> PickParts:
    """Return the fold that picks each head's query, or its gate, out of both."""
    width = config.attention.head_dim
    begin = QUERY_AND_GATE.index(module) * width
    return PickParts(config.attention.num_attention_heads, ((begin, begin + width),))


def _rows_of_fused(leaf: str, config: ModelConfig) -> PickParts:
    """Return the fold that picks a matrix out of a fused one: for each key head q, k, v and z, or b and a."""
    delta = _delta_of(config)
    per_key, keys = delta.linear_num_value_heads // delta.linear_num_key_heads, delta.linear_key_head_dim
    values = per_key * delta.linear_value_head_dim
    parts = {
        IN_QKVZ[0]: ((0, keys), (keys, 2 * keys), (2 * keys, 2 * keys + values)),
        IN_QKVZ[1]: ((2 * keys + values, 2 * keys + 2 * values),),
        IN_BA[0]: ((0, per_key),),
        IN_BA[1]: ((per_key, 2 * per_key),),
    }
    return PickParts(delta.linear_num_key_heads, parts[leaf])


NEUTRAL = {"attn_output_gate": (True,), "hidden_act": ("silu",), "partial_rotary_factor": None}
DENSE = ClassDefaults(
    model_type="qwen3_5_text",
    window_rule="delta",
    bias_rule="attention_flag",
    vocab_size=248_320,
    hidden_size=4096,
    intermediate_size=12_288,
    num_hidden_layers=32,
    num_attention_heads=16,
    num_key_value_heads=4,
    max_position_embeddings=32_768,
    head_dim=256,
    delta=DeltaConfig(16, 32, 128, 128, linear_conv_kernel_dim=4),
    partial_rotary_factor=0.25,
    own_neutral=NEUTRAL,
)
MIXTURE = replace(
    DENSE,
    model_type="qwen3_5_moe_text",
    hidden_size=2048,
    intermediate_size=None,
    num_hidden_layers=40,
    num_key_value_heads=2,
    experts=ExpertsConfig(256, 8, moe_intermediate_size=512, shared_expert_intermediate_size=512),
    required=("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
    own_neutral={
        **NEUTRAL,
        "shared_expert_intermediate_size": None,
        "norm_topk_prob": (True,),
        "mlp_only_layers": ([],),
        "decoder_sparse_step": (1,),
    },
    own_neutral_gguf=NEUTRAL_GGUF,
)
NEXT = replace(
    MIXTURE,
    model_type="qwen3_next",
    vocab_size=151_936,
    intermediate_size=5632,
    num_hidden_layers=48,
    experts=ExpertsConfig(512, 10, moe_intermediate_size=512, shared_expert_intermediate_size=512),
    required=SIZES,
    own_neutral={**NEUTRAL, "shared_expert_intermediate_size": None},
)
QWEN3_5 = QwenDelta(DENSE, ("qwen35",), nested_in="qwen3_5", is_tiled_in_gguf=True)
QWEN3_5_MOE = QwenDelta(MIXTURE, ("qwen35moe",), nested_in="qwen3_5_moe", is_tiled_in_gguf=True)
QWEN3_NEXT = QwenDelta(NEXT, ("qwen3next",), has_fused_inputs=True)
