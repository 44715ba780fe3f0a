"""Gemma 4 text models (E2B, E4B, 12B, 31B, 26B-A4B): Gemma 3's order of norms; many settings differ by layer.

    full layers        heads of another width, a rotation of their first quarter; often keys serve as values, too
    last layers        may share the KV cache of the last layer of their type that has its own (E2B, E4B)
    features           per-layer embeddings: each layer multiplies a gate by the token's features for it (E2B, E4B)
    experts            beside the MLP (26B-A4B); router, experts and MLP read the stream through a norm each

    Hugging Face       layers.N.experts.gate_up_proj [X, 2F, D], gate first; experts.down_proj [X, D, F]; router.proj,
                       router.scale [D], router.per_expert_scale [X]; layer_scalar [1]
                       embed_tokens_per_layer [V, L * P], per_layer_model_projection, per_layer_projection_norm
    GGUF               ffn_gate_up_exps, ffn_down_exps; ffn_gate_inp.weight and .scale; ffn_down_exps.scale;
                       layer_output_scale; per_layer_token_embd, per_layer_model_proj, per_layer_proj_norm

Settings that differ by layer, and where files have them:

    config.json        global_head_dim, num_global_key_value_heads, or per_layer_config (transformers since 5.23)
    GGUF               key_length and key_length_swa; by layer head_count_kv, feed_forward_length and
                       sliding_window_pattern

Norms hold their whole weight in both (not 1 + w). Scores are not scaled, as queries and keys are normalised.

Source: transformers 5.23, configuration_gemma4, modeling_gemma4 and modeling_gemma4_unified; gguf-py, constants.py
(MODEL_ARCH.GEMMA4).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from graphcore.activations import Gating
from graphcore.arch.architecture import Architecture, Shapes, TensorSource, gguf_name, split_layer
from graphcore.arch.config.class_defaults import ClassDefaults
from graphcore.arch.config.gguf_keys import WINDOW, WINDOW_PATTERN, GGUFKeys
from graphcore.arch.config.layer_types import read_gguf_layer_types
from graphcore.arch.config.model_config import ExpertsConfig, ModelConfig
from graphcore.arch.config.typed_fields import LARGEST_SIZE, Fields
from graphcore.arch.folds import PickRows, Times
from graphcore.arch.rotary import GATE_AND_UP, GGUF_LEAVES, attention_of, half_of_experts
from graphcore.checkpoint.gguf_reader import MetadataScalar
from graphcore.errors import CheckpointError, UnsupportedError, quoted
from graphcore.nn.spec import (
    AttentionSpec,
    BlockSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    NormSpec,
    PerLayerSpec,
)

FULL = "full_attention"
PATTERN = 6  # every sixth layer is full where layer_types is absent, and the last one always
LAYER_FIELDS = ("head_dim", "num_key_value_heads")  # what per_layer_config may change
PER_LAYER_WIDTH = 256
FULL_HEAD_DIM = 512

HF_LEAVES = {
    "parallel_mlp.mlp_norm": "pre_feedforward_layernorm",
    "parallel_mlp.experts_norm": "pre_feedforward_layernorm_2",
    "parallel_mlp.mlp_answer_norm": "post_feedforward_layernorm_1",
    "parallel_mlp.experts_answer_norm": "post_feedforward_layernorm_2",
    "parallel_mlp.mlp.gate_proj": "mlp.gate_proj",
    "parallel_mlp.mlp.up_proj": "mlp.up_proj",
    "parallel_mlp.mlp.down_proj": "mlp.down_proj",
    "mlp.router": "router.proj",
    "per_layer.gate": "per_layer_input_gate",
    "per_layer.projection": "per_layer_projection",
    "per_layer.norm": "post_per_layer_input_norm",
}
HF_NAMES = {
    "embed_tokens.per_layer.table.weight": "embed_tokens_per_layer.weight",
    "embed_tokens.per_layer.projection.weight": "per_layer_model_projection.weight",
    "embed_tokens.per_layer.norm.weight": "per_layer_projection_norm.weight",
}
LEAVES = {
    **GGUF_LEAVES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "parallel_mlp.mlp_norm": "ffn_norm",
    "parallel_mlp.experts_norm": "pre_ffw_norm_2",
    "parallel_mlp.mlp_answer_norm": "post_ffw_norm_1",
    "parallel_mlp.experts_answer_norm": "post_ffw_norm_2",
    "parallel_mlp.mlp.gate_proj": "ffn_gate",
    "parallel_mlp.mlp.up_proj": "ffn_up",
    "parallel_mlp.mlp.down_proj": "ffn_down",
    "per_layer.gate": "inp_gate",
    "per_layer.projection": "proj",
    "per_layer.norm": "post_norm",
    "embed_tokens.per_layer.table": "per_layer_token_embd",
    "embed_tokens.per_layer.projection": "per_layer_model_proj",
    "embed_tokens.per_layer.norm": "per_layer_proj_norm",
}
ROUTER_NORM = "parallel_mlp.router_norm.weight"
# Vectors of a layer, with their names in safetensors and in GGUF.
VECTORS = {
    "output_factor": ("layer_scalar", "layer_output_scale.weight"),
    "mlp.expert_scales": ("router.per_expert_scale", "ffn_down_exps.scale"),
    ROUTER_NORM: ("router.scale", "ffn_gate_inp.scale"),
}
UNUSED_IF_SHARED = ("k_proj", "v_proj", "k_norm", "v_norm", "attn_k", "attn_v", "attn_k_norm")


@dataclass(frozen=True)
class Gemma4Settings:
    """The settings that only Gemma 4 has.

    Attributes:
        full_head_dim, full_kv_heads: width of a head, and number of kv heads, in full-attention layers.
        values_are_keys: True if full-attention layers have no value projection.
        first_shared: index of the first layer that attends another's keys and values; the number of layers for none.
        shared_width: hidden width of the MLP in such layers.
        per_layer: number of a token's features for each layer; 0 for none.
        per_layer_layers: number of layers that have features in the checkpoint.
        per_layer_vocab: number of rows of the features' table.
        logit_cap: soft cap of the logits; 0 for none.
    """

    full_head_dim: int
    full_kv_heads: int
    values_are_keys: bool
    first_shared: int
    shared_width: int
    per_layer: int
    per_layer_layers: int
    per_layer_vocab: int
    logit_cap: float

    def cut(self, num_layers: int) -> "Gemma4Settings":
        """Return the settings of the model's first layers."""
        return replace(self, first_shared=min(self.first_shared, num_layers))


class Gemma4(Architecture):
    """The architecture of Gemma 4, for all its sizes."""

    def spec(self, config: ModelConfig) -> ModelSpec:
        """Return the spec: full and sliding layers, those that share keys and values, features and experts."""
        own, norm = _own(config), NormSpec("rms", config.norm_eps, scale_in_float32=True)
        blocks = tuple(
            BlockSpec(
                dim=config.hidden_size,
                norm=norm,
                attention=_attention(config, layer_type, norm, shares=layer >= own.first_shared),
                mlp=_mlp(config, own.shared_width if layer >= own.first_shared else config.intermediate_size),
                sandwich=True,
                per_layer=own.per_layer,
                per_layer_activation=config.hidden_act if own.per_layer else "",
                has_output_factor=True,
            )
            for layer, layer_type in enumerate(_types_of(config))
        )
        return ModelSpec(
            dim=config.hidden_size,
            vocab=config.vocab_size,
            blocks=blocks,
            norm=norm,
            context=config.max_position_embeddings,
            embedding_scale=config.hidden_size**0.5,
            tied=config.tie_word_embeddings,
            logit_cap=own.logit_cap,
            per_layer=_features(own, norm),
        )

    def hf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the stored tensor; experts' gate and up are the halves of one parameter."""
        index, leaf = split_layer(name)
        if index is None:
            return TensorSource(HF_NAMES.get(name, name))
        if leaf in GATE_AND_UP:
            return TensorSource(f"layers.{index}.experts.gate_up_proj", (_half(leaf, config),))
        if leaf in VECTORS:
            return TensorSource(f"layers.{index}.{VECTORS[leaf][0]}", _vector_folds(leaf, config))
        module, _, parameter = leaf.rpartition(".")
        if module.startswith("mlp.experts."):
            return TensorSource(f"layers.{index}.{module.removeprefix('mlp.')}")
        return TensorSource(f"layers.{index}.{HF_LEAVES.get(module, module)}.{parameter}")

    def gguf_source(self, name: str, config: ModelConfig) -> TensorSource:
        """Return the tensor under llama.cpp's name; experts' gate and up are the halves of one tensor."""
        index, leaf = split_layer(name)
        if leaf in GATE_AND_UP:
            return TensorSource(f"blk.{index}.ffn_gate_up_exps.weight", (_half(leaf, config),))
        if leaf in VECTORS:
            return TensorSource(f"blk.{index}.{VECTORS[leaf][1]}", _vector_folds(leaf, config))
        return TensorSource(gguf_name(name, LEAVES))

    def ignores(self, name: str, config: ModelConfig) -> bool:
        """Return whether a stored tensor is not used: also keys and values of layers that attend another's."""
        parts = name.split(".")
        layers = [int(part) for part in parts if part.isdecimal()]
        is_shared = bool(layers) and layers[0] >= _own(config).first_shared
        return super().ignores(name, config) or (is_shared and any(part in UNUSED_IF_SHARED for part in parts))

    def complete_json(self, config: ModelConfig, fields: Fields) -> ModelConfig:
        """Return the config with Gemma 4's own settings: head sizes, KV sharing, per-layer inputs, experts, softcap."""
        return _read_settings(config, fields, self.defaults, has_features=self.model_type == "gemma4_text")

    def complete_gguf(self, config: ModelConfig, keys: GGUFKeys, shapes: Shapes) -> ModelConfig:
        """Return the config with what differs by layer, which llama.cpp stores as arrays or under keys of its own."""
        return _read_gguf_settings(config, keys, shapes)

    def own_settings(self, config: ModelConfig) -> Mapping[str, object]:
        """Return the sizes of full-attention layers, shared keys and values, features, and the soft cap."""
        own = _own(config)
        return {
            "global_head_dim": own.full_head_dim,
            "num_global_key_value_heads": own.full_kv_heads,
            "attention_k_eq_v": own.values_are_keys,
            "num_kv_shared_layers": config.num_hidden_layers - own.first_shared,
            "use_double_wide_mlp": own.shared_width != config.intermediate_size,
            "hidden_size_per_layer_input": own.per_layer,
            "vocab_size_per_layer_input": own.per_layer_vocab,
            "final_logit_softcapping": own.logit_cap or None,
            "enable_moe_block": config.experts is not None,
        }

    def gguf_fields(self, config: ModelConfig) -> Mapping[str, MetadataScalar | tuple[int, ...]]:
        """Return the keys of settings that differ by layer, and those of features, experts and the logits' soft cap."""
        own, types, attention = _own(config), _types_of(config), config.attention
        layers = range(config.num_hidden_layers)
        found: dict[str, MetadataScalar | tuple[int, ...]] = {
            "attention.sliding_window": attention.sliding_window or 0,
            "attention.sliding_window_pattern": tuple(kind != FULL for kind in types),
            "attention.shared_kv_layers": config.num_hidden_layers - own.first_shared,
            "attention.head_count_kv": tuple(
                own.full_kv_heads if kind == FULL else attention.num_key_value_heads for kind in types
            ),
            "feed_forward_length": tuple(
                own.shared_width if layer >= own.first_shared else config.intermediate_size for layer in layers
            ),
            "embedding_length_per_layer_input": own.per_layer,
        }
        for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
            found |= {key: own.full_head_dim, f"{key}_swa": attention.head_dim}
        if config.rope is not None and config.rope.local_theta is not None:
            found["rope.freq_base_swa"] = config.rope.local_theta
        if own.logit_cap:
            found["final_logit_softcapping"] = own.logit_cap
        if config.experts is not None:
            found["expert_count"] = config.experts.num_local_experts
            found["expert_used_count"] = config.experts.num_experts_per_tok
            found["expert_feed_forward_length"] = _expert_width(config)
        return found


def _own(config: ModelConfig) -> Gemma4Settings:
    assert isinstance(config.own, Gemma4Settings), "the config readers give every Gemma 4 its own settings"
    return config.own


def _features(own: Gemma4Settings, norm: NormSpec) -> PerLayerSpec | None:
    return PerLayerSpec(own.per_layer, own.per_layer_layers, own.per_layer_vocab, norm) if own.per_layer else None


def _attention(config: ModelConfig, layer_type: str, norm: NormSpec, shares: bool) -> AttentionSpec:
    own, usual, is_full = _own(config), attention_of(config, layer_type, norm), layer_type == FULL
    return replace(
        usual,
        scale=1.0,
        kv_heads=own.full_kv_heads if is_full else usual.kv_heads,
        head_dim=own.full_head_dim if is_full else usual.head_dim,
        v_norm_eps=0.0 if shares else norm.eps,
        values_are_keys=own.values_are_keys and is_full and not shares,
        shares_cache=shares,
    )


def _mlp(config: ModelConfig, width: int) -> MLPSpec | MoESpec:
    mlp, experts = MLPSpec(width, config.hidden_act), config.experts
    if experts is None:
        return mlp
    return MoESpec(
        experts=experts.num_local_experts,
        top_k=experts.num_experts_per_tok,
        hidden=_expert_width(config),
        gating=Gating(config.hidden_act),
        expert_scales=True,
        parallel_mlp=mlp,
    )


def _expert_width(config: ModelConfig) -> int:
    assert config.experts is not None and config.experts.moe_intermediate_size is not None, "experts have a width"  # noqa: PT018
    return config.experts.moe_intermediate_size


def _half(leaf: str, config: ModelConfig) -> PickRows:
    """Return the fold that picks gate or up out of the fused tensor."""
    return half_of_experts(leaf, _expert_width(config))


def _vector_folds(leaf: str, config: ModelConfig) -> tuple[Times, ...]:
    """Return the fold of the router's scale, which it multiplies with the stream's norm and divides by sqrt(dim)."""
    return (Times(config.hidden_size**-0.5),) if leaf == ROUTER_NORM else ()


def _read_settings(config: ModelConfig, fields: Fields, defaults: ClassDefaults, has_features: bool) -> ModelConfig:
    """Return the config with Gemma 4's own settings: global head size, KV sharing, per-layer inputs, experts, softcap.

    Args:
        fields: settings of the language model in config.json.
        has_features: True if layers of the model type may have features.

    Raises:
        CheckpointError: a setting is missing or wrong.
        UnsupportedError: a setting is not supported.
    """
    types, num_layers = _forced(_types_of(config)), config.num_hidden_layers
    shared = fields.count("num_kv_shared_layers", num_layers)
    width = config.intermediate_size * (2 if fields.flag("use_double_wide_mlp") else 1)
    head_dim, kv_heads = _full_heads(fields, config, types)
    own = Gemma4Settings(
        full_head_dim=head_dim,
        full_kv_heads=kv_heads,
        values_are_keys=bool(fields.flag("attention_k_eq_v")),
        first_shared=num_layers - shared,
        shared_width=width,
        per_layer=_per_layer_width(fields) if has_features else 0,
        per_layer_layers=num_layers,
        per_layer_vocab=fields.size("vocab_size_per_layer_input") or defaults.vocab_size,
        logit_cap=fields.positive("final_logit_softcapping") or 0.0,
    )
    attention = replace(config.attention, layer_types=types)
    return _checked(replace(config, attention=attention, own=own, experts=_experts(fields)), fields.source)


def _read_gguf_settings(config: ModelConfig, keys: GGUFKeys, shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    """Return the config with what differs by layer, which llama.cpp stores as arrays or under keys of its own.

    Args:
        shapes: shape of each tensor by name, in torch order.

    Raises:
        CheckpointError: a key is wrong.
        UnsupportedError: layers of one type have different sizes.
    """
    keys.check_required((WINDOW,))
    num_layers = config.num_hidden_layers
    types = _gguf_layer_types(keys, num_layers)
    shared = keys.fields.count(keys.name("attention.shared_kv_layers"), num_layers)
    widths = keys.sizes("feed_forward_length", num_layers)
    kv_heads = keys.sizes("attention.head_count_kv", num_layers)
    sliding = next((layer for layer, kind in enumerate(types) if kind != FULL), types.index(FULL))
    full = types.index(FULL)
    full_head_dim = keys.size("attention.key_length") or config.attention.head_dim
    own = Gemma4Settings(
        full_head_dim=full_head_dim,
        full_kv_heads=kv_heads[full],
        values_are_keys=f"blk.{full}.attn_v.weight" not in shapes,
        first_shared=num_layers - shared,
        shared_width=widths[-1],
        per_layer=keys.fields.count(keys.name("embedding_length_per_layer_input"), LARGEST_SIZE),
        per_layer_layers=num_layers,
        per_layer_vocab=shapes.get("per_layer_token_embd.weight", (config.vocab_size,))[0],
        logit_cap=keys.fields.number(keys.name("final_logit_softcapping")) or 0.0,
    )
    attention = replace(
        config.attention,
        head_dim=keys.size("attention.key_length_swa") or full_head_dim,
        num_key_value_heads=kv_heads[sliding],
        layer_types=types,
    )
    config = replace(config, intermediate_size=widths[0], attention=attention, own=own, experts=_gguf_experts(keys))
    _check_by_layer(keys, config, kv_heads, widths)
    return _checked(config, keys.fields.source)


def _forced(types: Sequence[str]) -> tuple[str, ...]:
    """Return the layer types with full attention in the last layer, whatever the file says."""
    return (*types[:-1], FULL)


def _per_layer_width(fields: Fields) -> int:
    """Return the number of features for each layer; 0 where the file says 0 or null."""
    return fields.count("hidden_size_per_layer_input", LARGEST_SIZE, PER_LAYER_WIDTH)


def _full_heads(fields: Fields, config: ModelConfig, types: Sequence[str]) -> tuple[int, int]:
    """Return the width of full layers' heads and the number of their kv heads, from either form that files have.

    Files of transformers since 5.23 list the layers that differ, under per_layer_config; others give two numbers.
    """
    usual = config.attention.num_key_value_heads
    if fields.raw.get("per_layer_config") is None:
        kv_heads = fields.size("num_global_key_value_heads") if fields.flag("attention_k_eq_v") else None
        return fields.size("global_head_dim") or FULL_HEAD_DIM, kv_heads or usual
    by_layer = fields.section("per_layer_config")
    if not all(key.isdecimal() for key in by_layer.raw):
        raise fields.wrong("per_layer_config", dict(by_layer.raw), "an object with indices of layers as names")
    names = {int(key): key for key in by_layer.raw}  # transformers writes all with as many digits as the last
    found = set()
    for layer, kind in enumerate(types):
        one = by_layer.section(names.get(layer, ""))
        unknown = sorted(set(one.raw) - set(LAYER_FIELDS))
        if unknown:
            raise UnsupportedError(
                f"{one.source}: {quoted(unknown[0])} differs by layer, which is not supported; known: "
                f"{', '.join(LAYER_FIELDS)}"
            )
        heads = one.size("head_dim") or config.attention.head_dim, one.size("num_key_value_heads") or usual
        if kind == FULL:
            found.add(heads)
        elif heads != (config.attention.head_dim, usual):
            raise UnsupportedError(f"{one.source}: sliding layer {layer} has heads of its own, which is not supported")
    if len(found) > 1:
        raise UnsupportedError(f"{by_layer.source}: full-attention layers have different heads, which is not supported")
    return found.pop()


def _experts(fields: Fields) -> ExpertsConfig | None:
    if not fields.flag("enable_moe_block"):
        return None
    names = ("num_experts", "top_k_experts", "moe_intermediate_size")
    sizes = [fields.size(name) for name in names]
    if None in sizes:
        raise CheckpointError(f"{fields.source}: enable_moe_block needs {', '.join(names)}; add what is missing")
    count, used, width = (size for size in sizes if size is not None)
    return ExpertsConfig(count, used, moe_intermediate_size=width).check(fields.source)


def _gguf_experts(keys: GGUFKeys) -> ExpertsConfig | None:
    count = keys.fields.raw.get(keys.name("expert_count"))
    if count in (None, 0):
        return None
    keys.check_required(("expert_used_count", "expert_feed_forward_length"))
    used, width = keys.required_size("expert_used_count"), keys.required_size("expert_feed_forward_length")
    return ExpertsConfig(keys.required_size("expert_count"), used, moe_intermediate_size=width).check(
        keys.fields.source
    )


def _gguf_layer_types(keys: GGUFKeys, num_layers: int) -> tuple[str, ...]:
    """Return the layers' types; in files without a list of them the last layer has full attention."""
    types = read_gguf_layer_types(keys, num_layers, PATTERN)
    if not isinstance(keys.fields.raw.get(keys.name(WINDOW_PATTERN)), Sequence):
        return _forced(types)
    if types[-1] != FULL:
        name = keys.name(WINDOW_PATTERN)
        raise UnsupportedError(f"{keys.fields.source}: {name} lets the last layer slide, which is not supported")
    return types


def _check_by_layer(keys: GGUFKeys, config: ModelConfig, kv_heads: Sequence[int], widths: Sequence[int]) -> None:
    """Refuse kv heads or MLP widths that differ among layers of one attention type and one kind of KV sharing."""
    own, types = _own(config), _types_of(config)
    usual = config.attention.num_key_value_heads
    for layer, kind in enumerate(types):
        wanted = (
            own.full_kv_heads if kind == FULL else usual,
            own.shared_width if layer >= own.first_shared else config.intermediate_size,
        )
        if (kv_heads[layer], widths[layer]) != wanted:
            raise UnsupportedError(
                f"{keys.fields.source}: layer {layer} has {kv_heads[layer]} kv heads and an MLP of {widths[layer]}, "
                f"others like it {wanted[0]} and {wanted[1]}; such layers are not supported"
            )


def _checked(config: ModelConfig, source: str) -> ModelConfig:
    """Return the config after a check of its heads, and that layers that share a KV cache have one to share.

    Raises:
        CheckpointError: a number of heads is no multiple of kv heads, heads cannot be rotated, or no earlier layer of
            a sharing layer's type has keys and values.
    """
    own, types, heads = _own(config), _types_of(config), config.attention.num_attention_heads
    if heads % own.full_kv_heads or own.full_head_dim % 2:
        raise CheckpointError(
            f"{source}: {heads} heads of {own.full_head_dim} and {own.full_kv_heads} kv heads in full-attention layers "
            "do not fit; correct them"
        )
    lacking = sorted(set(types[own.first_shared :]) - set(types[: own.first_shared]))
    if lacking:
        raise CheckpointError(
            f"{source}: layers from {own.first_shared} on share keys and values, but no earlier layer has "
            f"{lacking[0]}; correct num_kv_shared_layers or layer_types"
        )
    return config


def _types_of(config: ModelConfig) -> tuple[str, ...]:
    """Return the attention type of each layer."""
    assert config.attention.layer_types is not None, "Gemma 4 has both types of layers"
    return config.attention.layer_types


DEFAULTS = ClassDefaults(
    model_type="gemma4_text",
    window_rule="pattern",
    bias_rule="attention_flag",
    vocab_size=262_144,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=30,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=131_072,
    head_dim=256,
    hidden_act="gelu_pytorch_tanh",
    tie_word_embeddings=True,
    bos_token_id=2,
    eos_token_ids=(1,),
    rope_theta=1_000_000.0,
    rope_local_base_freq=10_000.0,
    rope_scaling={"rope_type": "proportional", "partial_rotary_factor": 0.25},
    sliding_window=512,
    sliding_window_pattern=PATTERN,
    own_names={"hidden_act": ("hidden_activation",)},
    own_neutral={
        "final_logit_softcapping": None,
        "num_experts": None,
        "use_bidirectional_attention": ("vision",),  # among the tokens of an image
    },
    computed_gguf=("final_logit_softcapping", "expert_count"),
    sizes_by_layer=(
        "feed_forward_length",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.sliding_window_pattern",
    ),
    required=("hidden_size", "intermediate_size", "num_hidden_layers"),
)
PREFIXES = ("model.language_model.", "model.", "language_model.model.", "")
GEMMA4 = Gemma4(
    DEFAULTS,
    gguf_names=("gemma4",),
    nested_in="gemma4",
    hf_prefixes=PREFIXES,
    ignored=("rotary_emb.inv_freq", "vision_tower.", "embed_vision.", "audio_tower.", "embed_audio."),
)
GEMMA4_UNIFIED = Gemma4(
    replace(DEFAULTS, model_type="gemma4_unified_text", max_position_embeddings=262_144, sliding_window=1024),
    gguf_names=("gemma4",),
    is_read_from_gguf=False,
    nested_in="gemma4_unified",
    hf_prefixes=PREFIXES,
    ignored=("rotary_emb.inv_freq", "vision_embedder.", "embed_vision.", "audio_tower.", "embed_audio."),
)
