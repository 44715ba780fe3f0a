"""Packed matrices and rows of them made dense, bit by bit the format's weights.

Legend: O rows, I columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphcore.kernels.device_layout import TAIL_NBYTES, DeviceForm
from graphcore.kernels.gpu.unpacking import tensor_scale, weights_at

BLOCK = 1024  # weights of a program
WARPS = 4


@triton.jit
def _unpack(packed, ids, out, begin, rows, columns, L: tl.constexpr, IS_SCALED: tl.constexpr, BLOCK: tl.constexpr):
    """Program (r, c): weights c BLOCK .. of row begin + r, or of the row that `ids` names."""
    place = tl.program_id(0)
    row = begin + place if ids is None else tl.load(ids + place)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_row = (row >= 0) & (row < rows)
    values = weights_at(packed, tl.where(is_row, row, 0), tl.minimum(at, columns - 1), columns, L)
    if IS_SCALED and L.scale == "whole":
        values *= tensor_scale(packed, rows, columns, L)
    values = tl.where(is_row, values, 0.0)
    tl.store(out + place.to(tl.int64) * columns + at, values.to(out.dtype.element_ty), mask=at < columns)


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
    grid = (out.numel() // form.columns, triton.cdiv(form.columns, BLOCK))
    _unpack[grid](
        packed,
        ids,
        out,
        begin,
        form.rows,
        form.columns,
        L=form.layout,
        IS_SCALED=is_scaled,
        BLOCK=BLOCK,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
