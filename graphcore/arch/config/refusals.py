"""Settings that change a model's mathematics and are not supported. They are refused by name, never ignored."""

from collections.abc import Mapping

from graphcore.activations import ACTIVATIONS, OTHER_NAMES
from graphcore.arch.config.class_defaults import ClassDefaults
from graphcore.arch.config.gguf_keys import YARN_ATTENTION, GGUFKeys
from graphcore.arch.config.typed_fields import Fields
from graphcore.errors import UnsupportedError, quoted

NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "add_cross_attention": (False,),
    "attention_multiplier": (1,),
    "attn_logit_softcapping": (),
    "attn_output_gate": (False,),
    "clip_qkv": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "is_causal": (True,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "n_group": (1,),
    "n_routed_experts": (0,),
    "n_shared_experts": (0,),
    "no_rope_layers": ([],),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "partial_rotary_factor": (1,),
    "residual_multiplier": (1,),
    "routed_scaling_factor": (1,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
    "scoring_func": ("softmax",),
    "shared_expert_intermediate_size": (0,),
    "topk_group": (1,),
    "use_bidirectional_attention": (False,),
}
"""Values other than null that change nothing, by field of config.json."""

NEUTRAL_GGUF_VALUES: Mapping[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_gating_func": (0, 3),  # 3 is a softmax over the scores of the selected experts
    "expert_group_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "residual_scale": (0, 1),
    "rope.scaling.attn_factor": (0, 1),
    YARN_ATTENTION: (0, 1),
    "rope.scaling.yarn_ext_factor": (-1, 1),  # llama.cpp: negative means that the rope type decides
    "rope.scaling.yarn_log_multiplier": (0,),
}
"""Values that change nothing, by key of a GGUF architecture (0 means unset in llama.cpp)."""

OF_EXPERTS = ("num_experts", "num_local_experts")
"""Fields that are supported for model types with experts."""

OF_ROUTING = ("n_group", "topk_group", "routed_scaling_factor")
"""Fields that are supported for model types whose experts have scores of their own."""

OF_GGUF_ROUTING = ("expert_gating_func", "expert_group_count", "expert_weights_norm", "expert_weights_scale")
"""Keys of a GGUF file that are supported for these model types."""

REFUSED_PREFIXES = ("altup",)


def refuse_unknown_mathematics(fields: Fields, defaults: ClassDefaults) -> None:
    """Refuse a config.json with a setting that changes the mathematics and is not supported.

    Raises:
        UnsupportedError: there is such a setting; the message names it.
    """
    values, experts = {**NEUTRAL_VALUES, **defaults.own_neutral}, defaults.experts
    computed = (
        *(OF_EXPERTS if experts is not None else ()),
        *(OF_ROUTING if experts is not None and experts.routing is not None else ()),
    )
    for name, value in fields.raw.items():
        neutral = values.get(name)
        if name in computed or (neutral is None and not name.startswith(REFUSED_PREFIXES)):
            continue
        if value is not None and value not in (neutral or ()):
            raise UnsupportedError(
                f"{fields.source}: {quoted(name)} is {quoted(value)}, which changes the mathematics and is not "
                "supported; use a checkpoint without it"
            )


def refuse_unknown_gguf_mathematics(keys: GGUFKeys) -> None:
    """Refuse GGUF metadata with a key that changes the mathematics and is not supported.

    Raises:
        UnsupportedError: there is such a key; the message names it.
    """
    defaults, experts = keys.defaults, keys.defaults.experts
    has_shared = experts is not None and experts.shared_expert_intermediate_size is not None
    computed = {
        *defaults.computed_gguf,
        *(["expert_count"] if experts is not None else []),
        *(OF_GGUF_ROUTING if experts is not None and experts.routing is not None else ()),
        *(["expert_shared_count", "expert_shared_feed_forward_length"] if has_shared else []),
        *(["nextn_predict_layers"] if defaults.delta is not None else []),
        *([YARN_ATTENTION] if keys.fields.raw.get(keys.name("rope.scaling.type")) == "yarn" else []),
    }
    for key, neutral in {**NEUTRAL_GGUF_VALUES, **defaults.own_neutral_gguf}.items():
        value = keys.fields.raw.get(keys.name(key))
        is_computed = key in computed
        if value is not None and value not in neutral and not is_computed:
            raise UnsupportedError(
                f"{keys.fields.source}: {keys.name(key)} is {quoted(value)}, which changes the mathematics and is "
                "not supported; use a checkpoint without it"
            )


def known_activation(name: str, source: str) -> str:
    """Return the name of an activation in `ACTIVATIONS`, given any of its names in config.json.

    Raises:
        UnsupportedError: the activation is not supported.
    """
    known = OTHER_NAMES.get(name, name)
    if known in ACTIVATIONS:
        return known
    raise UnsupportedError(
        f"{source}: activation {quoted(name)} is not supported; known: {', '.join((*ACTIVATIONS, *OTHER_NAMES))}"
    )
