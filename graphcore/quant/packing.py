"""How one weight matrix lies in memory and is multiplied with, without ever being dense as a whole.

Legend: O rows (output features), I columns (input features), W bytes of a stored row.

    KernelPacking   the kernels' own order of the same codes; products read it at memory speed   (CPU, with a compiler)
    StoredPacking   the file's bytes; each product unpacks the matrix before it                  (anywhere, slower)
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from graphcore.kernels.packed import FORMAT_NUMBERS, PackedForm, packed_linear, packed_matrix, packed_rows
from graphcore.quant.format import Format
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


def choose_packing(name: str, rows: int, columns: int, library: Path | None) -> Packing | None:
    """Return how a matrix of a stored format is held; None is dense: a row is no whole number of blocks.

    Args:
        name: the format's.
        rows, columns: O and I.
        library: of the kernels, or None where they cannot be built or do not run.
    """
    one: Format = FORMATS[name]
    if columns % one.block_elements:
        return None
    if library is not None and name in FORMAT_NUMBERS:
        return KernelPacking(name, rows, columns, str(library))
    return StoredPacking(name, rows, columns)


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
