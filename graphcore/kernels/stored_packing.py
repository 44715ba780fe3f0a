"""The packing that keeps a matrix as the file's bytes, for formats and devices without kernels: slow, but portable.

Legend: O rows (output features), I columns (input features), W bytes of a stored row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphcore.kernels.custom_ops import register_custom_op
from graphcore.kernels.packing import Packing
from graphcore.quant.registry import FORMATS


@dataclass(frozen=True)
class StoredPacking(Packing):
    """A matrix as the file's bytes, dequantised for each use."""

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return FORMATS[self.format].nbytes((self.rows, self.columns))

    def pack_rows(self, raw_rows: Tensor, begin: int, out: Tensor, *, threads: int | None = None) -> None:
        """Copy some rows."""
        out[self.offset(begin) : self.offset(begin + len(raw_rows))].view(raw_rows.shape).copy_(raw_rows)

    def write_scale(self, out: Tensor, scale: float) -> None:
        """Write the tensor's scale after the rows."""
        if not self.can_split:
            out[self.offset(self.rows) :] = FORMATS[self.format].join_rows(out[:0], scale).to(out.device)

    def offset(self, row: int) -> int:
        """Return the offset of a row's bytes."""
        one = FORMATS[self.format]
        return row * (self.columns // one.block_elements * one.block_nbytes)

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the dense matrix."""
        return dequantize_packed(packed, self.format, (self.rows, self.columns), dtype)

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None, rounding: str) -> Tensor:
        """Dequantise the matrix, then multiply; x is never rounded."""
        return torch.nn.functional.linear(x, self.unpack(packed, x.dtype), bias)

    def gather(self, ids: Tensor, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Return some rows, dense."""
        one = FORMATS[self.format]
        rows, scale = one.split_rows(packed, (self.rows, self.columns))
        chosen = one.join_rows(rows[ids.flatten()], scale)
        return dequantize_packed(chosen, self.format, (*ids.shape, self.columns), dtype)


def dequantize_packed(raw: Tensor, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return `FORMATS[name].dequantize(raw, shape, dtype)`, computed by a custom op."""
    op = torch.ops.graphcore.dequantize_packed.default
    return op(raw, name, shape, dtype)  # type: ignore[no-any-return]


def _dequantize(raw: Tensor, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return FORMATS[name].dequantize(raw, shape, dtype)


register_custom_op(
    "dequantize_packed",
    _dequantize,
    lambda raw, shape, dtype: raw.new_empty(shape, dtype=dtype),
    schema="(Tensor raw, str name, SymInt[] shape, ScalarType dtype) -> Tensor",
)
