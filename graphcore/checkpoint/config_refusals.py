"""Settings that change the mathematics in ways graphcore does not compute: refused by name, never ignored."""

from collections.abc import Mapping

from graphcore.activations import ACTIVATIONS
from graphcore.checkpoint.config_defaults import ClassDefaults
from graphcore.checkpoint.config_fields import Fields
from graphcore.checkpoint.config_ternary import METHOD as BITNET
from graphcore.checkpoint.quoted import quoted
from graphcore.errors import UnsupportedError

NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "add_cross_attention": (False,),
    "attention_multiplier": (1,),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "n_routed_experts": (0,),
    "no_rope_layers": ([],),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "partial_rotary_factor": (1,),
    "residual_multiplier": (1,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
    "use_bidirectional_attention": (False,),
}
"""By field, the values besides null that change nothing."""

OF_EXPERTS = ("num_experts", "num_local_experts")
"""Fields that are computed where the model type has experts."""

REFUSED_PREFIXES = ("altup",)


def refuse_unknown_mathematics(fields: Fields, defaults: ClassDefaults) -> None:
    """Pass if every setting that changes the mathematics is one that graphcore computes.

    Raises:
        UnsupportedError: one is not, or the weights are stored in a quantised form; the message names it.
    """
    for name, value in fields.raw.items():
        neutral = NEUTRAL_VALUES.get(name)
        is_computed = defaults.num_local_experts is not None and name in OF_EXPERTS
        if is_computed or (neutral is None and not name.startswith(REFUSED_PREFIXES)):
            continue
        if value is not None and value not in (neutral or ()):
            raise UnsupportedError(
                f"{fields.source}: {quoted(name)} is {quoted(value)}, which changes the mathematics and is not "
                "supported; use a checkpoint without it"
            )
    _refuse_quantization(fields, defaults)


def _refuse_quantization(fields: Fields, defaults: ClassDefaults) -> None:
    if fields.raw.get("quantization_config") is None:
        return
    method = fields.section("quantization_config").text("quant_method")
    if method == BITNET or method in defaults.quant_methods:
        return
    raise UnsupportedError(
        f"{fields.source}: quantization_config has quant_method {quoted(method)}, which is not supported; "
        "use the unquantised checkpoint or a GGUF of it"
    )


def known_activation(name: str, source: str) -> str:
    """Return `name` if it is an activation that graphcore computes.

    Raises:
        UnsupportedError: it is not.
    """
    if name in ACTIVATIONS:
        return name
    raise UnsupportedError(f"{source}: activation {quoted(name)} is not supported; known: {', '.join(ACTIVATIONS)}")
