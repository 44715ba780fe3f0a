"""Matrices as a GPU's kernels read them: the planes of kernels/device_layout.py, made from the file's rows.

Legend: O rows (output features), I columns (input features), W bytes of a stored row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from graphcore.kernels.device_layout import DEVICE_LAYOUTS, GROUP_ROWS, TAIL_NBYTES, DeviceForm
from graphcore.kernels.device_packed import device_linear, device_matrix, device_rows
from graphcore.quant.device_planes import plane_parts
from graphcore.quant.packing import Packing
from graphcore.quant.registry import FORMATS


@dataclass(frozen=True)
class DevicePacking(Packing):
    """Sixteen rows together, taken apart into planes."""

    @property
    def form(self) -> DeviceForm:
        """What the kernels need to know."""
        return DeviceForm(self.format, self.rows, self.columns)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.form.nbytes

    def pack(self, raw_rows: Tensor, scale: float) -> Tensor:
        """Return the matrix in planes, on the device of the rows."""
        packed = torch.empty(self.nbytes, dtype=torch.uint8, device=raw_rows.device)
        self.pack_rows(raw_rows, 0, packed)
        self.write_scale(packed, scale)
        return packed

    def pack_rows(self, raw_rows: Tensor, begin: int, out: Tensor, *, threads: int | None = None) -> None:
        """Write some rows to their planes, and zeros to the rows that the matrix's last group lacks.

        torch's operations do it, with the threads that they have: `threads` has no effect. Rows may be on another
        device than the matrix; then they are copied there first, and taken apart there.
        """
        count, form = len(raw_rows), self.form
        assert begin % GROUP_ROWS == 0, f"rows lie in groups of {GROUP_ROWS}, asked to begin at {begin}"
        is_last = begin + count == self.rows
        assert is_last or (begin + count < self.rows and count % GROUP_ROWS == 0), (
            f"rows {begin} .. {begin + count} of {self.rows}"
        )
        assert out.numel() == self.nbytes, f"{out.shape} is no {self}"
        one = FORMATS[self.format]
        blocks = raw_rows.to(out.device).unflatten(1, (-1, one.block_nbytes))  # [R, K, W]
        whole = count // GROUP_ROWS * GROUP_ROWS
        for first, last in ((0, whole), (whole, count)):
            if first < last:
                start = form.offset(begin + first)
                stop = start + form.offset(-(-(last - first) // GROUP_ROWS) * GROUP_ROWS)
                self._write_groups(blocks[first:last], out[start:stop])

    def _write_groups(self, blocks: Tensor, out: Tensor) -> None:
        """Write whole groups of rows, or fewer rows than one group has: [R, K, W] uint8, to the groups' own bytes."""
        rows = min(GROUP_ROWS, len(blocks))
        if rows < GROUP_ROWS:
            out.zero_()
        groups = out.view(-1, GROUP_ROWS * sum(self.form.planes))
        start = 0
        for part, row_nbytes in zip(plane_parts(self.format, blocks), self.form.planes, strict=True):
            if part is not None:
                plane = groups[:, start : start + GROUP_ROWS * row_nbytes].unflatten(1, (GROUP_ROWS, row_nbytes))
                place = plane[:, :rows].unflatten(2, part.shape[1:])
                place.copy_(part.unflatten(0, (-1, rows)))  # [groups, rows, K, bytes]
            start += GROUP_ROWS * row_nbytes

    def write_scale(self, out: Tensor, scale: float) -> None:
        """Write the tensor's scale behind the rows."""
        if not self.can_split:
            out[-TAIL_NBYTES:] = 0
            out[-TAIL_NBYTES : -TAIL_NBYTES + 4] = torch.tensor([scale]).view(torch.uint8).to(out.device)

    def offset(self, row: int) -> int:
        """Return where the bytes of a row's group begin."""
        return self.form.offset(row)

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the dense matrix."""
        return device_matrix(packed, self.form, dtype)

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None, rounding: str) -> Tensor:
        """Multiply; only "token" rounds x, and every product of codes is then exact."""
        return device_linear(x, packed, bias, self.form, rounding == "token")

    def gather(self, ids: Tensor, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Unpack some rows."""
        return device_rows(ids, packed, self.form, dtype)


def has_device_form(name: str, columns: int) -> bool:
    """Return whether GPU kernels read matrices of a format and a width."""
    return name in DEVICE_LAYOUTS and columns % 32 == 0
