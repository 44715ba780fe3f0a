"""The element types that are stored as they are, one value after the other, little-endian; and back to tensors."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

DENSE_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "f64": torch.float64,
        "f32": torch.float32,
        "f16": torch.float16,
        "bf16": torch.bfloat16,
        "f8_e4m3": torch.float8_e4m3fn,
        "f8_e5m2": torch.float8_e5m2,
        "i64": torch.int64,
        "i32": torch.int32,
        "i16": torch.int16,
        "i8": torch.int8,
        "u64": torch.uint64,
        "u32": torch.uint32,
        "u16": torch.uint16,
        "u8": torch.uint8,
        "bool": torch.bool,
    }
)
"""By `TensorInfo.encoding`; an encoding that is not here is packed."""


def as_stored(raw: torch.Tensor, encoding: str, shape: Sequence[int]) -> torch.Tensor:
    """Return a stored tensor's bytes as what they mean: dense in dtype and shape, packed as they are.

    The result shares memory with `raw`, unless that lies where values of the dtype cannot.

    Args:
        raw: uint8 [nbytes], contiguous.
    """
    if encoding not in DENSE_DTYPES:
        return raw
    dtype = DENSE_DTYPES[encoding]
    if raw.data_ptr() % dtype.itemsize or raw.storage_offset() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).reshape(tuple(shape))
