"""Packed matrices times a few tokens, at memory speed: codes are unpacked in registers (multiply_add.py).

Legend: N tokens (1 to 8), I input features, O output features, R rows of a program, G vectors of a row.

A program computes R rows for some of the tokens. Its threads read one row after another, side by side, so that the sums
of R rows share the preparation of x; sums over threads are added once, at the end. From three tokens in 16 bits on,
tensor cores multiply all tokens in one program (tensor_cores.py).
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from graphcore.kernels.gpu.dependent_launch import let_next_begin, wait_for_earlier
from graphcore.kernels.gpu.epilogue import activated, scaled_and_biased, store_products
from graphcore.kernels.gpu.matrix import MOST_MATRICES, DeviceMatrix
from graphcore.kernels.gpu.mean_squares import FusedNorm
from graphcore.kernels.gpu.packed.multiply_add import dot_each, dot_rows
from graphcore.kernels.gpu.packed.planes import tensor_scale
from graphcore.kernels.gpu.packed.program_tiles import constants_of, tile_for
from graphcore.kernels.gpu.packed.tensor_cores import dotted_rows


@triton.jit
def _products(
    x, x_scale, first, weight, bias, scale, start, rows, tokens, columns: tl.constexpr, x_stride, eps,
    DIVIDES: tl.constexpr, L: tl.constexpr, DOTS: tl.constexpr, N: tl.constexpr, R: tl.constexpr, G: tl.constexpr,
    IS_EVEN: tl.constexpr,
):  # fmt: skip
    """Return products of tokens from `first` with rows from `start` of a matrix, scaled, with bias: [N, R] float32."""
    if DOTS:
        sums = dotted_rows(x, x_stride, tokens, weight, start, rows, columns, L, N, R, G)
    else:
        fed = x + first * x_stride
        sums = dot_rows(fed, x_stride, tokens - first, weight, start, rows, columns, L, N, R, G, IS_EVEN)
    return _scaled(sums, x_scale, first, weight, bias, scale, start, rows, tokens, columns, eps, DIVIDES, L, N, R)


@triton.jit
def _scaled(
    sums, x_scale, first, weight, bias, scale, start, rows, tokens, columns, eps,
    DIVIDES: tl.constexpr, L: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    if L.scale == "whole":
        sums *= tensor_scale(weight, rows, columns, L)
    token = tl.minimum(first + tl.arange(0, N), tokens - 1)[:, None]
    row = start + tl.arange(0, R)[None, :]
    return scaled_and_biased(sums, token, row, row < rows, x_scale, scale, bias, DIVIDES, columns, eps)


@triton.jit
def _packed_product(
    x, x_scale, weight, weight1, weight2, bias, bias1, bias2, scale, scale1, scale2, out,
    norm_weight, norm_rows, squares, tokens, columns: tl.constexpr, rows, rows1, rows2, x_stride, out_stride, eps,
    DIVIDES: tl.constexpr, ACTIVATION: tl.constexpr, ADDS: tl.constexpr, FACTOR: tl.constexpr,
    L: tl.constexpr, DOTS: tl.constexpr, N: tl.constexpr, R: tl.constexpr, G: tl.constexpr,
    IS_EVEN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(1)
    first = tl.program_id(0) * N  # programs of the same rows run side by side, so memory is read once for all
    if weight1 is not None:
        is_first = program < tl.cdiv(rows, R)
        program = tl.where(is_first, program, program - tl.cdiv(rows, R))
        out = tl.where(is_first, out, out + rows)
        weight = tl.where(is_first, weight, weight1)
        if bias is not None:
            bias = tl.where(is_first, bias, bias1)
        if scale is not None:
            scale = tl.where(is_first, scale, scale1)
        rows = tl.where(is_first, rows, rows1)
    if weight2 is not None:
        is_before = program < tl.cdiv(rows, R)
        program = tl.where(is_before, program, program - tl.cdiv(rows, R))
        out = tl.where(is_before, out, out + rows)
        weight = tl.where(is_before, weight, weight2)
        if bias is not None:
            bias = tl.where(is_before, bias, bias2)
        if scale is not None:
            scale = tl.where(is_before, scale, scale2)
        rows = tl.where(is_before, rows, rows2)
    start = program * R
    wait_for_earlier(DEPENDENT)
    values = _products(
        x, x_scale, first, weight, bias, scale, start, rows, tokens, columns, x_stride, eps,
        DIVIDES, L, DOTS, N, R, G, IS_EVEN,
    )  # fmt: skip
    let_next_begin(DEPENDENT)
    values = activated(values, ACTIVATION)
    store_products(
        out, values, first, start, tokens, rows, out_stride, ADDS, N, R, norm_weight, norm_rows, squares, FACTOR
    )


@triton.jit
def _packed_gated(
    x, x_scale, gate, up, gate_bias, up_bias, gate_scale, up_scale, out,
    tokens, columns: tl.constexpr, rows, x_stride, out_stride, eps, DIVIDES: tl.constexpr, ACTIVATION: tl.constexpr,
    L: tl.constexpr, DOTS: tl.constexpr, N: tl.constexpr, R: tl.constexpr, G: tl.constexpr,
    IS_EVEN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(1) * R
    first = tl.program_id(0) * N
    wait_for_earlier(DEPENDENT)
    if DOTS:
        gates = _products(
            x, x_scale, first, gate, gate_bias, gate_scale, start, rows, tokens, columns, x_stride, eps,
            DIVIDES, L, DOTS, N, R, G, IS_EVEN,
        )  # fmt: skip
        ups = _products(
            x, x_scale, first, up, up_bias, up_scale, start, rows, tokens, columns, x_stride, eps,
            DIVIDES, L, DOTS, N, R, G, IS_EVEN,
        )  # fmt: skip
    else:
        fed = x + first * x_stride
        gates, ups = dot_each(fed, x_stride, tokens - first, (gate, up), start, rows, columns, L, N, R, G, IS_EVEN)
        gates = _scaled(
            gates, x_scale, first, gate, gate_bias, gate_scale, start, rows, tokens, columns, eps, DIVIDES, L, N, R
        )
        ups = _scaled(ups, x_scale, first, up, up_bias, up_scale, start, rows, tokens, columns, eps, DIVIDES, L, N, R)
    let_next_begin(DEPENDENT)
    store_products(out, activated(gates, ACTIVATION) * ups, first, start, tokens, rows, out_stride, False, N, R)


def launch_packed_product(
    x: Tensor,
    x_scale: Tensor | None,
    matrices: Sequence[DeviceMatrix],
    divides: bool,
    activation: str,
    out: Tensor,
    adds: bool,
    eps: float = 0.0,
    next_norm: FusedNorm | None = None,
    factor: float = 1.0,
) -> None:
    """Store or add the products of up to MOST_MATRICES matrices of one format; other arguments as in `product`.

    Args:
        x: [N, I] float32, fp16 or bf16, rows contiguous, at multiples of 16 bytes.
        x_scale: [N] float32, if x holds int8 codes as integers: sums are then exact for ternary weights; or [N, 2]
            int64, the squares of rows whose norm is not applied yet.
        matrices: packed as in kernels/gpu/layout.py, all of one format, with biases for all or none, and scales too.
        out: [N, sum of rows], the last dimension contiguous; all of it is written.
        eps: the norm's epsilon, if x_scale has squares (mean_squares.py).
        next_norm: buffers that a sum is also written to, for the next norm.
        factor: factor of the products, biases included.
    """
    absent = [None] * (MOST_MATRICES - len(matrices))
    weights, biases, scales, _, rows = ([*column, *absent] for column in zip(*matrices, strict=True))
    tile = tile_for(matrices[0].format, out.shape[1], x)
    programs = sum(triton.cdiv(matrix.rows, tile.rows) for matrix in matrices)
    _packed_product[(triton.cdiv(len(x), tile.tokens), programs)](
        x,
        x_scale,
        *weights,
        *biases,
        *scales,
        out,
        *(next_norm or (None, None, None)),
        *x.shape,
        *(count or 0 for count in rows),
        x.stride(0),
        out.stride(0),
        eps,
        DIVIDES=divides,
        ACTIVATION=activation,
        ADDS=adds,
        FACTOR=factor,
        **constants_of(matrices[0].format, tile, x.shape[1]),
    )


def launch_packed_gated(
    x: Tensor,
    x_scale: Tensor | None,
    gate: DeviceMatrix,
    up: DeviceMatrix,
    divides: bool,
    activation: str,
    out: Tensor,
    eps: float = 0.0,
) -> None:
    """Store act(x @ gate.T) * (x @ up.T): [N, F]; both matrices of one format."""
    tile = tile_for(gate.format, 2 * gate.rows, x)
    if not tile.dots:
        tile = tile._replace(rows=max(1, tile.rows // 2))  # rows of each: both are multiplied in one loop
    _packed_gated[(triton.cdiv(len(x), tile.tokens), triton.cdiv(gate.rows, tile.rows))](
        x,
        x_scale,
        gate.weight,
        up.weight,
        gate.bias,
        up.bias,
        gate.scale,
        up.scale,
        out,
        *x.shape,
        gate.rows,
        x.stride(0),
        out.stride(0),
        eps,
        DIVIDES=divides,
        ACTIVATION=activation,
        **constants_of(gate.format, tile, x.shape[1]),
    )
