"""Products of dense matrices with a few tokens, at memory speed.

Legend: N tokens (1 to 8), I input features, O output features, R rows of a program, G groups of V columns.

    multiplied   one or two tokens: threads read a row side by side, V columns each (16 bytes), so a tile of the matrix
                 is [R, G, V] with G the number of threads; the sum over V stays in a thread, the sum over G is taken
                 once, at the end. The next tile is loaded while one is multiplied. A program has one row: many small
                 programs keep more loads in flight than a few large ones (docs/lab/gpu.md).
    dotted       more tokens: tensor cores; tiles go through shared memory, several in flight at once. At eight
                 tokens `multiplied` would take twenty instructions per weight, and memory would wait for them.

A program computes R rows for all tokens. If there are several matrices, each has its own programs, numbered after those
of the one before. Weights are read once and do not evict x, which all programs read.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphcore.kernels import limits
from graphcore.kernels.gpu.dependent_launch import let_next_begin, wait_for_earlier
from graphcore.kernels.gpu.epilogue import activated, scaled_and_biased, store_products
from graphcore.kernels.gpu.matrix import MOST_MATRICES, DeviceMatrix
from graphcore.kernels.gpu.mean_squares import FusedNorm
from graphcore.kernels.gpu.pdl import pdl_options

LOAD_NBYTES = 16
WARPS = 4
MOST_MULTIPLIED = 2  # tokens; for more of them, tensor cores compute the products
ROWS = 1  # rows of a program for one or two tokens
SHARING_ROWS = 4  # rows of a program for more tokens in float32; the rows share x
DOTTED_ROWS = 32  # rows of a program on tensor cores: it reads x from the L2 cache, a quarter of its weights' bytes
FEWEST_DOTTED = 128  # number of programs; each has 48 KiB in flight
DOTTED_COLUMNS = 64  # columns of a warp in a tile


@triton.jit
def multiplied_sums(
    x, weight, start, rows, tokens, columns,
    N: tl.constexpr, R: tl.constexpr, G: tl.constexpr, V: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    """Return x @ weight[start : start + R].T, [N, R] float32; rows and tokens past the end repeat the last one.

    Args:
        x: pointer to [tokens, columns]; bf16 whose rows are whole pairs comes as int32, and columns count pairs.
        weight: pointer to [rows, columns] of the same type.
        IS_EVEN: True if the columns are whole tiles.
    """
    token = tl.minimum(tl.arange(0, N), tokens - 1)[:, None, None, None]
    row = tl.minimum(start + tl.arange(0, R), rows - 1)[None, :, None, None].to(tl.int64)
    at = tl.arange(0, G)[None, None, :, None] * V + tl.arange(0, V)[None, None, None, :]
    sums = tl.zeros((N, R, G), tl.float32)
    following = _weights(weight, row, at, columns, IS_EVEN)
    for begin in range(0, columns, G * V):
        tile = following
        following = _weights(weight, row, begin + G * V + at, columns, IS_EVEN)
        sums += _partial_sums(tile, _tokens(x, token, begin + at, columns, IS_EVEN))
    return tl.sum(sums, axis=2)


@triton.jit
def _weights(weight, row, at, columns, IS_EVEN: tl.constexpr):
    """Return a tile of a matrix, without reading past its end; row and at broadcast to the tile's shape."""
    if IS_EVEN:  # values past the end are never multiplied
        tile = tl.load(weight + row * columns + at, mask=at < columns, eviction_policy="evict_first")
    else:
        tile = tl.load(weight + row * columns + at, mask=at < columns, other=0, eviction_policy="evict_first")
    return tile


@triton.jit
def _tokens(x, token, at, columns, IS_EVEN: tl.constexpr):
    """Return a tile of x, with zeros past its end; token and at broadcast to the tile's shape."""
    if IS_EVEN:
        tile = tl.load(x + token * columns + at, eviction_policy="evict_last")
    else:
        tile = tl.load(x + token * columns + at, mask=at < columns, other=0, eviction_policy="evict_last")
    return tile


@triton.jit
def _partial_sums(tile, fed):
    """Return the sums over V: [1, R, G, V] and [N, 1, G, V] to [N, R, G] float32.

    Pairs of bf16 come as int32: a shift and a mask make both float32, in half the instructions of two conversions.
    """
    if tile.dtype == tl.int32:
        low = (tile << 16).to(tl.float32, bitcast=True) * (fed << 16).to(tl.float32, bitcast=True)
        high = (tile & -65536).to(tl.float32, bitcast=True) * (fed & -65536).to(tl.float32, bitcast=True)
        products = low + high
    else:
        products = tile.to(tl.float32) * fed.to(tl.float32)
    return tl.sum(products, axis=3)


@triton.jit
def dotted_sums(
    x, weight, start, rows, tokens, columns,
    N: tl.constexpr, R: tl.constexpr, G: tl.constexpr, V: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    """Return the same as `multiplied_sums` for 16 bits; rows in G groups of V columns, with a warp for each group.

    A warp that had a whole row would wait for each product before the next; tokens past the end are zeros.
    """
    token = tl.arange(0, N)[None, :, None]
    row = tl.minimum(start + tl.arange(0, R), rows - 1)[None, :, None].to(tl.int64)
    at = tl.arange(0, G)[:, None, None] * V + tl.arange(0, V)[None, None, :]
    sums = tl.zeros((G, R, N), tl.float32)
    for begin in range(0, columns, G * V):
        if IS_EVEN:
            tile = tl.load(weight + row * columns + begin + at, eviction_policy="evict_first")
        else:
            tile = tl.load(weight + row * columns + begin + at, mask=begin + at < columns, other=0.0)
        is_there = (token < tokens) & (begin + at < columns)
        fed = tl.load(x + token * columns + begin + at, mask=is_there, other=0.0)
        sums = tl.dot(tile, tl.permute(fed, (0, 2, 1)), sums)
    return tl.trans(tl.sum(sums, axis=0))


@triton.jit
def _values(
    x, x_scale, weight, bias, scale, start, rows, tokens, columns, eps, DIVIDES: tl.constexpr,
    DOTS: tl.constexpr, N: tl.constexpr, R: tl.constexpr, G: tl.constexpr, V: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    """Return the products with rows from `start` of one matrix, scaled and with bias: [N, R] float32."""
    if DOTS:
        sums = dotted_sums(x, weight, start, rows, tokens, columns, N, R, G, V, IS_EVEN)
    else:
        sums = multiplied_sums(x, weight, start, rows, tokens, columns, N, R, G, V, IS_EVEN)
    token = tl.minimum(tl.arange(0, N), tokens - 1)[:, None]
    row = start + tl.arange(0, R)[None, :]
    numbers = columns * 2 if x.dtype.element_ty == tl.int32 else columns
    return scaled_and_biased(sums, token, row, row < rows, x_scale, scale, bias, DIVIDES, numbers, eps)


@triton.jit
def _dense_product(
    x, x_scale, weight, weight1, weight2, bias, bias1, bias2, scale, scale1, scale2, out,
    norm_weight, norm_rows, squares, tokens, columns, rows, rows1, rows2, out_stride, eps,
    DIVIDES: tl.constexpr, ACTIVATION: tl.constexpr, ADDS: tl.constexpr, FACTOR: tl.constexpr,
    DOTS: tl.constexpr, N: tl.constexpr, R: tl.constexpr, G: tl.constexpr, V: tl.constexpr, IS_EVEN: tl.constexpr,
    DEPENDENT: tl.constexpr,
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
    wait_for_earlier(DEPENDENT)
    values = _values(
        x, x_scale, weight, bias, scale, start, rows, tokens, columns, eps, DIVIDES, DOTS, N, R, G, V, IS_EVEN
    )
    let_next_begin(DEPENDENT)
    values = activated(values, ACTIVATION)
    store_products(out, values, 0, start, tokens, rows, out_stride, ADDS, N, R, norm_weight, norm_rows, squares, FACTOR)


@triton.jit
def _dense_gated(
    x, x_scale, gate, up, gate_bias, up_bias, gate_scale, up_scale, out, tokens, columns, rows, out_stride, eps,
    DIVIDES: tl.constexpr, ACTIVATION: tl.constexpr,
    DOTS: tl.constexpr, N: tl.constexpr, R: tl.constexpr, G: tl.constexpr, V: tl.constexpr, IS_EVEN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * R
    wait_for_earlier(DEPENDENT)
    gates = _values(
        x, x_scale, gate, gate_bias, gate_scale, start, rows, tokens, columns, eps, DIVIDES, DOTS, N, R, G, V, IS_EVEN
    )
    ups = _values(
        x, x_scale, up, up_bias, up_scale, start, rows, tokens, columns, eps, DIVIDES, DOTS, N, R, G, V, IS_EVEN
    )
    let_next_begin(DEPENDENT)
    store_products(out, activated(gates, ACTIVATION) * ups, 0, start, tokens, rows, out_stride, False, N, R)


def launch_dense_product(
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
    """Store or add the products of up to MOST_MATRICES matrices; all or none have biases, all or none have scales."""
    x, matrices = in_pairs(x, matrices)
    tile = dense_tile(x, out.shape[1])
    absent = [None] * (MOST_MATRICES - len(matrices))
    weights, biases, scales, _, rows = ([*column, *absent] for column in zip(*matrices, strict=True))
    _dense_product[(sum(triton.cdiv(matrix.rows, tile["R"]) for matrix in matrices),)](
        x,
        x_scale,
        *weights,
        *biases,
        *scales,
        out,
        *(next_norm or (None, None, None)),
        *x.shape,
        *(count or 0 for count in rows),
        out.stride(0),
        eps,
        DIVIDES=divides,
        ACTIVATION=activation,
        ADDS=adds,
        FACTOR=factor,
        **tile,
    )


def launch_dense_gated(
    x: Tensor,
    x_scale: Tensor | None,
    gate: DeviceMatrix,
    up: DeviceMatrix,
    divides: bool,
    activation: str,
    out: Tensor,
    eps: float = 0.0,
) -> None:
    """Store act(x @ gate.T) * (x @ up.T)."""
    x, (gate, up) = in_pairs(x, (gate, up))
    tile = dense_tile(x, gate.rows)
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
        eps,
        DIVIDES=divides,
        ACTIVATION=activation,
        **tile,
    )


def in_pairs(x: Tensor, matrices: Sequence[DeviceMatrix]) -> tuple[Tensor, Sequence[DeviceMatrix]]:
    """Return bf16 pairs as int32, if one or two tokens' rows are whole pairs; anything else unchanged."""
    tensors = [x, *(matrix.weight for matrix in matrices)]
    is_narrow = x.dtype is torch.bfloat16 and len(x) <= MOST_MULTIPLIED
    if not is_narrow or x.shape[1] % 2 or any(one.storage_offset() % 2 for one in tensors):
        return x, matrices
    return x.view(torch.int32), [matrix._replace(weight=matrix.weight.view(torch.int32)) for matrix in matrices]


def dense_tile(x: Tensor, rows: int) -> dict[str, int]:
    """Return the tile of a program for this many rows in all, as the kernels' constants."""
    tokens, columns = x.shape
    common = {"enable_fp_fusion": True, **pdl_options()}
    if tokens > MOST_MULTIPLIED and x.dtype is not torch.float32:
        per_program = DOTTED_ROWS if rows >= FEWEST_DOTTED * DOTTED_ROWS else DOTTED_ROWS // 2
        shape = {"DOTS": True, "N": limits.MOST_TOKENS, "R": per_program, "G": WARPS, "V": DOTTED_COLUMNS}
        even = columns % (WARPS * DOTTED_COLUMNS) == 0
        return {**shape, "IS_EVEN": even, "num_warps": WARPS, "num_stages": 4, **common}
    vector, threads = LOAD_NBYTES // x.element_size(), 32 * WARPS
    per_program = ROWS if tokens <= MOST_MULTIPLIED else SHARING_ROWS
    shape = {"DOTS": False, "N": triton.next_power_of_2(tokens), "R": per_program}
    even = columns % (threads * vector) == 0
    return {**shape, "G": threads, "V": vector, "IS_EVEN": even, "num_warps": WARPS, **common}
