"""The dense encodings: element types that are stored one value after the other, little-endian."""

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
        "f8_e8m0": torch.float8_e8m0fnu,
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
"""Dtype of each dense encoding, by `TensorInfo.encoding`; all other encodings are packed."""


def as_stored(raw: torch.Tensor, encoding: str, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor from its stored bytes: dense ones in their dtype and shape, packed ones unchanged.

    The result shares memory with `raw`, unless `raw` is misaligned for the dtype.

    Args:
        raw: stored bytes, uint8 [nbytes], contiguous.
    """
    if encoding not in DENSE_DTYPES:
        return raw
    dtype = DENSE_DTYPES[encoding]
    if raw.data_ptr() % dtype.itemsize or raw.storage_offset() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).reshape(tuple(shape))
