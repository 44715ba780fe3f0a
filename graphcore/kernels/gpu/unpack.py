"""Packed matrices and rows of them made dense, bit by bit the format's weights.

Legend: O rows, I columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphcore.kernels.device_layout import DeviceForm, DeviceLayout
from graphcore.kernels.gpu.unpacking import tensor_scale, weights_at

BLOCK = 1024  # weights of a program
WARPS = 4


@triton.jit
def _unpack(packed, ids, out, rows, columns, L: tl.constexpr, BLOCK: tl.constexpr):
    """Program (r, c): weights c BLOCK .. of row r, or of the row that `ids` names."""
    place = tl.program_id(0)
    row = place if ids is None else tl.load(ids + place)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_row = (row >= 0) & (row < rows)
    values = weights_at(packed, tl.where(is_row, row, 0), tl.minimum(at, columns - 1), columns, L)
    if L.scale == "whole":
        values *= tensor_scale(packed, rows, columns, L)
    values = tl.where(is_row, values, 0.0)
    tl.store(out + place.to(tl.int64) * columns + at, values.to(out.dtype.element_ty), mask=at < columns)


def launch_rows(ids: Tensor, packed: Tensor, form: DeviceForm, dtype: torch.dtype) -> Tensor:
    """Return rows of the matrix: [...] int64 -> [..., I] dtype; zeros for ids that are none."""
    out = torch.empty((*ids.shape, form.columns), dtype=dtype, device=packed.device)
    if ids.numel():
        _launch(packed, ids.contiguous(), out, ids.numel(), form)
    return out


def launch_unpack(packed: Tensor, form: DeviceForm, dtype: torch.dtype) -> Tensor:
    """Return the whole matrix: [O, I] dtype."""
    out = torch.empty((form.rows, form.columns), dtype=dtype, device=packed.device)
    _launch(packed, None, out, form.rows, form)
    return out


def _launch(packed: Tensor, ids: Tensor | None, out: Tensor, count: int, form: DeviceForm) -> None:
    layout: DeviceLayout = form.layout
    grid = (count, triton.cdiv(form.columns, BLOCK))
    _unpack[grid](
        packed, ids, out, form.rows, form.columns, L=layout, BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False
    )
