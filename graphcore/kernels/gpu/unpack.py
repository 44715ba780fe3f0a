"""Packed matrices and rows of them made dense, bit by bit the format's weights.

Legend: O rows, I columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphcore.kernels.device_layout import TAIL_NBYTES, DeviceForm
from graphcore.kernels.gpu.unpacking import tensor_scale, weights_at

WEIGHTS = 1024  # of a program
INTERPRETED_WEIGHTS = 1 << 16  # Triton's interpreter runs one program after another: few and large ones
WARPS = 4


@triton.jit
def _unpack(
    packed, ids, out, begin, count, rows, columns,
    L: tl.constexpr, IS_SCALED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (r, c): weights c BLOCK .. of rows begin + r ROWS .., or of the rows that `ids` names there."""
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    is_place = place < count
    row = begin + place if ids is None else tl.load(ids + place, mask=is_place, other=0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_row = (row >= 0) & (row < rows)
    values = weights_at(packed, tl.where(is_row, row, 0), tl.minimum(at, columns - 1), columns, L)
    if IS_SCALED and L.scale == "whole":
        values *= tensor_scale(packed, rows, columns, L)
    values = tl.where(is_row, values, 0.0)
    to = out + place.to(tl.int64) * columns + at
    tl.store(to, values.to(out.dtype.element_ty), mask=is_place & (at < columns))


def launch_rows(ids: Tensor, packed: Tensor, form: DeviceForm, dtype: torch.dtype) -> Tensor:
    """Return rows of the matrix: [...] int64 -> [..., I] dtype; zeros for ids that are none."""
    out = torch.empty((*ids.shape, form.columns), dtype=dtype, device=packed.device)
    if ids.numel():
        _launch(packed, ids.contiguous(), out, 0, form, is_scaled=True)
    return out


def launch_unpack(
    packed: Tensor,
    form: DeviceForm,
    dtype: torch.dtype,
    begin: int = 0,
    end: int | None = None,
    *,
    is_scaled: bool = True,
) -> Tensor:
    """Return rows begin .. end - 1 of the matrix: [rows, I] dtype.

    Args:
        end: None is all rows.
        is_scaled: with the scale of an i2_s tensor.
    """
    count = (form.rows if end is None else end) - begin
    out = torch.empty((count, form.columns), dtype=dtype, device=packed.device)
    _launch(packed, None, out, begin, form, is_scaled=is_scaled)
    return out


def tensor_scale_of(packed: Tensor, form: DeviceForm) -> Tensor | float:
    """Return the scale of an i2_s tensor, [1] float32 where the matrix lies, unread; 1 for other formats."""
    if form.layout.scale != "whole":
        return 1.0
    end = form.nbytes - TAIL_NBYTES
    return packed[end : end + 4].view(torch.float32)


def _launch(packed: Tensor, ids: Tensor | None, out: Tensor, begin: int, form: DeviceForm, *, is_scaled: bool) -> None:
    count = out.numel() // form.columns
    most = INTERPRETED_WEIGHTS if out.device.type == "cpu" else WEIGHTS
    block = min(most, triton.next_power_of_2(form.columns))
    rows = min(most // block, triton.next_power_of_2(count))
    _unpack[(triton.cdiv(count, rows), triton.cdiv(form.columns, block))](
        packed,
        ids,
        out,
        begin,
        count,
        form.rows,
        form.columns,
        L=form.layout,
        IS_SCALED=is_scaled,
        ROWS=rows,
        BLOCK=block,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
