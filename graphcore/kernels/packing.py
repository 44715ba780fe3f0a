"""The interface of packed matrices: a weight's layout in memory, and products that never make it dense as a whole.

Legend: O rows (output features), I columns (input features), W bytes of a stored row.

    KernelPacking   the same codes in the kernels' order; products read them at memory speed     (CPU, C++ kernels)
    DevicePacking   the same codes in planes, for Triton's kernels (device_packing.py)           (GPU)
    StoredPacking   the file's bytes; each product first unpacks the matrix                      (anywhere, slower)

A backend chooses among them (backend.py).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from graphcore.quant.registry import has_tensor_scale

GROUP_ROWS = 16  # rows that lie together in packed matrices


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
        """The size in bytes."""

    @abstractmethod
    def pack(self, raw_rows: Tensor, scale: float) -> Tensor:
        """Return the matrix in this form.

        Args:
            raw_rows: [O, W] uint8, rows as the file has them, any strides.
            scale: scale of the whole tensor, for formats that have one (i2_s), else 1.

        Returns:
            [nbytes] uint8.
        """

    @abstractmethod
    def pack_rows(self, raw_rows: Tensor, begin: int, out: Tensor, *, threads: int | None = None) -> None:
        """Write rows begin .. begin + R - 1 to their place in the packed matrix; no other byte of it changes.

        Args:
            raw_rows: [R, W] uint8 at any address, rows as the file has them; each row is contiguous.
            begin: first row, a multiple of GROUP_ROWS; the end is one, too, or the matrix's last row.
            out: [nbytes] uint8, the whole matrix's buffer.
            threads: number of threads that the kernels' packing may use; None for torch's number.
        """

    @abstractmethod
    def write_scale(self, out: Tensor, scale: float) -> None:
        """Write the whole tensor's scale to its place, if the format has one (i2_s); `pack_rows` does not write it."""

    @abstractmethod
    def offset(self, row: int) -> int:
        """Return the offset of a row's bytes in the whole; `row` is a multiple of GROUP_ROWS."""

    @property
    def can_split(self) -> bool:
        """Whether some of the rows can be a matrix of their own: not if a scale of all rows follows the last one."""
        return not has_tensor_scale(self.format)

    def part(self, begin: int, end: int) -> tuple[Self, int]:
        """Return rows begin .. end - 1 as a matrix of their own, and the offset of its bytes in the whole.

        Args:
            begin: first row, a multiple of GROUP_ROWS.
            end: any row; if it is within a group of the kernels' form, the part's bytes end with that group.
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
        """Return x @ W.T (+ bias): [..., I] -> [..., O]; `rounding` is that of x (kernels/cpu/kernel_packing.py)."""

    @abstractmethod
    def gather(self, ids: Tensor, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rows `ids` [...] int64, dense: [..., I] dtype."""
