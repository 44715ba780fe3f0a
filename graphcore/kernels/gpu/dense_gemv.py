"""Dense matrices times a few tokens, at memory speed.

Legend: N tokens (1 to 8), I input features, O output features, R rows of a program, G groups of columns, V = columns
that one load of 16 bytes brings.

A program computes R rows for all tokens. Its threads read rows side by side, V columns each, so a tile of a matrix is
[R, G, V] with G the number of threads: the sum over V stays in a thread, the sum over G comes once, at the end. The
next tile is on its way while one is multiplied; weights are read once and do not displace x, which all programs read.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphcore.kernels.gpu.epilogue import ACTIVATION_NAMES, activated, scaled
from graphcore.kernels.gpu.matrix import MOST_MATRICES, Matrix

LOAD_NBYTES = 16
WARPS = 4
FEWEST_PROGRAMS = 512  # about four for each multiprocessor of an H200, which has 132
MOST_ROWS = 8  # of a program


@triton.jit
def _weights(weight, row, at, columns, IS_EVEN: tl.constexpr):
    """Return a tile of a matrix: row [1, R, 1, 1] int64 and at [1, 1, G, V] to [1, R, G, V]; nothing behind the end."""
    if IS_EVEN:  # what is behind the end is never multiplied
        tile = tl.load(weight + row * columns + at, mask=at < columns, eviction_policy="evict_first")
    else:
        tile = tl.load(weight + row * columns + at, mask=at < columns, other=0, eviction_policy="evict_first")
    return tile


@triton.jit
def _tokens(x, token, at, columns, IS_EVEN: tl.constexpr):
    """Return a tile of x: token [N, 1, 1, 1] and at [1, 1, G, V] to [N, 1, G, V]; zeros behind the end."""
    if IS_EVEN:
        tile = tl.load(x + token * columns + at, eviction_policy="evict_last")
    else:
        tile = tl.load(x + token * columns + at, mask=at < columns, other=0, eviction_policy="evict_last")
    return tile


@triton.jit
def _partial_sums(tile, fed):
    """Return the sums over V: [1, R, G, V] and [N, 1, G, V] to [N, R, G] float32.

    Pairs of bf16 come as int32: a shift and a mask make both float32, where a conversion of each takes twice as many.
    """
    if tile.dtype == tl.int32:
        low = (tile << 16).to(tl.float32, bitcast=True) * (fed << 16).to(tl.float32, bitcast=True)
        high = (tile & -65536).to(tl.float32, bitcast=True) * (fed & -65536).to(tl.float32, bitcast=True)
        products = low + high
    else:
        products = tile.to(tl.float32) * fed.to(tl.float32)
    return tl.sum(products, axis=3)


@triton.jit
def _columns(G: tl.constexpr, V: tl.constexpr):
    """Return the columns of the first tile: [1, 1, G, V]."""
    return tl.arange(0, G)[None, None, :, None] * V + tl.arange(0, V)[None, None, None, :]


@triton.jit
def _store(out, values, token, row, out_stride, is_there, ADDS: tl.constexpr):
    """Store or add values [N, R]."""
    place = out + token * out_stride + row
    if ADDS:
        values += tl.load(place, mask=is_there, other=0.0)
    tl.store(place, values.to(out.dtype.element_ty), mask=is_there)


@triton.jit
def _dense_product(
    x,
    x_scale,
    weight,
    weight1,
    weight2,
    bias,
    bias1,
    bias2,
    scale,
    scale1,
    scale2,
    out,
    tokens,
    columns,
    rows,
    rows1,
    rows2,
    out_stride,
    DIVIDES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADDS: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    G: tl.constexpr,
    V: tl.constexpr,
    IS_EVEN: tl.constexpr,
):
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
    token = tl.minimum(tl.arange(0, N), tokens - 1)[:, None, None, None]
    row = tl.minimum(program * R + tl.arange(0, R), rows - 1)[None, :, None, None].to(tl.int64)
    at = _columns(G, V)
    sums = tl.zeros((N, R, G), tl.float32)
    following = _weights(weight, row, at, columns, IS_EVEN)
    for begin in range(0, columns, G * V):
        tile = following
        following = _weights(weight, row, begin + G * V + at, columns, IS_EVEN)
        sums += _partial_sums(tile, _tokens(x, token, begin + at, columns, IS_EVEN))
    token = tl.arange(0, N)[:, None]
    row = program * R + tl.arange(0, R)[None, :]
    is_row = row < rows
    token_read = tl.minimum(token, tokens - 1)
    values = scaled(tl.sum(sums, axis=2), token_read, row, is_row, x_scale, scale, bias, DIVIDES)
    _store(out, activated(values, ACTIVATION), token, row, out_stride, is_row & (token < tokens), ADDS)


@triton.jit
def _dense_gated(
    x,
    x_scale,
    gate,
    up,
    gate_bias,
    up_bias,
    gate_scale,
    up_scale,
    out,
    tokens,
    columns,
    rows,
    out_stride,
    DIVIDES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    G: tl.constexpr,
    V: tl.constexpr,
    IS_EVEN: tl.constexpr,
):
    program = tl.program_id(0)
    token = tl.minimum(tl.arange(0, N), tokens - 1)[:, None, None, None]
    row = tl.minimum(program * R + tl.arange(0, R), rows - 1)[None, :, None, None].to(tl.int64)
    at = _columns(G, V)
    gates = tl.zeros((N, R, G), tl.float32)
    ups = tl.zeros((N, R, G), tl.float32)
    next_gate, next_up = _weights(gate, row, at, columns, IS_EVEN), _weights(up, row, at, columns, IS_EVEN)
    for begin in range(0, columns, G * V):
        gate_tile, up_tile = next_gate, next_up
        next_gate = _weights(gate, row, begin + G * V + at, columns, IS_EVEN)
        next_up = _weights(up, row, begin + G * V + at, columns, IS_EVEN)
        fed = _tokens(x, token, begin + at, columns, IS_EVEN)
        gates += _partial_sums(gate_tile, fed)
        ups += _partial_sums(up_tile, fed)
    token = tl.arange(0, N)[:, None]
    row = program * R + tl.arange(0, R)[None, :]
    is_row = row < rows
    token_read = tl.minimum(token, tokens - 1)
    gates = scaled(tl.sum(gates, axis=2), token_read, row, is_row, x_scale, gate_scale, gate_bias, DIVIDES)
    ups = scaled(tl.sum(ups, axis=2), token_read, row, is_row, x_scale, up_scale, up_bias, DIVIDES)
    values = activated(gates, ACTIVATION) * ups
    _store(out, values, token, row, out_stride, is_row & (token < tokens), False)


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
    absent = [None] * (MOST_MATRICES - len(matrices))
    weights, biases, scales, _, rows = ([*column, *absent] for column in zip(*matrices, strict=True))
    per_program = rows_of_program(sum(matrix.rows for matrix in matrices), len(x))
    programs = sum(triton.cdiv(matrix.rows, per_program) for matrix in matrices)
    counts = [count or 0 for count in rows]
    _dense_product[(programs,)](
        x,
        x_scale,
        *weights,
        *biases,
        *scales,
        out,
        *x.shape,
        *counts,
        out.stride(0),
        DIVIDES=divides,
        ACTIVATION=ACTIVATION_NAMES[activation],
        ADDS=adds,
        **_shape_of_tile(x, per_program),
    )


def launch_dense_gated(
    x: Tensor, x_scale: Tensor | None, gate: Matrix, up: Matrix, divides: bool, activation: str, out: Tensor
) -> None:
    """Store act(x @ gate.T) * (x @ up.T)."""
    x, (gate, up) = in_pairs(x, (gate, up))
    per_program = max(1, rows_of_program(gate.rows + up.rows, len(x)) // 2)
    _dense_gated[(triton.cdiv(gate.rows, per_program),)](
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
        ACTIVATION=ACTIVATION_NAMES[activation],
        **_shape_of_tile(x, per_program),
    )


def rows_of_program(rows: int, tokens: int) -> int:
    """Return how many rows a program takes: as many as leave programs enough for the whole device."""
    most = MOST_ROWS if tokens <= 4 else MOST_ROWS // 2  # each row has a sum for each token
    per_program = 1
    while per_program < most and rows // (2 * per_program) >= FEWEST_PROGRAMS:
        per_program *= 2
    return per_program


def in_pairs(x: Tensor, matrices: Sequence[Matrix]) -> tuple[Tensor, Sequence[Matrix]]:
    """Return bf16 pairs as int32, where rows are whole pairs; anything else as it is."""
    tensors = [x, *(matrix.weight for matrix in matrices)]
    if x.dtype is not torch.bfloat16 or x.shape[1] % 2 or any(one.storage_offset() % 2 for one in tensors):
        return x, matrices
    return x.view(torch.int32), [matrix._replace(weight=matrix.weight.view(torch.int32)) for matrix in matrices]


def _shape_of_tile(x: Tensor, per_program: int) -> dict[str, int | bool]:
    vector = LOAD_NBYTES // x.element_size()
    return {
        "N": triton.next_power_of_2(len(x)),
        "R": per_program,
        "G": 32 * WARPS,
        "V": vector,
        "IS_EVEN": x.shape[1] % (32 * WARPS * vector) == 0,
        "num_warps": WARPS,
        "enable_fp_fusion": True,
    }
