"""Unpacking of packed matrices, or some of their rows, to dense ones that are bit-exact with the format.

Legend: O rows, I columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphcore.kernels.custom_ops import register_implementation
from graphcore.kernels.gpu.device_packing import DevicePacking
from graphcore.kernels.gpu.layout import TAIL_NBYTES
from graphcore.kernels.gpu.packed.planes import level_of, plane_rows, scale_and_term, scaled_weights, tensor_scale
from graphcore.kernels.gpu.packed.vectors import (
    eight_codes,
    first_weight,
    fragment_bits,
    offset_of,
    scales_of_vector,
    vector_words,
    vectors_from,
    weights_of_vector,
)

VECTORS = 32  # vectors of a row that a program unpacks: one for each thread of its warp
ROWS = 4  # rows of a program
INTERPRETED_ROWS = 128  # Triton's interpreter runs one program after another, so a few large ones are best


@triton.jit
def _unpack(
    packed, ids, out, begin, count, rows, columns,
    L: tl.constexpr, IS_SCALED: tl.constexpr, R: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Unpack, as program (r, v), vectors from v G on, of rows from begin + r R on or of those that `ids` has there."""
    weights: tl.constexpr = weights_of_vector(L)
    num_scales: tl.constexpr = scales_of_vector(L)
    fragments: tl.constexpr = weights // 8 // num_scales  # fragments that share a scale
    place = tl.program_id(0) * R + tl.arange(0, R)
    is_place = place < count
    row = begin + place if ids is None else tl.load(ids + place, mask=is_place, other=0)
    is_row = (row >= 0) & (row < rows)
    row = tl.where(is_row, row, 0)
    begin, last = tl.program_id(1) * G, columns // weights - 1
    is_there = begin + tl.arange(0, G) <= last
    start = first_weight(vectors_from(begin, last, 1, G, False), L)
    high = plane_rows(packed, row, columns, 1, L)
    words, bits = vector_words(plane_rows(packed, row, columns, 0, L), high, begin, last, G, False, L)
    scales = plane_rows(packed, row, columns, 2, L)[:, None]
    supers = plane_rows(packed, row, columns, 3, L)[:, None]
    to = out + (place.to(tl.int64) * columns)[:, None, None] + start[None, :, None] + tl.arange(0, 8)[None, None, :]
    is_stored = is_place[:, None, None] & is_there[None, :, None]
    for index in tl.static_range(num_scales):
        known = start + offset_of(index * fragments, L)
        scale, term = scale_of(packed, scales, supers, known, rows, columns, IS_SCALED, L)
        for fragment in tl.static_range(index * fragments, (index + 1) * fragments):
            own = fragment_bits(bits, high, begin, last, fragment, G, False, L)
            codes = eight_codes(words, own, fragment, L)
            values = weights_of(codes, scale, term, L)
            values = tl.where(is_row[:, None, None], values, 0.0)
            tl.store(to + offset_of(fragment, L), values.to(out.dtype.element_ty), mask=is_stored)


@triton.jit
def scale_of(packed, scales, supers, known, rows, columns, IS_SCALED: tl.constexpr, L: tl.constexpr):
    """Return scales and terms of vectors, [R, G, 1] or single numbers, float32."""
    if L.scale == "whole":
        scale = tensor_scale(packed, rows, columns, L) if IS_SCALED else 1.0
        term = 0.0
    else:
        places = scales + (known // L.group * L.scale_nbytes)[None, :]
        scale, term = scale_and_term(places, supers, (known // L.super_weights)[None, :], L)
        scale = scale[:, :, None]
        if L.term != "":
            term = term[:, :, None]
    return scale, term


@triton.jit
def weights_of(codes, scale, term, L: tl.constexpr):
    """Return the float32 weights of int32 codes; products and sums are rounded as in the format."""
    levels: tl.constexpr = L.levels  # as in multiply_add.py
    values = level_of(codes, levels) if L.levels != "" else (codes - L.zero).to(tl.float32)
    return scaled_weights(values, scale, term, L)


def launch_rows(ids: Tensor, packed: Tensor, packing: DevicePacking, dtype: torch.dtype) -> Tensor:
    """Return rows of the matrix: [...] int64 -> [..., I] dtype; zeros for ids out of range."""
    out = torch.empty((*ids.shape, packing.columns), dtype=dtype, device=packed.device)
    if ids.numel():
        _launch(packed, ids.contiguous(), out, 0, packing, is_scaled=True)
    return out


def launch_unpack(
    packed: Tensor,
    packing: DevicePacking,
    dtype: torch.dtype,
    *,
    begin: int = 0,
    end: int | None = None,
    is_scaled: bool = True,
) -> Tensor:
    """Return rows begin .. end - 1 of the matrix: [rows, I] dtype.

    Args:
        end: end of the rows (exclusive); None for all rows.
        is_scaled: True to apply the scale of an i2_s tensor.
    """
    count = (packing.rows if end is None else end) - begin
    out = torch.empty((count, packing.columns), dtype=dtype, device=packed.device)
    _launch(packed, None, out, begin, packing, is_scaled=is_scaled)
    return out


def tensor_scale_of(packed: Tensor, packing: DevicePacking) -> Tensor | float:
    """Return the scale of an i2_s tensor, [1] float32 on the matrix's device; 1 for other formats."""
    if packing.layout.scale != "whole":
        return 1.0
    end = packing.nbytes - TAIL_NBYTES
    return packed[end : end + 4].view(torch.float32)


def _launch(
    packed: Tensor, ids: Tensor | None, out: Tensor, begin: int, packing: DevicePacking, *, is_scaled: bool
) -> None:
    count = out.numel() // packing.columns
    rows = INTERPRETED_ROWS if out.device.type == "cpu" else ROWS
    vectors = packing.columns // weights_of_vector(packing.layout)
    _unpack[(triton.cdiv(count, rows), triton.cdiv(vectors, VECTORS))](
        packed,
        ids,
        out,
        begin,
        count,
        packing.rows,
        packing.columns,
        L=packing.layout,
        IS_SCALED=is_scaled,
        R=rows,
        G=VECTORS,
        num_warps=1,
        enable_fp_fusion=False,
    )


register_implementation("device_rows", "CUDA", launch_rows)
register_implementation("device_matrix", "CUDA", launch_unpack)
