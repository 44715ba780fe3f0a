"""Gemma 4 text models (E2B, E4B, 12B, 31B, 26B-A4B): Gemma 3's order of norms, with much that is by layer.

    full layers        heads of another width, a rotation of their first quarter, often keys that are values, too
    last layers        may attend keys and values of the last layer of their type that has its own (E2B, E4B)
    features           each layer multiplies a gate by a token's features of that layer (E2B, E4B)
    experts            beside the MLP (26B-A4B); router, experts and MLP read the stream through a norm each

    Hugging Face       layers.N.experts.gate_up_proj [X, 2F, D], gate first; experts.down_proj [X, D, F]; router.proj,
                       router.scale [D], router.per_expert_scale [X]; layer_scalar [1]
                       embed_tokens_per_layer [V, L * P], per_layer_model_projection, per_layer_projection_norm
    GGUF               ffn_gate_up_exps, ffn_down_exps; ffn_gate_inp.weight and .scale; ffn_down_exps.scale;
                       layer_output_scale; per_layer_token_embd, per_layer_model_proj, per_layer_proj_norm

Norms hold their whole weight in both (not 1 + w). Scores are not scaled, as queries and keys are normalised.

Source: transformers 5.23, modeling_gemma4 and modeling_gemma4_unified; gguf-py, constants.py (MODEL_ARCH.GEMMA4).
"""

from collections.abc import Mapping
from dataclasses import replace

from graphcore.activations import Gating
from graphcore.arch.architecture import Architecture, Shapes, TensorSource, gguf_name, split_layer
from graphcore.arch.config.class_defaults import ClassDefaults
from graphcore.arch.config.gemma4_settings import (
    FULL,
    PATTERN,
    Gemma4Settings,
    read_gguf_settings,
    read_settings,
    types_of,
)
from graphcore.arch.config.gguf_keys import GGUFKeys
from graphcore.arch.config.model_config import ModelConfig
from graphcore.arch.config.typed_fields import Fields
from graphcore.arch.folds import PickRows, Times
from graphcore.arch.rotary import GGUF_LEAVES, attention_of
from graphcore.checkpoint.gguf_reader import MetadataScalar
from graphcore.nn.spec import (
    AttentionSpec,
    BlockSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    NormSpec,
    PerLayerSpec,
)

HF_LEAVES = {
    "beside.mlp_norm": "pre_feedforward_layernorm",
    "beside.experts_norm": "pre_feedforward_layernorm_2",
    "beside.mlp_answer_norm": "post_feedforward_layernorm_1",
    "beside.experts_answer_norm": "post_feedforward_layernorm_2",
    "beside.mlp.gate_proj": "mlp.gate_proj",
    "beside.mlp.up_proj": "mlp.up_proj",
    "beside.mlp.down_proj": "mlp.down_proj",
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
    "beside.mlp_norm": "ffn_norm",
    "beside.experts_norm": "pre_ffw_norm_2",
    "beside.mlp_answer_norm": "post_ffw_norm_1",
    "beside.experts_answer_norm": "post_ffw_norm_2",
    "beside.mlp.gate_proj": "ffn_gate",
    "beside.mlp.up_proj": "ffn_up",
    "beside.mlp.down_proj": "ffn_down",
    "per_layer.gate": "inp_gate",
    "per_layer.projection": "proj",
    "per_layer.norm": "post_norm",
    "embed_tokens.per_layer.table": "per_layer_token_embd",
    "embed_tokens.per_layer.projection": "per_layer_model_proj",
    "embed_tokens.per_layer.norm": "per_layer_proj_norm",
}
ROUTER_NORM = "beside.router_norm.weight"
# Vectors of a layer, with their names in safetensors and in GGUF.
VECTORS = {
    "output_factor": ("layer_scalar", "layer_output_scale.weight"),
    "mlp.expert_scales": ("router.per_expert_scale", "ffn_down_exps.scale"),
    ROUTER_NORM: ("router.scale", "ffn_gate_inp.scale"),
}
UNUSED_IF_SHARED = ("k_proj", "v_proj", "k_norm", "v_norm", "attn_k", "attn_v", "attn_k_norm")
GATE_AND_UP = ("mlp.experts.gate_proj.weight", "mlp.experts.up_proj.weight")


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
            for layer, layer_type in enumerate(types_of(config))
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
        """Return the config with heads of full layers, shared layers, features, experts and the logits' bound."""
        return read_settings(config, fields, self.defaults, has_features=self.model_type == "gemma4_text")

    def complete_gguf(self, config: ModelConfig, keys: GGUFKeys, shapes: Shapes) -> ModelConfig:
        """Return the config with what differs by layer, which llama.cpp stores as arrays or under keys of its own."""
        return read_gguf_settings(config, keys, shapes)

    def gguf_fields(self, config: ModelConfig) -> Mapping[str, MetadataScalar | tuple[int, ...]]:
        """Return the keys of what differs by layer, of features, experts and the logits' bound."""
        own, types, attention = _own(config), types_of(config), config.attention
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
        beside=mlp,
    )


def _expert_width(config: ModelConfig) -> int:
    assert config.experts is not None and config.experts.moe_intermediate_size is not None, "experts have a width"  # noqa: PT018
    return config.experts.moe_intermediate_size


def _half(leaf: str, config: ModelConfig) -> PickRows:
    """Return the fold that picks gate or up out of both."""
    width = _expert_width(config)
    begin = GATE_AND_UP.index(leaf) * width
    return PickRows(begin, begin + width, axis=-2)


def _vector_folds(leaf: str, config: ModelConfig) -> tuple[Times, ...]:
    """Return the fold of the router's scale, which it multiplies with the stream's norm and divides by sqrt(dim)."""
    return (Times(config.hidden_size**-0.5),) if leaf == ROUTER_NORM else ()


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
