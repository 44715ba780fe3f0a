"""Names of stored encodings to the formats that read them, and the one call that most people need."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from graphcore.errors import UnsupportedError
from graphcore.quant import formats
from graphcore.quant.format import Format
from graphcore.registry import collect, lookup


def _by_name(found: Sequence[Format]) -> Mapping[str, Format]:
    table = {one.name: one for one in found}
    assert len(table) == len(found), f"two formats share a name: {sorted(one.name for one in found)}"
    return MappingProxyType(table)


FORMATS: Mapping[str, Format] = _by_name(
    collect(formats, Format)  # type: ignore[type-abstract]  # instances are gathered, none is made
)


def dequantize(raw: torch.Tensor, name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the dense tensor that `raw` encodes.

    Args:
        raw: [nbytes] uint8, contiguous: the tensor's bytes as the file has them.
        name: lower-case ggml type name, such as "q4_k".
        shape: torch order, in elements.
        dtype: of the result; equal to dequantising to float32 and casting, without the whole float32 copy.

    Returns:
        `shape`, `dtype`, bit-exact with libggml in float32.

    Raises:
        UnsupportedError: no format has this name; the message lists those there are.
        CheckpointError: bytes, shape and block size do not fit together.
    """
    return lookup("weight format", name, FORMATS, UnsupportedError).dequantize(raw, shape, dtype)
