"""The interface of packed (quantised) matrices: a weight's layout in memory, and operations on it.

Legend: O rows (output features), I columns (input features), W bytes of a stored row.

    KernelPacking   codes repacked for the C++ kernels, which read them at memory speed      (CPU)
    DevicePacking   codes repacked in planes for Triton's kernels (device_packing.py)        (GPU)
    StoredPacking   the file's bytes; each product first dequantises the whole matrix        (any device, slower)

A backend chooses among them (backend.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from graphcore.kernels.cpu.quantize import quantize_weights
from graphcore.quant.packing_error import SquaredError
from graphcore.quant.registry import FORMATS, has_tensor_scale

GROUP_ROWS = 16  # rows that are interleaved in packed matrices


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

    def pack(self, raw_rows: Tensor, scale: float = 1.0, *, threads: int | None = None) -> Tensor:
        """Return the matrix packed, on the device of the rows.

        Args:
            raw_rows: [O, W] uint8, rows as the file has them, any strides.
            scale: scale of the whole tensor, for formats that have one (i2_s), else 1.
            threads: the same as in `pack_rows`.

        Returns:
            [nbytes] uint8.
        """
        packed = torch.empty(self.nbytes, dtype=torch.uint8, device=raw_rows.device)
        rows = raw_rows if raw_rows.stride(1) == 1 else raw_rows.contiguous()
        self.pack_rows(rows, 0, packed, threads=threads)
        self.write_scale(packed, scale)
        return packed

    def quantize(self, dense: Tensor, *, threads: int | None = None) -> tuple[Tensor, SquaredError]:
        """Return dense rows quantised to the format's blocks, and their squared error.

        Args:
            dense: [R, I] any float dtype, on the CPU.
            threads: number of threads that C++ kernels may use; None for torch's number.

        Returns:
            [nbytes] uint8, the same bytes whether torch or C++ makes them.

        Raises:
            CheckpointError: a weight is infinite, NaN or too large for the format.
        """
        return quantize_weights(FORMATS[self.format], dense)

    @abstractmethod
    def pack_rows(self, raw_rows: Tensor, begin: int, out: Tensor, *, threads: int | None = None) -> None:
        """Write rows begin .. begin + R - 1 to their place in the packed matrix, and no other byte.

        Args:
            raw_rows: [R, W] uint8 at any address, rows as the file has them; each row is contiguous.
            begin: first row, a multiple of GROUP_ROWS; begin + R is one, too, or the number of rows.
            out: [nbytes] uint8, the whole matrix's buffer.
            threads: number of threads that the C++ packing may use; None for torch's number.
        """

    @abstractmethod
    def write_scale(self, out: Tensor, scale: float) -> None:
        """Write the tensor-wide scale, which `pack_rows` does not write, if the format has one (i2_s)."""

    @property
    def on_link(self) -> "Packing":
        """Packing in which a matrix that streams to a device waits in RAM and crosses the link; usually this one."""
        return self

    def expansion(self, arrived: Tensor, out: Tensor) -> Callable[[], None]:
        """Return the work that a device does when the matrix has arrived in the packing `on_link`, if that is another.

        All that the work needs is allocated now. It runs in the device's current queue.

        Args:
            arrived: [on_link.nbytes] uint8, bytes that have crossed the link, on the device.
            out: [nbytes] uint8, memory on the device that the work writes the matrix into.
        """
        raise NotImplementedError(f"{self} crosses the link as it is")

    @abstractmethod
    def offset(self, row: int) -> int:
        """Return the byte offset of a row in the packed matrix; `row` is a multiple of GROUP_ROWS."""

    @property
    def can_split(self) -> bool:
        """Whether a range of rows can be used as a separate matrix: not if a tensor-wide scale follows the last row."""
        return not has_tensor_scale(self.format)

    def part(self, begin: int, end: int) -> tuple[Self, int]:
        """Return the packing of rows begin .. end - 1 as a separate matrix, and its byte offset in the whole matrix.

        Args:
            begin: first row, a multiple of GROUP_ROWS.
            end: end of the rows; if it is within a group of packed rows, the part's bytes include that whole group.
        """
        assert self.can_split, f"{self.format} has its scale behind the last row"
        assert begin < end <= self.rows, f"rows {begin} .. {end} of {self.rows}"
        assert begin % GROUP_ROWS == 0, f"rows lie in groups of {GROUP_ROWS}, asked to begin at {begin}"
        return replace(self, rows=end - begin), self.offset(begin)

    def is_batch_invariant(self, dtype: torch.dtype, rounding: str) -> bool:
        """Return whether a token's product has the same bits in every batch of at least `DENSE_TOKENS` tokens.

        False where a library of torch multiplies the unpacked matrix: its order of sums depends on the batch, and on
        the number of threads.

        Args:
            dtype: dtype of x.
            rounding: rounding of x, as in `linear`.
        """
        return False

    def check_place(self, raw_rows: Tensor, begin: int, out: Tensor) -> None:
        """Assert that `pack_rows` may write these rows there."""
        end = begin + len(raw_rows)
        assert begin % GROUP_ROWS == 0, f"rows lie in groups of {GROUP_ROWS}, asked to begin at {begin}"
        assert end == self.rows or (end < self.rows and end % GROUP_ROWS == 0), f"rows {begin} .. {end} of {self.rows}"
        assert out.is_contiguous(), f"strides {out.stride()}, the matrix is one run"
        assert out.numel() == self.nbytes, f"{out.shape} is no {self}"

    def check_rows(self, ids: Tensor) -> None:
        """Raise IndexError if one of the row numbers is outside the matrix."""
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.rows:
            raise IndexError(f"row {int(ids.max())} of a table of {self.rows} rows")

    @abstractmethod
    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the dense matrix: [nbytes] uint8 -> [O, I] dtype."""

    @abstractmethod
    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None, rounding: str) -> Tensor:
        """Return x @ W.T (+ bias): [..., I] -> [..., O]; `rounding` is that of x (kernels/cpu/kernel_packing.py)."""

    @abstractmethod
    def gather(self, ids: Tensor, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rows `ids` [...] int64, dense: [..., I] dtype."""


def write_tail(out: Tensor, nbytes: int, scale: float) -> None:
    """Write the float32 scale of a whole tensor, and zeros after it, into the last bytes of a packed matrix."""
    out[-nbytes:] = 0
    out[-nbytes : 4 - nbytes] = (
        torch.tensor([scale], dtype=torch.float32, device="cpu").view(torch.uint8).to(out.device)
    )


def empty_product(x: Tensor, packing: Packing) -> Tensor:
    """Return an empty tensor like the result of `linear`, for tracing."""
    return x.new_empty((*x.shape[:-1], packing.rows))


def empty_rows(ids: Tensor, packed: Tensor, packing: Packing, dtype: torch.dtype) -> Tensor:
    """Return an empty tensor like the result of `gather`, for tracing."""
    return packed.new_empty((*ids.shape, packing.columns), dtype=dtype)


def empty_matrix(packed: Tensor, packing: Packing, dtype: torch.dtype) -> Tensor:
    """Return an empty tensor like the result of `unpack`, for tracing."""
    return packed.new_empty((packing.rows, packing.columns), dtype=dtype)
