"""Packing of matrices for GPU kernels: from the file's rows to the planes of kernels/gpu/layout.py.

Legend: O rows (output features), I columns (input features), W bytes of a stored row.

Products, unpacking and gathering are custom ops. This module implements them for the CPU with torch's operations, which
unpack what planes stand for (`Format.weights_of_planes`). This is slow, but lets a table that is packed for a GPU stay
in RAM. The GPU implementations are in kernels/gpu/packed/linear.py, to_dense.py and level_planes.py.

Planes of formats of levels are up to 2.3 times as large as the file's blocks. So blocks cross the link to a device, and
the device makes planes of them (the op `write_planes`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from graphcore.kernels.cpu.library import FORMAT_NUMBERS, open_library
from graphcore.kernels.cpu.quantize import quantize_weights
from graphcore.kernels.custom_ops import register_custom_op
from graphcore.kernels.gpu.layout import DEVICE_LAYOUTS, TAIL_NBYTES, DeviceLayout
from graphcore.kernels.ops.int8_rows import quantize_rows
from graphcore.kernels.packing import GROUP_ROWS, Packing, empty_matrix, empty_product, empty_rows, write_tail
from graphcore.kernels.stored_packing import StoredPacking
from graphcore.quant.level_formats import LevelFormat, grid_tensor
from graphcore.quant.packing_error import SquaredError
from graphcore.quant.registry import FORMATS


@dataclass(frozen=True)
class DevicePacking(Packing):
    """A matrix in groups of sixteen rows, split into planes (layout.py); `format` is one of DEVICE_LAYOUTS.

    Attributes:
        library: path of the C++ kernels' file, which quantise, and look the levels of rows in RAM up, 20 times as fast
            as torch; empty without kernels.
    """

    library: str = ""

    @property
    def layout(self) -> DeviceLayout:
        """The layout of the format."""
        return DEVICE_LAYOUTS[self.format]

    @property
    def planes(self) -> tuple[int, ...]:
        """The bytes of one row in each plane: low codes, high codes, scales, supers."""
        one = self.layout
        return (
            self.columns * one.low // 8,
            self.columns * one.high // 8,
            self.columns // one.group * one.scale_nbytes,
            self.columns // one.super_weights * one.super_nbytes,
        )

    @property
    def nbytes(self) -> int:
        """The size in bytes, with rows padded to a multiple of sixteen."""
        return self.offset(self.padded_rows) + (0 if self.can_split else TAIL_NBYTES)

    @property
    def padded_rows(self) -> int:
        """The number of rows, padded to whole groups."""
        return -(-self.rows // GROUP_ROWS) * GROUP_ROWS

    @property
    def on_link(self) -> Packing:
        """The file's bytes if the format has levels, whose planes are larger; else these planes."""
        is_smaller = isinstance(FORMATS[self.format], LevelFormat)
        return StoredPacking(self.format, self.rows, self.columns) if is_smaller else self

    def expansion(self, arrived: Tensor, out: Tensor) -> Callable[[], None]:
        """Return the work that writes the planes from the file's bytes."""
        one = FORMATS[self.format]
        assert isinstance(one, LevelFormat), f"planes of {self.format} cross the link as they are"
        grid = grid_tensor(one.grid, out.device)
        return lambda: write_planes(arrived, grid, out, self)

    def offset(self, row: int) -> int:
        """Return the offset in bytes of a row's group."""
        return row // GROUP_ROWS * GROUP_ROWS * sum(self.planes)

    def quantize(self, dense: Tensor, *, threads: int | None = None) -> tuple[Tensor, SquaredError]:
        """Return dense rows quantised to the format's blocks, and their squared error; in C++ if there are kernels."""
        return quantize_weights(FORMATS[self.format], dense, self.library, threads)

    def pack_rows(self, raw_rows: Tensor, begin: int, out: Tensor, *, threads: int | None = None) -> None:
        """Write some rows to their planes, and zeros to the padding rows of the matrix's last group.

        `threads` has no effect: torch's operations use torch's threads, and the C++ kernels the caller's. Rows on
        another device than the matrix are copied to its device first.
        """
        count = len(raw_rows)
        self.check_place(raw_rows, begin, out)
        one = FORMATS[self.format]
        if self.library and isinstance(one, LevelFormat) and out.device.type == "cpu" and raw_rows.device.type == "cpu":
            self._look_up(raw_rows, begin, out)
            return
        blocks = _unfold(raw_rows.to(out.device), 1, self.columns // one.block_elements)  # [R, K, W]
        whole = count // GROUP_ROWS * GROUP_ROWS
        for first, last in ((0, whole), (whole, count)):
            if first < last:
                start = self.offset(begin + first)
                stop = start + self.offset(-(-(last - first) // GROUP_ROWS) * GROUP_ROWS)
                self._write_groups(blocks[first:last], out[start:stop])

    def _look_up(self, raw_rows: Tensor, begin: int, out: Tensor) -> None:
        """Write rows of a format of levels to their planes, in C++."""
        assert raw_rows.stride(1) == 1, f"strides {raw_rows.stride()}, a row is one run"
        assert out.is_contiguous(), f"strides {out.stride()}, planes are one run"
        if len(raw_rows) % GROUP_ROWS:
            out[self.offset(begin + len(raw_rows)) : self.offset(self.padded_rows)].zero_()
        number, address = FORMAT_NUMBERS[self.format], out.data_ptr() + self.offset(begin)
        open_library(self.library).graphcore_pack_level_planes(
            number, len(raw_rows), self.columns, raw_rows.data_ptr(), raw_rows.stride(0), address
        )

    def _write_groups(self, blocks: Tensor, out: Tensor) -> None:
        """Write whole groups of rows, or fewer rows than one group has: [R, K, W] uint8, to the groups' own bytes."""
        rows = min(GROUP_ROWS, len(blocks))
        if rows < GROUP_ROWS:
            out.zero_()
        groups = out.view(-1, GROUP_ROWS * sum(self.planes))
        start = 0
        for part, row_nbytes in zip(FORMATS[self.format].planes_of(blocks), self.planes, strict=True):
            if part is not None:
                plane = _unfold(groups[:, start : start + GROUP_ROWS * row_nbytes], 1, GROUP_ROWS)
                place = _unfold(plane[:, :rows], 2, part.shape[1])
                place.copy_(_unfold(part, 0, len(groups)))  # [groups, rows, K, bytes]
            start += GROUP_ROWS * row_nbytes

    def write_scale(self, out: Tensor, scale: float) -> None:
        """Write the tensor's scale after the rows."""
        if not self.can_split:
            write_tail(out, TAIL_NBYTES, scale)

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the dense matrix, bit-exact with the format."""
        return device_matrix(packed, self, dtype)

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None, rounding: str) -> Tensor:
        """Multiply, with sums in float32; only "token" rounds x, and every product of codes is then exact."""
        return device_linear(x, packed, bias, self, rounding == "token")

    def gather(self, ids: Tensor, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Return some rows, dense and bit-exact with the format."""
        return device_rows(ids, packed, self, dtype)


def _unfold(x: Tensor, axis: int, count: int) -> Tensor:
    """Return a view of `x` whose `axis` is cut into `count` pieces: [.., count n, ..] -> [.., count, n, ..]."""
    return x.unflatten(axis, (count, x.shape[axis] // count))  # type: ignore[no-any-return]


def _rows_cpu(ids: Tensor, packed: Tensor, packing: DevicePacking, dtype: torch.dtype) -> Tensor:
    """Restore the file's blocks of some rows and unpack them on the CPU, for tables in RAM."""
    packing.check_rows(ids)
    one, columns = FORMATS[packing.format], packing.columns
    blocks = columns // one.block_elements
    flat = ids.flatten()
    groups = packed[: packing.offset(packing.padded_rows)].view(-1, GROUP_ROWS * sum(packing.planes))
    parts, start = [], 0
    for nbytes in packing.planes:
        plane = _unfold(groups[:, start : start + GROUP_ROWS * nbytes], 1, GROUP_ROWS)
        chosen = plane[flat // GROUP_ROWS, flat % GROUP_ROWS]
        parts.append(chosen.view(len(flat), blocks, nbytes // blocks))
        start += GROUP_ROWS * nbytes
    scale = 1.0 if packing.can_split else packed[-TAIL_NBYTES : 4 - TAIL_NBYTES].clone().view(torch.float32).item()
    return one.weights_of_planes(parts, scale, (*ids.shape, columns), dtype)


def _matrix_cpu(packed: Tensor, packing: DevicePacking, dtype: torch.dtype) -> Tensor:
    return _rows_cpu(torch.arange(packing.rows, dtype=torch.int64, device="cpu"), packed, packing, dtype)


def _linear_cpu(x: Tensor, packed: Tensor, bias: Tensor | None, packing: DevicePacking, rounds: bool) -> Tensor:
    """Unpack the matrix, then multiply."""
    weight = _matrix_cpu(packed, packing, torch.float32)
    wide = x.float()
    if rounds:
        codes, scale = quantize_rows(x)
        wide = codes / scale
    return torch.nn.functional.linear(wide, weight, None if bias is None else bias.float()).to(x.dtype)


def _write_planes_cpu(
    arrived: Tensor,
    grid: Tensor,  # noqa: ARG001, an argument of the op
    out: Tensor,
    packing: DevicePacking,
) -> None:
    """Write a matrix's planes from the file's bytes.

    Args:
        arrived: [on_link.nbytes] uint8, the file's rows.
        grid: [entries] int32, entries of the format's grid (`grid_tensor`), which only a GPU's kernel takes.
        out: [nbytes] uint8, the planes.
    """
    packing.pack_rows(arrived.view(packing.rows, -1), 0, out)


device_linear = register_custom_op("device_linear", _linear_cpu, empty_product, dispatch_key="CPU")
device_rows = register_custom_op("device_rows", _rows_cpu, empty_rows, dispatch_key="CPU")
device_matrix = register_custom_op("device_matrix", _matrix_cpu, empty_matrix, dispatch_key="CPU")
write_planes = register_custom_op("write_planes", _write_planes_cpu, mutates_args=("out",), dispatch_key="CPU")
