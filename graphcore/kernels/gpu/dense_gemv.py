"""Dense matrices times a few tokens, at memory speed.

Legend: N tokens (1 to 8), I input features, O output features, R rows of a program, G and V as in dense_sums.py.

A program computes R rows for all tokens: as many as leave programs enough for the whole device, so that x is read
less often. Of several matrices each has programs of its own, one behind another.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphcore.kernels.gpu.dense_sums import dotted_sums, multiplied_sums
from graphcore.kernels.gpu.epilogue import activated, scaled, store_sums
from graphcore.kernels.gpu.matrix import MOST_MATRICES, MOST_TOKENS, Matrix

LOAD_NBYTES = 16
WARPS = 4
FEWEST_PROGRAMS = 512  # about four for each multiprocessor of an H200, which has 132
MOST_ROWS = 8  # of a program that multiplies
MOST_MULTIPLIED = 2  # tokens; of more, tensor cores compute the products
DOTTED_ROWS = 32  # of a program then: x comes from the second cache for each program, as a quarter of what weights are
FEWEST_DOTTED = 128  # programs, which have 48 KiB on their way each
DOTTED_COLUMNS = 64  # of a warp in a tile


@triton.jit
def _values(
    x, x_scale, weight, bias, scale, start, rows, tokens, columns, DIVIDES: tl.constexpr,
    DOTS: tl.constexpr, N: tl.constexpr, R: tl.constexpr, G: tl.constexpr, V: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    """Return the products with rows start .. of one matrix, scaled and biased: [N, R] float32."""
    if DOTS:
        sums = dotted_sums(x, weight, start, rows, tokens, columns, N, R, G, V, IS_EVEN)
    else:
        sums = multiplied_sums(x, weight, start, rows, tokens, columns, N, R, G, V, IS_EVEN)
    token = tl.minimum(tl.arange(0, N), tokens - 1)[:, None]
    row = start + tl.arange(0, R)[None, :]
    return scaled(sums, token, row, row < rows, x_scale, scale, bias, DIVIDES)


@triton.jit
def _dense_product(
    x, x_scale, weight, weight1, weight2, bias, bias1, bias2, scale, scale1, scale2, out,
    tokens, columns, rows, rows1, rows2, out_stride,
    DIVIDES: tl.constexpr, ACTIVATION: tl.constexpr, ADDS: tl.constexpr,
    DOTS: tl.constexpr, N: tl.constexpr, R: tl.constexpr, G: tl.constexpr, V: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
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
    values = _values(x, x_scale, weight, bias, scale, start, rows, tokens, columns, DIVIDES, DOTS, N, R, G, V, IS_EVEN)
    store_sums(out, activated(values, ACTIVATION), 0, start, tokens, rows, out_stride, ADDS, N, R)


@triton.jit
def _dense_gated(
    x, x_scale, gate, up, gate_bias, up_bias, gate_scale, up_scale, out, tokens, columns, rows, out_stride,
    DIVIDES: tl.constexpr, ACTIVATION: tl.constexpr,
    DOTS: tl.constexpr, N: tl.constexpr, R: tl.constexpr, G: tl.constexpr, V: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * R
    gates = _values(
        x, x_scale, gate, gate_bias, gate_scale, start, rows, tokens, columns, DIVIDES, DOTS, N, R, G, V, IS_EVEN
    )
    ups = _values(x, x_scale, up, up_bias, up_scale, start, rows, tokens, columns, DIVIDES, DOTS, N, R, G, V, IS_EVEN)
    store_sums(out, activated(gates, ACTIVATION) * ups, 0, start, tokens, rows, out_stride, False, N, R)


def launch_dense_product(
    x: Tensor,
    x_scale: Tensor | None,
    matrices: Sequence[Matrix],
    divides: bool,
    activation: str,
    out: Tensor,
    adds: bool,
) -> None:
    """Store or add the products of up to MOST_MATRICES matrices, all with a bias or none, all with a scale or none."""
    x, matrices = in_pairs(x, matrices)
    tile = tile_of(x, out.shape[1])
    absent = [None] * (MOST_MATRICES - len(matrices))
    weights, biases, scales, _, rows = ([*column, *absent] for column in zip(*matrices, strict=True))
    _dense_product[(sum(triton.cdiv(matrix.rows, tile["R"]) for matrix in matrices),)](
        x,
        x_scale,
        *weights,
        *biases,
        *scales,
        out,
        *x.shape,
        *(count or 0 for count in rows),
        out.stride(0),
        DIVIDES=divides,
        ACTIVATION=activation,
        ADDS=adds,
        **tile,
    )


def launch_dense_gated(
    x: Tensor, x_scale: Tensor | None, gate: Matrix, up: Matrix, divides: bool, activation: str, out: Tensor
) -> None:
    """Store act(x @ gate.T) * (x @ up.T)."""
    x, (gate, up) = in_pairs(x, (gate, up))
    tile = tile_of(x, gate.rows)
    _dense_gated[(triton.cdiv(gate.rows, tile["R"]),)](
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
        out.stride(0),
        DIVIDES=divides,
        ACTIVATION=activation,
        **tile,
    )


def in_pairs(x: Tensor, matrices: Sequence[Matrix]) -> tuple[Tensor, Sequence[Matrix]]:
    """Return bf16 pairs as int32, where one or two tokens' rows are whole pairs; anything else as it is."""
    tensors = [x, *(matrix.weight for matrix in matrices)]
    is_narrow = x.dtype is torch.bfloat16 and len(x) <= MOST_MULTIPLIED
    if not is_narrow or x.shape[1] % 2 or any(one.storage_offset() % 2 for one in tensors):
        return x, matrices
    return x.view(torch.int32), [matrix._replace(weight=matrix.weight.view(torch.int32)) for matrix in matrices]


def tile_of(x: Tensor, rows: int) -> dict[str, int]:
    """Return what a program computes of so many rows in all, as the kernels' constants."""
    tokens, columns = x.shape
    common = {"enable_fp_fusion": True}
    if tokens > MOST_MULTIPLIED and x.dtype is not torch.float32:
        per_program = DOTTED_ROWS if rows >= FEWEST_DOTTED * DOTTED_ROWS else DOTTED_ROWS // 2
        shape = {"DOTS": True, "N": MOST_TOKENS, "R": per_program, "G": WARPS, "V": DOTTED_COLUMNS}
        even = columns % (WARPS * DOTTED_COLUMNS) == 0
        return {**shape, "IS_EVEN": even, "num_warps": WARPS, "num_stages": 4, **common}
    most = MOST_ROWS if tokens <= MOST_MULTIPLIED else MOST_ROWS // 2  # each row has a sum for each token
    vector, threads = LOAD_NBYTES // x.element_size(), 32 * WARPS
    shape = {"DOTS": False, "N": triton.next_power_of_2(tokens), "R": rows_of_program(rows, most)}
    even = columns % (threads * vector) == 0
    return {**shape, "G": threads, "V": vector, "IS_EVEN": even, "num_warps": WARPS, **common}


def rows_of_program(rows: int, most: int) -> int:
    """Return how many rows a program takes, at most so many: as many as leave programs enough for the whole device."""
    per_program = 1
    while per_program < most and rows // (2 * per_program) >= FEWEST_PROGRAMS:
        per_program *= 2
    return per_program
