"""Finds the format of a stored encoding by name, and dequantises a tensor."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from graphcore.encodings import Encoding
from graphcore.errors import UnsupportedError
from graphcore.quant import formats
from graphcore.quant.format import Format
from graphcore.registry import collect, lookup


def _by_name(found: Sequence[Format]) -> Mapping[str, Format]:
    table = {one.name: one for one in found}
    assert len(table) == len(found), f"two formats share a name: {sorted(one.name for one in found)}"
    return MappingProxyType(table)


FORMATS: Mapping[str, Format] = _by_name(
    collect(formats, Format)  # type: ignore[type-abstract]  # instances are gathered, none is created
)

# All encodings of GGUF files: formats of weights, and numbers that are never weights.
ENCODINGS: Mapping[str, Encoding] = MappingProxyType(
    {
        **FORMATS,
        **{
            name: Encoding(name, 1, nbytes, ggml_id)
            for name, nbytes, ggml_id in (("i8", 1, 24), ("i16", 2, 25), ("i32", 4, 26), ("i64", 8, 27), ("f64", 8, 28))
        },
    }
)


def has_tensor_scale(encoding: str) -> bool:
    """Return whether a tensor of this encoding has one scale after its last row; any encoding's name is accepted."""
    return encoding in ENCODINGS and ENCODINGS[encoding].has_tensor_scale


def dequantize(raw: torch.Tensor, name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the dense tensor that `raw` encodes.

    Args:
        raw: [nbytes] uint8, contiguous: the tensor's bytes as the file has them.
        name: lower-case ggml type name, such as "q4_k".
        shape: torch order, in elements.
        dtype: dtype of the result; equal to dequantising to float32 and casting, without the whole float32 copy.

    Returns:
        `shape`, `dtype`, bit-exact with libggml in float32.

    Raises:
        UnsupportedError: no format has this name; the message lists the known ones.
        CheckpointError: bytes, shape and block size do not fit together.
    """
    return lookup("weight format", name, FORMATS, UnsupportedError).dequantize(raw, shape, dtype)
