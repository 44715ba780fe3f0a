"""How one weight matrix lies in memory and is multiplied with, without ever being dense as a whole.

Legend: O rows (output features), I columns (input features), W bytes of a stored row.

    KernelPacking   the kernels' own order of the same codes; products read it at memory speed   (CPU, with a compiler)
    DevicePacking   the same codes in planes, for Triton's kernels (device_packing.py)           (GPU)
    StoredPacking   the file's bytes; each product unpacks the matrix before it                  (anywhere, slower)
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from graphcore.encodings import has_tensor_scale
from graphcore.kernels.packed import (
    GROUP_ROWS,
    PackedForm,
    packed_linear,
    packed_matrix,
    packed_rows,
)
from graphcore.quant.registry import FORMATS


@dataclass(frozen=True)
class Packing(ABC):
    """One matrix of O rows and I columns in a stored format.

    Attributes:
        format: the stored format's name.
    """

    format: str
    rows: int
    columns: int

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Size in bytes."""

    @abstractmethod
    def pack(self, raw_rows: Tensor, scale: float) -> Tensor:
        """Return the matrix in this form.

        Args:
            raw_rows: [O, W] uint8, rows as the file has them, any strides.
            scale: of the whole tensor, for formats that have one (i2_s), else 1.

        Returns:
            [nbytes] uint8.
        """

    @abstractmethod
    def pack_rows(self, raw_rows: Tensor, begin: int, out: Tensor, *, threads: int | None = None) -> None:
        """Write rows begin .. begin + R - 1 to their place in the packed matrix; no other byte of it changes.

        Args:
            raw_rows: [R, W] uint8 at any address, rows as the file has them; they may lie apart, but not their bytes.
            begin: a multiple of GROUP_ROWS; so is the end, if it is not the matrix's.
            out: [nbytes] uint8, the whole matrix's buffer.
            threads: that the kernels' packing may take; None is as many as torch has.
        """

    @abstractmethod
    def write_scale(self, out: Tensor, scale: float) -> None:
        """Write the scale of the whole tensor to its place, where the format has one (i2_s): `pack_rows` does not."""

    @abstractmethod
    def offset(self, row: int) -> int:
        """Return where a row's bytes begin in the whole; `row` is a multiple of GROUP_ROWS."""

    @property
    def can_split(self) -> bool:
        """Whether some of the rows are a matrix of their own: not where a scale of all of them lies behind the last."""
        return not has_tensor_scale(self.format)

    def part(self, begin: int, end: int) -> tuple[Self, int]:
        """Return rows begin .. end - 1 as a matrix of their own, and where its bytes begin in the whole.

        Args:
            begin: a multiple of GROUP_ROWS.
            end: any row; where it is within a group of the kernels' form, the part's bytes end with that group.
        """
        assert self.can_split, f"{self.format} has its scale behind the last row"
        assert begin < end <= self.rows, f"rows {begin} .. {end} of {self.rows}"
        assert begin % GROUP_ROWS == 0, f"rows lie in groups of {GROUP_ROWS}, asked to begin at {begin}"
        return replace(self, rows=end - begin), self.offset(begin)

    @abstractmethod
    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the dense matrix: [nbytes] uint8 -> [O, I] dtype."""

    @abstractmethod
    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None, rounding: str) -> Tensor:
        """Return x @ W.T (+ bias): [..., I] -> [..., O]; `rounding` of x as in kernels/packed.py."""

    @abstractmethod
    def gather(self, ids: Tensor, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rows `ids` [...] int64, dense: [..., I] dtype."""


@dataclass(frozen=True)
class KernelPacking(Packing):
    """Sixteen rows together, for the C++ kernels.

    Attributes:
        library: file of the kernels.
    """

    library: str

    @property
    def form(self) -> PackedForm:
        """What the kernels need to know."""
        return PackedForm(self.library, self.format, self.rows, self.columns)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.form.nbytes

    def pack(self, raw_rows: Tensor, scale: float) -> Tensor:
        """Return the matrix in the kernels' form."""
        return self.form.pack(raw_rows.contiguous(), scale)

    def pack_rows(self, raw_rows: Tensor, begin: int, out: Tensor, *, threads: int | None = None) -> None:
        """Write some rows in the kernels' form."""
        self.form.pack_rows(raw_rows, out, begin, threads=threads)

    def write_scale(self, out: Tensor, scale: float) -> None:
        """Write the tensor's scale behind the rows."""
        self.form.write_scale(out, scale)

    def offset(self, row: int) -> int:
        """Return where the bytes of a row's group begin."""
        return self.form.offset(row)

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the dense matrix."""
        return packed_matrix(packed, self.form, dtype)

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None, rounding: str) -> Tensor:
        """Multiply without unpacking."""
        return packed_linear(x, packed, bias, self.library, self.format, self.rows, rounding)

    def gather(self, ids: Tensor, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Unpack some rows."""
        return packed_rows(ids, packed, self.form, dtype)


@dataclass(frozen=True)
class StoredPacking(Packing):
    """The file's bytes, unpacked for each use."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return FORMATS[self.format].nbytes((self.rows, self.columns))

    def pack(self, raw_rows: Tensor, scale: float) -> Tensor:
        """Return the rows one after another, as a file would have them."""
        return FORMATS[self.format].join_rows(raw_rows, scale)

    def pack_rows(self, raw_rows: Tensor, begin: int, out: Tensor, *, threads: int | None = None) -> None:
        """Copy some rows."""
        out[self.offset(begin) : self.offset(begin + len(raw_rows))].view(raw_rows.shape).copy_(raw_rows)

    def write_scale(self, out: Tensor, scale: float) -> None:
        """Write the tensor's scale behind the rows."""
        if not self.can_split:
            out[self.offset(self.rows) :] = FORMATS[self.format].join_rows(out[:0], scale).to(out.device)

    def offset(self, row: int) -> int:
        """Return where a row's bytes begin."""
        one = FORMATS[self.format]
        return row * (self.columns // one.block_elements * one.block_nbytes)

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the dense matrix."""
        return dequantize_packed(packed, self.format, (self.rows, self.columns), dtype)

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None, rounding: str) -> Tensor:
        """Unpack the matrix, then multiply; x is never rounded here."""
        return torch.nn.functional.linear(x, self.unpack(packed, x.dtype), bias)

    def gather(self, ids: Tensor, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Unpack the bytes of some rows."""
        one = FORMATS[self.format]
        rows, scale = one.split_rows(packed, (self.rows, self.columns))
        chosen = one.join_rows(rows[ids.flatten()], scale)
        return dequantize_packed(chosen, self.format, (*ids.shape, self.columns), dtype)


torch.library.define(
    "graphcore::dequantize_packed", "(Tensor raw, str name, SymInt[] shape, ScalarType dtype) -> Tensor"
)


def dequantize_packed(raw: Tensor, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return `FORMATS[name].dequantize(raw, shape, dtype)`, as one operation of a compiled graph."""
    op = torch.ops.graphcore.dequantize_packed.default
    return op(raw, name, shape, dtype)  # type: ignore[no-any-return]


@torch.library.register_fake("graphcore::dequantize_packed")  # type: ignore[untyped-decorator]  # torch's is untyped
def _dequantize_fake(raw: Tensor, _name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return raw.new_empty(shape, dtype=dtype)


def _dequantize(raw: Tensor, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return FORMATS[name].dequantize(raw, shape, dtype)


torch.library.impl("graphcore::dequantize_packed", "CompositeExplicitAutograd", _dequantize)
