"""LFM2 (Liquid AI), dense and mixtures: most layers have a gated short convolution instead of attention.

    Hugging Face  conv.in_proj [3C, D] (b, c and x), conv.conv.weight [C, 1, W], conv.out_proj
                  self_attn.out_proj, q_layernorm, k_layernorm
                  operator_norm, ffn_norm of a layer, embedding_norm after the last one
                  feed_forward.w1 (gate), w3 (up), w2 (down)
                  feed_forward.gate [X, D] (router), feed_forward.expert_bias [X] (selection bias)
                  feed_forward.experts.7.w1 [F, D] ...; or feed_forward.experts.gate_up_proj [X, 2F, D], gate first
    GGUF          shortconv.in_proj, shortconv.conv [C, W], shortconv.out_proj
                  token_embd_norm after the last layer; other names as usual
                  attention.head_count_kv is an array, with 0 for a layer with a convolution
                  exp_probs_b.bias (selection bias)

The dense MLP's width is intermediate_size (block_ff_dim in older files) as it stands, or two thirds of it, times
block_ffn_dim_multiplier, rounded up to a multiple of block_multiple_of (block_auto_adjust_ff_dim). GGUF has the result.

In mixtures it stands as it is, the first layers are dense, and experts are chosen by the sigmoid of their scores plus
the selection bias (`ScoredRouting`). GGUF has no keys for their shares: llama.cpp always normalises and never scales.

Source: transformers 5.24, modeling_lfm2 and modeling_lfm2_moe; llama.cpp, conversion/lfm2.py and src/models/lfm2.cpp.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from graphcore.arch.architecture import Architecture, Shapes, TensorSource, gguf_name, split_layer
from graphcore.arch.config.class_defaults import ClassDefaults
from graphcore.arch.config.gguf_keys import KV_HEADS, NO_WINDOW, WINDOW, GGUFKeys
from graphcore.arch.config.model_config import ExpertsConfig, ModelConfig
from graphcore.arch.config.typed_fields import LARGEST_SIZE, Fields
from graphcore.arch.families.qwen_moe import (
    EXPERTS,
    expert_settings_of,
    expert_width,
    half_of_fused,
    mixture_spec,
)
from graphcore.arch.folds import WithoutChannelAxis
from graphcore.arch.rotary import GATE_AND_UP, GGUF_LEAVES, attention_of, layer_types, longest_context
from graphcore.checkpoint.gguf_reader import MetadataScalar
from graphcore.errors import UnsupportedError
from graphcore.nn.spec import BlockSpec, ConvSpec, MixerSpec, MLPSpec, ModelSpec, NormSpec
from graphcore.routing import SCORES, ScoredRouting

HF_LEAVES = {
    "norm": "embedding_norm",
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "self_attn.out_proj",
    "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm",
    "conv.conv1d": "conv.conv",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.router": "feed_forward.gate",
    "mlp.experts.gate_proj": "feed_forward.experts.w1",
    "mlp.experts.up_proj": "feed_forward.experts.w3",
    "mlp.experts.down_proj": "feed_forward.experts.w2",
}
FUSED = {  # leaves of transformers' own parameters, which hold the experts of a layer
    **dict.fromkeys(GATE_AND_UP, "feed_forward.experts.gate_up_proj"),
    "mlp.experts.down_proj.weight": "feed_forward.experts.down_proj",
}
SELECTION_BIAS = "mlp.selection_bias"
LEAVES = {
    **GGUF_LEAVES,
    "norm": "token_embd_norm",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv1d": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
}
CONV = "conv"
CONV_WIDTH = 3  # tokens that a convolution sees by default
MULTIPLE = 256  # default of block_multiple_of
DENSE_LAYERS = 2  # default of num_dense_layers
TAPS = "shortconv.l_cache"


@dataclass(frozen=True)
class Lfm2Settings:
    """The settings that only LFM2 has.

    Attributes:
        conv_L_cache: number of tokens that a convolution sees, the current one included.
        conv_bias: True if the convolution and the projections before and after it have biases.
        use_expert_bias: True if each expert has a selection bias.
    """

    conv_L_cache: int = CONV_WIDTH  # noqa: N815  # its name in config.json
    conv_bias: bool = False
    use_expert_bias: bool = False

    def cut(self, num_layers: int) -> "Lfm2Settings":
        """Return self, because all layers share the settings."""
        return self


@dataclass(frozen=True)
class Lfm2(Architecture):
    """The architecture of LFM2: gated short convolutions, and attention with norms of q and k, in pre-norm blocks."""

    hf_prefixes: tuple[str, ...] = ("model.", "model.language_model.", "language_model.model.", "")
    unused: Mapping[str, str] = field(
        default_factory=lambda: {"vision_tower.": "vision", "multi_modal_projector.": "vision"}
    )

    def spec(self, config: ModelConfig) -> ModelSpec:
        """Return the spec: a convolution or attention in each layer, and a gated MLP."""
        norm, own = NormSpec("rms", config.norm_eps), _own(config)
        convolution = ConvSpec(config.hidden_size, own.conv_L_cache, own.conv_bias)
        kinds = layer_types(config)
        mixers: dict[str, MixerSpec] = {
            kind: convolution if kind == CONV else attention_of(config, kind, norm) for kind in kinds
        }
        mlp = MLPSpec(config.intermediate_size, config.hidden_act)
        return ModelSpec(
            dim=config.hidden_size,
            vocab=config.vocab_size,
            blocks=tuple(BlockSpec(config.hidden_size, norm, mixers[kind], mlp) for kind in kinds),
            norm=norm,
            context=longest_context(config),
            tied=config.tie_word_embeddings,
        )

    def hf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the source under LFM2's tensor names; convolution weights are stored as [C, 1, L]."""
        index, leaf = split_layer(name)
        module, _, parameter = leaf.rpartition(".")
        stored = f"{HF_LEAVES.get(module, module)}.{parameter}"
        folds = (WithoutChannelAxis(),) if leaf == "conv.conv1d.weight" else ()
        return TensorSource(stored if index is None else f"layers.{index}.{stored}", folds)

    def gguf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the tensor under llama.cpp's name."""
        return TensorSource(gguf_name(name, LEAVES))

    def complete_json(self, config: ModelConfig, fields: Fields) -> ModelConfig:
        """Return the config with the convolutions' settings, and with the MLP's real width."""
        own = Lfm2Settings(fields.size("conv_L_cache") or CONV_WIDTH, bool(fields.flag("conv_bias")))
        return replace(config, own=own, intermediate_size=_mlp_width(config.intermediate_size, fields))

    def complete_gguf(self, config: ModelConfig, keys: GGUFKeys, shapes: Shapes) -> ModelConfig:
        """Return the config with each layer's type, the window of those that attend, and the convolutions' width."""
        keys.check_required((TAPS, KV_HEADS))
        has_window = keys.fields.raw.get(keys.name(WINDOW)) not in NO_WINDOW
        attends = "sliding_attention" if has_window else "full_attention"
        attention = replace(
            config.attention,
            sliding_window=keys.size(WINDOW) if has_window else None,
            layer_types=tuple(
                attends if heads else CONV for heads in _kv_heads_by_layer(keys, config.num_hidden_layers)
            ),
        )
        return replace(config, attention=attention, own=Lfm2Settings(keys.required_size(TAPS)))

    def own_settings(self, config: ModelConfig) -> Mapping[str, object]:
        """Return the convolutions' settings, the epsilon under its own name, and that the MLP's width is final."""
        return {"norm_eps": config.norm_eps, "block_auto_adjust_ff_dim": False, **vars(_own(config))}

    def gguf_fields(self, config: ModelConfig) -> Mapping[str, MetadataScalar | tuple[int, ...]]:
        """Return the kv heads of each layer, 0 for a convolution, the convolutions' width, and a window."""
        heads, window = config.attention.num_key_value_heads, config.attention.sliding_window
        found: dict[str, MetadataScalar | tuple[int, ...]] = {
            KV_HEADS: tuple(0 if kind == CONV else heads for kind in layer_types(config)),
            TAPS: _own(config).conv_L_cache,
        }
        return found if window is None else {**found, WINDOW: window}


@dataclass(frozen=True)
class Lfm2Moe(Lfm2):
    """The architecture of LFM2's mixtures: LFM2's layers, with experts instead of the MLP in all but the first ones."""

    def spec(self, config: ModelConfig) -> ModelSpec:
        """Return the spec: dense layers, then layers with experts."""
        model, dense = super().spec(config), expert_settings_of(config).mlp_only_layers
        mixture = replace(mixture_spec(config), selection_bias=_own(config).use_expert_bias)
        blocks = (block if at in dense else replace(block, mlp=mixture) for at, block in enumerate(model.blocks))
        return replace(model, blocks=tuple(blocks))

    def hf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the stored tensor; for experts, the parameter of transformers that holds all of a layer."""
        index, leaf = split_layer(name)
        if leaf == SELECTION_BIAS:
            return TensorSource(f"layers.{index}.feed_forward.expert_bias")
        if leaf in FUSED:
            folds = (half_of_fused(leaf, config),) if leaf in GATE_AND_UP else ()
            return TensorSource(f"layers.{index}.{FUSED[leaf]}", folds)
        return super().hf_source(name, config)

    def hf_sources(self, name: str, config: ModelConfig) -> tuple[TensorSource, ...]:
        """Return the stored tensor; for experts, the stack of those stored one by one, and transformers' parameter."""
        usual = self.hf_source(name, config)
        return (super().hf_source(name, config), usual) if split_layer(name)[1].startswith(EXPERTS) else (usual,)

    def gguf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the tensor under llama.cpp's name."""
        index, leaf = split_layer(name)
        return (
            TensorSource(f"blk.{index}.exp_probs_b.bias")
            if leaf == SELECTION_BIAS
            else super().gguf_source(name, config)
        )

    def complete_json(self, config: ModelConfig, fields: Fields) -> ModelConfig:
        """Return the config with the convolutions' settings, dense layers and the selection bias."""
        routing = expert_settings_of(config).routing
        if routing is not None and routing.groups > 1:
            raise UnsupportedError(
                f"{fields.source}: 'n_group' is {routing.groups}, and {config.model_type} has no groups of experts; "
                "use a checkpoint without it"
            )
        has_bias, width = fields.flag("use_expert_bias"), config.intermediate_size
        completed = super().complete_json(config, fields)
        own = replace(_own(completed), use_expert_bias=has_bias is not False)
        dense = fields.count("num_dense_layers", LARGEST_SIZE, DENSE_LAYERS)
        return replace(_with_dense_layers(completed, dense), own=own, intermediate_size=width)

    def complete_gguf(self, config: ModelConfig, keys: GGUFKeys, shapes: Shapes) -> ModelConfig:
        """Return the config with the settings of LFM2, dense layers, and the selection bias if there is its tensor."""
        for key, known in (("expert_weights_norm", (None, True)), ("expert_weights_scale", (None, 0, 1))):
            value = keys.fields.raw.get(keys.name(key))
            if value not in known:
                raise UnsupportedError(
                    f"{keys.fields.source}: {keys.name(key)} is {value}, and llama.cpp does not read it for this "
                    "architecture; use the safetensors checkpoint"
                )
        completed = super().complete_gguf(config, keys, shapes)
        dense = keys.fields.count(keys.name("leading_dense_block_count"), LARGEST_SIZE)
        experts, has_bias = expert_settings_of(completed), any("exp_probs_b" in name for name in shapes)
        assert experts.routing is not None, "these experts have scores of their own"
        experts = replace(experts, norm_topk_prob=True, routing=experts.routing._replace(normalises=True))
        own = replace(_own(completed), use_expert_bias=has_bias)
        return _with_dense_layers(replace(completed, experts=experts, own=own), dense)

    def own_settings(self, config: ModelConfig) -> Mapping[str, object]:
        """Return the settings of LFM2, and the number of dense layers."""
        return {**super().own_settings(config), "num_dense_layers": len(expert_settings_of(config).mlp_only_layers)}

    def gguf_fields(self, config: ModelConfig) -> Mapping[str, MetadataScalar | tuple[int, ...]]:
        """Return the keys of LFM2, of the experts and of their choice."""
        experts = expert_settings_of(config)
        assert experts.routing is not None, "these experts have scores of their own"
        return {
            **super().gguf_fields(config),
            "expert_count": experts.num_local_experts,
            "expert_used_count": experts.num_experts_per_tok,
            "expert_feed_forward_length": expert_width(experts),
            "leading_dense_block_count": len(experts.mlp_only_layers),
            "expert_gating_func": SCORES[experts.routing.function],
            "expert_weights_norm": experts.routing.normalises,
            "expert_weights_scale": experts.routing.factor,
        }


def _with_dense_layers(config: ModelConfig, dense: int) -> ModelConfig:
    """Return the config with an MLP instead of experts in the first layers."""
    without = tuple(range(min(dense, config.num_hidden_layers)))
    return replace(config, experts=replace(expert_settings_of(config), mlp_only_layers=without))


def _own(config: ModelConfig) -> Lfm2Settings:
    assert isinstance(config.own, Lfm2Settings), "the config readers give every LFM2 its settings"
    return config.own


def _mlp_width(stated: int, fields: Fields) -> int:
    """Return the hidden width of the MLP for the stated one. Source: transformers, modeling_lfm2, `Lfm2MLP`."""
    if fields.flag("block_auto_adjust_ff_dim") is False:
        return stated
    width = int(2 * stated / 3)
    if fields.is_null("block_ffn_dim_multiplier"):
        return _above_zero(width, fields)
    multiple = fields.size("block_multiple_of") or MULTIPLE
    scaled = int((fields.positive("block_ffn_dim_multiplier") or 1.0) * width)
    return _above_zero(multiple * ((scaled + multiple - 1) // multiple), fields)


def _above_zero(width: int, fields: Fields) -> int:
    if width < 1:
        raise fields.wrong("intermediate_size", width, "large enough that two thirds of it are a width")
    return width


def _kv_heads_by_layer(keys: GGUFKeys, num_layers: int) -> Sequence[int]:
    """Return the number of kv heads of each layer, 0 for a convolution.

    Raises:
        CheckpointError: the numbers are no integers, or of another number of layers.
        UnsupportedError: layers that attend have different numbers of kv heads.
    """
    name = keys.name(KV_HEADS)
    value = keys.fields.raw.get(name)
    stated = value if isinstance(value, Sequence) and not isinstance(value, str) else (value,) * num_layers
    heads = tuple(one for one in stated if type(one) is int and one >= 0)
    if len(stated) != num_layers or len(heads) != num_layers:
        raise keys.fields.wrong(name, value, f"a list of {num_layers} integers")
    if len({one for one in heads if one}) > 1:
        raise UnsupportedError(f"{keys.fields.source}: {name} differs among layers that attend, which is not supported")
    return heads


DEFAULTS = ClassDefaults(
    model_type="lfm2",
    window_rule="conv",
    bias_rule="none",
    vocab_size=65_536,
    hidden_size=2560,
    intermediate_size=12_288,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=128_000,
    norm_eps=1e-5,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_ids=(2,),
    rope_theta=1_000_000.0,
    own_names={
        "intermediate_size": ("block_ff_dim",),
        "rms_norm_eps": ("norm_eps",),
        "tie_word_embeddings": ("tie_embedding",),
    },
    own_neutral={"hidden_act": ("silu",)},
    sizes_by_layer=(KV_HEADS,),
)
MIXTURE = replace(
    DEFAULTS,
    model_type="lfm2_moe",
    hidden_size=2048,
    intermediate_size=7168,
    experts=ExpertsConfig(
        num_local_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=1792,
        routing=ScoredRouting("sigmoid", eps=1e-6),
    ),
    own_names={name: DEFAULTS.own_names[name] for name in ("rms_norm_eps", "tie_word_embeddings")},
    own_neutral={"hidden_act": ("silu",), "scoring_func": ("sigmoid",)},
)
LFM2 = Lfm2(DEFAULTS, gguf_names=("lfm2",), nested_in="lfm2_vl")
LFM2_MOE = Lfm2Moe(MIXTURE, gguf_names=("lfm2moe",))
