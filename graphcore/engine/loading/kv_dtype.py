"""Storage types of keys and values: the setting kv_dtype, checked against the device and the model's heads."""

from math import prod

import torch

from graphcore.config.validate import kv_names
from graphcore.device import DTYPES
from graphcore.engine.loading.open_model import Model
from graphcore.errors import ConfigError
from graphcore.kernels.ops.kv_formats import BLOCK, CODED, FLOAT8, KVType, KVTypes
from graphcore.nn.spec import AttentionSpec

BREAKS_SMALL = "q4_0"  # format in which keys or values of a small model lose too much
SMALL = 4e9  # weights; smaller models lose too much with that format
FLOAT8_CAPABILITY = (8, 9)  # first GPUs that convert float8


def choose_kv_types(setting: str, model: Model, dtype: torch.dtype, device: torch.device) -> KVTypes:
    """Return the storage types of keys and values that the setting kv_dtype names, for a model on a device.

    Args:
        dtype: compute dtype.

    Raises:
        ConfigError: the device or the model's heads do not support a type.
    """
    named: dict[str, KVType] = {"auto": dtype, "fp8": FLOAT8, **{name: name for name in CODED}, **DTYPES}
    names = kv_names(setting)
    if "fp8" in names:
        _check_float8(setting, device)
    coded = [name for name in names if name in CODED]
    for index, block in enumerate(model.spec.blocks):
        attention = block.attention
        if coded and isinstance(attention, AttentionSpec) and attention.head_dim % BLOCK:
            raise ConfigError(
                f"kv_dtype={setting}: {coded[0]} keeps heads in blocks of {BLOCK}, and heads of layer {index} have "
                f"{attention.head_dim} features; use kv_dtype=auto, bf16 or fp16"
            )
        is_mixed = bool(coded) or "fp8" in names
        if is_mixed and isinstance(attention, AttentionSpec) and attention.values_from % mixed_together(attention):
            raise ConfigError(
                f"kv_dtype={setting}: quantised rows are mixed in blocks of {mixed_together(attention)} features, and "
                f"the latent values of layer {index} begin at feature {attention.values_from}; use kv_dtype=auto, bf16 "
                "or fp16"
            )
    return KVTypes(*(named[name] for name in names))


def mixed_together(attention: AttentionSpec) -> int:
    """Return the number of neighbouring features of a head that a Hadamard matrix mixes (kernels/ops/kv_formats.py)."""
    return attention.head_dim & -attention.head_dim


def _check_float8(setting: str, device: torch.device) -> None:
    if device.type != "cuda":
        raise ConfigError(f"kv_dtype={setting}: fp8 is for a GPU, and this is {device}; use kv_dtype=q8_0")
    found = torch.cuda.get_device_capability(device) if torch.cuda.is_available() else FLOAT8_CAPABILITY
    if found < FLOAT8_CAPABILITY:
        raise ConfigError(
            f"kv_dtype={setting}: fp8 needs a GPU of compute capability 8.9, and this one has "
            f"{found[0]}.{found[1]}; use kv_dtype=q8_0"
        )


def note_on_kv_types(types: KVTypes, model: Model) -> tuple[str, ...]:
    """Return a note if the model is too small for keys or values in q4_0; else nothing."""
    weights = sum(prod(info.shape) for info in model.checkpoint.tensors.values())
    if BREAKS_SMALL not in types or weights >= SMALL:
        return ()
    return (
        f"kv_dtype={types}: keys or values in 4 bits noticeably degrade models of fewer than {SMALL / 1e9:.0f} billion "
        f"weights, and this one has {weights / 1e9:.1f} billion; with q8_0 answers are nearly the same",
    )
