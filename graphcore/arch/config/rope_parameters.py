"""The rotary settings of a config.json, in one form for all versions of transformers.

    transformers 5   "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32, ...}
                     "rope_parameters": {"full_attention": {...}, "sliding_attention": {...}}
    before           "rope_theta": 5e5, "rope_scaling": {"type" or "rope_type": ..., ...}, "rope_local_base_freq": 1e4

become a theta, a scaling or None, and a second theta for sliding layers. Source: transformers 5.23,
modeling_rope_utils.py (`convert_rope_params_to_dict`), and its override in Gemma3TextConfig.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from graphcore.arch.config.class_defaults import LAYER_TYPES, ClassDefaults
from graphcore.arch.config.model_config import RopeParameters, RopeScaling
from graphcore.arch.config.typed_fields import Fields
from graphcore.errors import CheckpointError, UnsupportedError, quoted

ORIGINAL = "original_max_position_embeddings"
YARN_BETA_FAST, YARN_BETA_SLOW = 32.0, 1.0

SCALING_KEYS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "yarn": ("factor", ORIGINAL),
    "longrope": (ORIGINAL,),
    "proportional": (),
}


def read_rope(fields: Fields, defaults: ClassDefaults, head_dim: int, context: int) -> RopeParameters:
    """Return the rotary parameters of a config.json.

    Args:
        head_dim: number of features of a head.
        context: max_position_embeddings, in tokens.

    Raises:
        CheckpointError: a key is missing, or of the wrong type or sign.
        UnsupportedError: the scaling is not one of `SCALING_KEYS`, it differs by layer type in a model type with one
            table, sliding layers are scaled, or only part of the head is rotated.
    """
    full = full_attention_rope(fields, defaults)
    width = _read_width(fields, full, defaults, head_dim)
    theta = full.positive("rope_theta") or fields.positive("rope_theta") or defaults.rope_theta
    scaling = read_scaling(full, defaults, context)
    check_yarn_base(theta, scaling, fields, "rope_theta")
    parameters = _with_factors(RopeParameters(theta, scaling, width=width), full, head_dim)
    if defaults.rope_local_base_freq is None:
        _refuse_layer_types(fields, defaults)
        return parameters
    local = _of_layers(fields, defaults, "sliding_attention")
    if read_scaling(local, defaults, context) is not None:
        raise UnsupportedError(
            f"{local.source}: sliding layers have a rope_type other than 'default', which no reader of "
            f"{defaults.model_type} knows; correct the file or use a checkpoint without it"
        )
    local_theta = local.positive("rope_theta") or fields.positive("rope_local_base_freq")
    return replace(parameters, local_theta=local_theta or defaults.rope_local_base_freq)


def full_attention_rope(fields: Fields, defaults: ClassDefaults) -> Fields:
    """Return the rotary settings of full-attention layers, completed by the type's defaults if no type is named.

    Raises:
        CheckpointError: a part of the settings is no object.
    """
    full = _of_layers(fields, defaults, "full_attention")
    return full if _names_a_type(full) else _completed(full, defaults)


def _read_width(fields: Fields, rope: Fields, defaults: ClassDefaults, head_dim: int) -> int | None:
    """Return the number of features of a head that rotate; None for all.

    Raises:
        CheckpointError: the share of them is above 1, or gives an odd number.
    """
    if defaults.partial_rotary_factor is None:
        return None
    name = "partial_rotary_factor"
    factor = rope.positive(name) or fields.positive(name) or defaults.partial_rotary_factor
    width = int(head_dim * min(factor, 1.0))  # a larger factor is refused below, and may overflow here
    if factor > 1 or width < 2 or width % 2:
        raise fields.wrong(name, factor, f"a share of head_dim {head_dim} that is even and at most all of it")
    return None if width == head_dim else width


def _names_a_type(rope: Fields) -> bool:
    return any(rope.raw.get(name) is not None for name in ("rope_type", "type"))


def _completed(rope: Fields, defaults: ClassDefaults) -> Fields:
    """Return the settings of a file that names no rope type, completed by the model type's defaults."""
    return Fields({**(defaults.rope_scaling or {}), **rope.raw}, rope.source)


def read_scaling(rope: Fields, defaults: ClassDefaults, context: int) -> RopeScaling | None:
    """Return the scaling that a flat object describes; None for unscaled frequencies.

    Args:
        context: max_position_embeddings in tokens, the default of original_max_position_embeddings.

    Raises:
        CheckpointError: a key that the rope type needs is missing, or of the wrong type or sign.
        UnsupportedError: the rope type is unknown, or only part of the head is rotated.
    """
    stated = rope.text("rope_type", "type") or "default"
    rope_type = defaults.rope_types.get(stated, stated)
    if rope_type not in SCALING_KEYS:
        raise UnsupportedError(
            f"{rope.source}: rope_type {quoted(rope_type)} is not supported; known: {', '.join(sorted(SCALING_KEYS))}"
        )
    if rope_type == "proportional":
        return _proportional(rope)
    if defaults.partial_rotary_factor is None and rope.number("partial_rotary_factor") not in (None, 1.0):
        raise UnsupportedError(f"{rope.source}: partial_rotary_factor other than 1 is not supported")
    if ORIGINAL in SCALING_KEYS[rope_type]:
        rope = _with_original(rope, context)
    missing = [key for key in SCALING_KEYS[rope_type] if rope.raw.get(key) is None]
    if missing:
        raise CheckpointError(f"{rope.source}: rope_type '{rope_type}' needs {', '.join(missing)}; add what is missing")
    scaling: dict[str, str | float] = {"rope_type": rope_type}
    scaling.update((key, _scaling_value(rope, key)) for key in SCALING_KEYS[rope_type])
    if rope_type == "linear" and rope.whole(ORIGINAL) is not None:
        scaling[ORIGINAL] = _scaling_value(rope, ORIGINAL)
    _check_bands(rope, scaling)
    if rope_type == "yarn":
        return _with_yarn(scaling, rope, defaults)
    if rope_type == "longrope":
        return _with_longrope(scaling, rope, context)
    return scaling if len(scaling) > 1 else None


def _with_original(rope: Fields, context: int) -> Fields:
    """Return the settings with the context before scaling, and with the factor that transformers uses for null."""
    original = rope.whole(ORIGINAL) or context
    factor = {"factor": context / original} if rope.is_null("factor") else {}
    return Fields({**rope.raw, ORIGINAL: original, **factor}, rope.source)


def advice_on_context(rope: RopeParameters | None) -> str:
    """Return what to do for more tokens than the longest context, after a semicolon; empty where nothing helps."""
    if rope is None or rope.scaling is None or rope.scaling["rope_type"] != "dynamic":
        return ""
    return (
        "; beyond that its rope_type 'dynamic' has other frequencies for each length, which cached keys do not follow: "
        "set model.fallback=transformers"
    )


def note_on_dynamic(rope: RopeParameters | None, context: int, source: str) -> tuple[str, ...]:
    """Return a line about a dynamic scaling, which is computed only up to `context` tokens; empty without one."""
    if not advice_on_context(rope):
        return ()
    return (
        f"{source}: rope_type 'dynamic' changes nothing up to max_position_embeddings ({context} tokens), the longest "
        "context here; model.fallback=transformers runs longer ones",
    )


def _proportional(rope: Fields) -> RopeScaling:
    """Return the scaling that rotates only a share of a head's pairs, all of them by default."""
    share = rope.positive("partial_rotary_factor") or 1.0
    if share > 1.0:
        raise rope.wrong("partial_rotary_factor", share, "at most 1")
    factor = rope.positive("factor") or 1.0
    return {"rope_type": "proportional", "partial_rotary_factor": share, "factor": factor}


def _with_yarn(scaling: RopeScaling, rope: Fields, defaults: ClassDefaults) -> RopeScaling:
    """Add optional keys of YaRN or their defaults; mscale counts only with mscale_all_dim, as in transformers."""
    factor = float(scaling["factor"])
    given = rope.positive("attention_factor")
    mscale, of_all = (rope.positive(name) if rope.number(name) else None for name in ("mscale", "mscale_all_dim"))
    ratio = yarn_attention_factor(factor, mscale or 1.0) / yarn_attention_factor(factor, of_all or 1.0)
    inferred = ratio if mscale and of_all else yarn_attention_factor(factor)
    truncate = rope.flag("truncate")
    added = {
        "beta_fast": rope.positive("beta_fast") or YARN_BETA_FAST,
        "beta_slow": rope.positive("beta_slow") or YARN_BETA_SLOW,
        "attention_factor": given or inferred,
        "truncate": defaults.yarn_truncate if truncate is None else truncate,
    }
    if added["beta_fast"] < added["beta_slow"]:
        raise rope.wrong("beta_fast", added["beta_fast"], "at least beta_slow")
    return {**scaling, **added}


def check_yarn_base(theta: float, scaling: RopeScaling | None, fields: Fields, name: str) -> None:
    """Refuse YaRN on a base of 1, whose frequencies are all the same, so that its ramp has no place.

    Args:
        fields: settings of the file.
        name: name of the base in the file.

    Raises:
        CheckpointError: the base is 1, and the scaling is YaRN.
    """
    if theta == 1.0 and scaling is not None and scaling["rope_type"] == "yarn":
        raise fields.wrong(name, theta, "other than 1 with rope_type 'yarn'")


def _with_longrope(scaling: RopeScaling, rope: Fields, context: int) -> RopeScaling:
    """Add the stated attention factor, or the one that follows from the extension of the context."""
    original, given = float(scaling[ORIGINAL]), rope.positive("attention_factor")
    factor = rope.positive("factor") or context / original
    if given is None and factor > 1 and original < 2:
        raise rope.wrong(ORIGINAL, scaling[ORIGINAL], "at least 2")
    inferred = math.sqrt(1 + math.log(factor) / math.log(original)) if given is None and factor > 1 else 1.0
    return {**scaling, "attention_factor": given or inferred}


def _with_factors(parameters: RopeParameters, rope: Fields, head_dim: int) -> RopeParameters:
    """Return the parameters with longrope's two lists of divisors; unchanged for other rope types."""
    if parameters.scaling is None or parameters.scaling["rope_type"] != "longrope":
        return parameters
    pairs = (parameters.width or head_dim) // 2
    short, long = (rope.divisors(name, pairs) for name in ("short_factor", "long_factor"))
    return replace(parameters, short_factors=short, long_factors=long)


def note_on_longrope(rope: RopeParameters | None, context: int) -> tuple[str, ...]:
    """Return a note if LongRoPE's long factors rotate short sequences too, unlike in transformers; else nothing.

    They do if the engine's context length, `context`, is above LongRoPE's original context.
    """
    if rope is None or rope.scaling is None or rope.scaling["rope_type"] != "longrope":
        return ()
    original = int(rope.scaling[ORIGINAL])
    if context <= original:
        return ()
    return (
        f"context_length={context} is above {original}: all sequences rotate with longrope's long_factor, as in "
        f"llama.cpp; transformers takes short_factor for those of up to {original} tokens, as does "
        f"context_length={original}",
    )


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's factor of cosines and sines. Source: Peng et al. 2023, equation 22."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _scaling_value(rope: Fields, key: str) -> float:
    value = rope.whole(key) if key == ORIGINAL else rope.positive(key)
    assert value is not None, f"{key} was checked to be there"
    return value


def _check_bands(rope: Fields, scaling: RopeScaling) -> None:
    """Refuse a Llama 3 scaling whose bands overlap, because the blend divides by the distance between them."""
    if scaling["rope_type"] == "llama3" and float(scaling["high_freq_factor"]) <= float(scaling["low_freq_factor"]):
        raise rope.wrong("high_freq_factor", scaling["high_freq_factor"], "above low_freq_factor")


def _of_layers(fields: Fields, defaults: ClassDefaults, layer_type: str) -> Fields:
    """Return the settings of one layer type: its own object, or the flat one for full attention; old keys win."""
    merged: dict[str, object] = {}
    found = [name for name in ("rope_parameters", "rope_scaling") if fields.raw.get(name) is not None]
    for name in found:
        rope = fields.section(name)
        if _is_per_layer_type(rope):
            merged.update(rope.section(layer_type).raw)
        elif layer_type == "full_attention":
            beside = fields.raw.get(ORIGINAL) if fields.raw.get(ORIGINAL) is not None else defaults.original_context
            outside = {} if beside is None else {ORIGINAL: beside}
            merged.update({**rope.raw, **outside})  # transformers prefers the one beside the rotary settings
    return Fields(merged, f"{fields.source}: {' and '.join(found) or 'rope_parameters'}")


def _refuse_layer_types(fields: Fields, defaults: ClassDefaults) -> None:
    for name in ("rope_parameters", "rope_scaling"):
        if _is_per_layer_type(fields.section(name)):
            raise UnsupportedError(
                f"{fields.source}: {name} differs by layer type, but {defaults.model_type} has one rotary table; "
                "give one flat object"
            )


def _is_per_layer_type(rope: Fields) -> bool:
    return any(layer_type in rope.raw for layer_type in LAYER_TYPES)
