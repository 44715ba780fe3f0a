"""Rotary settings of a config.json, brought to one form whichever transformers wrote them.

    transformers 5   "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32, ...}
                     "rope_parameters": {"full_attention": {...}, "sliding_attention": {...}}
    before           "rope_theta": 5e5, "rope_scaling": {"type" or "rope_type": ..., ...}, "rope_local_base_freq": 1e4

become a theta, a scaling (None when there is none) and a second theta for sliding layers. Source: transformers 5.23,
modeling_rope_utils.py (`convert_rope_params_to_dict`) and Gemma3TextConfig's override of it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from graphcore.checkpoint.config_defaults import LAYER_TYPES, ClassDefaults
from graphcore.checkpoint.config_fields import Fields
from graphcore.checkpoint.quoted import quoted
from graphcore.errors import CheckpointError, UnsupportedError

RopeScaling = Mapping[str, str | float]

YARN_BETA_FAST, YARN_BETA_SLOW = 32.0, 1.0

SCALING_KEYS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True)
class RopeParameters:
    """What every rotary table of a model is made from.

    Attributes:
        theta: base of the frequencies, of full-attention layers where sliding ones have their own.
        scaling: None, or {"rope_type": "linear" | "llama3" | "yarn", ...} with exactly that type's keys of
            `SCALING_KEYS`; yarn has what `yarn_scaling` adds, too.
        local_theta: base of sliding layers, never scaled; None where all layers share one.
    """

    theta: float
    scaling: RopeScaling | None = None
    local_theta: float | None = None


def read_rope(fields: Fields, defaults: ClassDefaults) -> RopeParameters:
    """Return the rotary settings in their one form.

    Raises:
        CheckpointError: a key is missing, of the wrong type or sign.
        UnsupportedError: the type is not one of `SCALING_KEYS`, layer types differ where the model's class has one
            table, local layers are scaled, or only a part of the head is rotated.
    """
    full = _of_layers(fields, "full_attention")
    theta = full.positive("rope_theta") or fields.positive("rope_theta") or defaults.rope_theta
    scaling = read_scaling(full if _names_a_type(full) else _completed(full, defaults), defaults)
    if defaults.rope_local_base_freq is None:
        _refuse_layer_types(fields, defaults)
        return RopeParameters(theta, scaling)
    local = _of_layers(fields, "sliding_attention")
    if read_scaling(local, defaults) is not None:
        raise UnsupportedError(
            f"{local.source}: sliding layers have a rope_type other than 'default', which no reader of "
            f"{defaults.model_type} knows; correct the file or use a checkpoint without it"
        )
    local_theta = local.positive("rope_theta") or fields.positive("rope_local_base_freq")
    return RopeParameters(theta, scaling, local_theta or defaults.rope_local_base_freq)


def _names_a_type(rope: Fields) -> bool:
    return any(rope.raw.get(name) is not None for name in ("rope_type", "type"))


def _completed(rope: Fields, defaults: ClassDefaults) -> Fields:
    """Return the settings of a file that names no type, with those of its model type's class."""
    return Fields({**(defaults.rope_scaling or {}), **rope.raw}, rope.source)


def read_scaling(rope: Fields, defaults: ClassDefaults) -> RopeScaling | None:
    """Return the scaling that a flat object asks for, or None for plain frequencies.

    Raises:
        CheckpointError: a key of its type is missing, or of the wrong type or sign.
        UnsupportedError: the type is unknown, or rotates a part of the head only.
    """
    rope_type = rope.text("rope_type", "type") or "default"
    if rope_type not in SCALING_KEYS:
        raise UnsupportedError(
            f"{rope.source}: rope_type {quoted(rope_type)} is not supported; known: {', '.join(sorted(SCALING_KEYS))}"
        )
    if rope.number("partial_rotary_factor") not in (None, 1.0):
        raise UnsupportedError(f"{rope.source}: partial_rotary_factor other than 1 is not supported")
    missing = [key for key in SCALING_KEYS[rope_type] if rope.raw.get(key) is None]
    if missing:
        raise CheckpointError(f"{rope.source}: rope_type '{rope_type}' needs {', '.join(missing)}; add what is missing")
    scaling: dict[str, str | float] = {"rope_type": rope_type}
    scaling.update((key, _scaling_value(rope, key)) for key in SCALING_KEYS[rope_type])
    _check_bands(rope, scaling)
    if rope_type == "yarn":
        return _with_yarn(scaling, rope, defaults)
    return scaling if len(scaling) > 1 else None


def _with_yarn(scaling: RopeScaling, rope: Fields, defaults: ClassDefaults) -> RopeScaling:
    """Add what a yarn object may leave out; mscale counts only beside mscale_all_dim, as in transformers."""
    factor = float(scaling["factor"])
    given = rope.positive("attention_factor")
    mscale, of_all = rope.positive("mscale"), rope.positive("mscale_all_dim")
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


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """Return what YaRN multiplies cosines and sines by. Source: Peng et al. 2023, equation 22."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _scaling_value(rope: Fields, key: str) -> float:
    value = rope.size(key) if key == "original_max_position_embeddings" else rope.positive(key)
    assert value is not None, f"{key} was checked to be there"
    return value


def _check_bands(rope: Fields, scaling: RopeScaling) -> None:
    """Refuse a Llama 3 scaling whose two bands overlap: the blend between them divides by their distance."""
    if scaling["rope_type"] == "llama3" and float(scaling["high_freq_factor"]) <= float(scaling["low_freq_factor"]):
        raise rope.wrong("high_freq_factor", scaling["high_freq_factor"], "above low_freq_factor")


def _of_layers(fields: Fields, layer_type: str) -> Fields:
    """Return the settings of one layer type: its own object, or for full attention the flat one, old keys last."""
    merged: dict[str, object] = {}
    found = [name for name in ("rope_parameters", "rope_scaling") if fields.raw.get(name) is not None]
    for name in found:
        rope = fields.section(name)
        if _is_per_layer_type(rope):
            merged.update(rope.section(layer_type).raw)
        elif layer_type == "full_attention":
            merged.update(rope.raw)
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
