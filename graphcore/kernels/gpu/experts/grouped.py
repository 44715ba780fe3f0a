"""Many tokens through their experts: each expert's tokens together, in tiles, as one grouped matrix product.

Legend: N tokens, D model dim, X experts, F hidden features of an expert, C choices, P = N C pairs, S places.

    pairs in the order of their experts    0 0 0 0 0 | 2 2 | 3 3 3 ...       sorted on the device, those without last
    tiles of at most four of them          [0 0 0 0] [0] [2 2] [3 3 3] ...   each expert begins a new tile

No length is read back: the grid has as many tiles as there could be, and unneeded ones exit at once. A tile's matrix
rows are the first operand of the products, so that few tokens still fill a tensor core's instruction.

Packed formats whose bytes hold weight j and weight j + 16 of 32 (mxfp4, q4_0, ...) are read a word of eight codes at a
time; others weight by weight (packed/planes.py).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphcore.kernels.gpu.experts.operands import MixtureOperands, biased, gated_sums, matrix_at, place_of
from graphcore.kernels.gpu.packed.planes import (
    level_of,
    plane_rows,
    scale_and_term,
    scaled_weights,
    tensor_scale,
    weights_at,
)

TWO_TO_127 = tl.constexpr(float(2**127))
ROWS = 64  # rows of a matrix that one program multiplies
LEAST_TILE, MOST_TILE = 16, 64  # pairs


@triton.jit
def tile_at(matrix, rows, begin, columns, L: tl.constexpr, K: tl.constexpr):
    """Return weights of columns begin .. begin + K - 1, float32; arbitrary values after the last column.

    Args:
        matrix: pointer to uint8.
        rows: [R], 0 .. O - 1.
        begin: a multiple of K.  K: a multiple of 32.

    Returns:
        [R, K] float32, without the tensor's scale of i2_s.
    """
    if L.low == 4 and L.high == 0 and L.step == 16 and L.group == 32:
        tile = _halves_at(matrix, rows, begin, columns, L, K)
    else:
        at = tl.minimum(begin + tl.arange(0, K), columns - 1)
        tile = weights_at(matrix, rows[:, None], at[None, :], columns, L)
    return tile


@triton.jit
def _halves_at(matrix, rows, begin, columns, L: tl.constexpr, K: tl.constexpr):
    units: tl.constexpr = K // 32
    R: tl.constexpr = rows.shape[0]
    levels: tl.constexpr = L.levels  # as in packed/multiply_add.py
    unit = tl.minimum(begin // 32 + tl.arange(0, units), columns // 32 - 1)
    low = plane_rows(matrix, rows, columns, 0, L)[:, None, None]
    codes = tl.load(low + (unit * 16)[None, :, None] + tl.arange(0, 16)[None, None, :]).to(tl.int32)  # [R, units, 16]
    both = tl.join(codes & 15, codes >> 4)  # [R, units, 16, 2]
    if L.levels == "e2m1":  # doubled; a zero may be negative here, which no product shows
        value = ((both & 7) << 22 | (both & 8) << 28).to(tl.float32, bitcast=True) * TWO_TO_127
    elif L.levels != "":
        value = level_of(both, levels)
    else:
        value = (both - L.zero).to(tl.float32)
    scales = plane_rows(matrix, rows, columns, 2, L)[:, None] + (unit * L.scale_nbytes)[None, :]
    supers = plane_rows(matrix, rows, columns, 3, L)[:, None]
    scale, term = scale_and_term(scales, supers, (unit // (L.super_weights // 32))[None, :], L)
    if L.term != "":
        term = term[:, :, None, None]
    value = scaled_weights(value, scale[:, :, None, None], term, L)
    return tl.reshape(tl.permute(value, (0, 1, 3, 2)), (R, K))


@dataclass(frozen=True)
class Groups:
    """Pairs of token and choice, sorted by expert.

    Attributes:
        order: [P] int64, pairs (token C + choice) in the order of their experts; those without an expert come last.
        counts: [X] int32, number of pairs of each expert that is present.
        tile: number of pairs of a tile.
        num_tiles: largest possible number of tiles.
    """

    order: Tensor
    counts: Tensor
    tile: int
    num_tiles: int


def grouped(chosen: Tensor, num_experts: int, places: Tensor | None) -> Groups:
    """Return the pairs of `chosen` [N, C] by expert, without waiting for the GPU; `places` as in operands.py."""
    flat = chosen.flatten()
    if places is not None:
        is_there = (flat >= 0) & (places[flat.clamp(min=0)] >= 0)
        flat = torch.where(is_there, flat, -1)
    flat = torch.where(flat < 0, num_experts, flat)
    counts = (flat[None] == torch.arange(num_experts, device=flat.device, dtype=torch.int64)[:, None]).sum(
        1, dtype=torch.int32
    )
    tile = triton.next_power_of_2(max(len(flat) // num_experts, 1))
    tile = min(max(tile, LEAST_TILE), MOST_TILE)
    return Groups(flat.argsort(stable=True), counts, tile, triton.cdiv(len(flat), tile) + num_experts)


@triton.jit
def _find_tile(counts, num_experts, EXPERTS: tl.constexpr, TOKENS: tl.constexpr):
    """Return this program's expert, and the range of its pairs; an unneeded tile has none."""
    tile = tl.program_id(0)
    at = tl.arange(0, EXPERTS)
    count = tl.load(counts + at, mask=at < num_experts, other=0)
    tiles = (count + TOKENS - 1) // TOKENS
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    before = tl.sum(tl.where(at < expert, count, 0), 0)
    mine = tl.sum(tl.where(at == expert, count, 0), 0)
    first = (tile - tl.sum(tl.where(at < expert, tiles, 0), 0)) * TOKENS
    return expert, before + first, before + mine


@triton.jit
def _rows_times(
    matrix, rows, is_row, fed, is_pair, num_rows, columns,
    L: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Return [ROWS, TOKENS] float32: rows of a matrix times vectors.

    Args:
        matrix: pointer to the expert's matrix.  rows: [ROWS].
        fed: [TOKENS] pointers to vectors [I].
        L: DeviceLayout of a packed matrix; None for a dense one.
    """
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    starts = matrix
    if L is None:
        starts = matrix + rows.to(tl.int64)[:, None] * columns
    else:
        rows = tl.minimum(rows, num_rows - 1)
    for begin in range(0, columns, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        inside = at < columns
        vectors = tl.load(fed[None, :] + at[:, None], mask=is_pair[None, :] & inside[:, None], other=0.0)
        if L is None:
            weights = tl.load(starts + at[None, :], mask=is_row[:, None] & inside[None, :], other=0.0)
        else:
            weights = tile_at(matrix, rows, begin, columns, L, BLOCK).to(vectors.dtype)
        total = tl.dot(weights, vectors, total, input_precision="ieee")
    if L is not None:
        total *= tensor_scale(matrix, num_rows, columns, L)
    return total


@triton.jit
def _grouped_gate_up(
    x, order, counts, places, gate, up, gate_waits, up_waits, gate_bias, up_bias, hidden, num_experts, choices,
    columns, features, gate_stride, up_stride, limit, alpha, GATING: tl.constexpr, GATE: tl.constexpr, UP: tl.constexpr,
    EXPERTS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert, begin, end = _find_tile(counts, num_experts, EXPERTS, TOKENS)
    if begin >= end:
        return
    at = begin + tl.arange(0, TOKENS)
    is_pair = at < end
    token = tl.load(order + at, mask=is_pair, other=0) // choices
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_row = rows < features
    place, fed = place_of(expert, places), x + token * columns
    gate = matrix_at(expert, place, gate, gate_waits, gate_stride)
    up = matrix_at(expert, place, up, up_waits, up_stride)
    of_expert = (expert * features + rows)[:, None]
    gates = _rows_times(gate, rows, is_row, fed, is_pair, features, columns, GATE, BLOCK, ROWS, TOKENS)
    gates = biased(gates, gate_bias, of_expert, is_row[:, None])
    ups = _rows_times(up, rows, is_row, fed, is_pair, features, columns, UP, BLOCK, ROWS, TOKENS)
    ups = biased(ups, up_bias, of_expert, is_row[:, None])
    values = gated_sums(gates, ups, limit, alpha, GATING).to(hidden.dtype.element_ty)
    to = hidden + at.to(tl.int64)[None, :] * features + rows[:, None]
    tl.store(to, values, mask=is_row[:, None] & is_pair[None, :])


@triton.jit
def _grouped_down(
    hidden, order, counts, places, down, waits, bias, out, num_experts, columns, features, stride,
    FORM: tl.constexpr, EXPERTS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert, begin, end = _find_tile(counts, num_experts, EXPERTS, TOKENS)
    if begin >= end:
        return
    at = begin + tl.arange(0, TOKENS)
    is_pair = at < end
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_row = rows < features
    matrix = matrix_at(expert, place_of(expert, places), down, waits, stride)
    fed = hidden + at.to(tl.int64) * columns
    answers = _rows_times(matrix, rows, is_row, fed, is_pair, features, columns, FORM, BLOCK, ROWS, TOKENS)
    answers = biased(answers, bias, (expert * features + rows)[:, None], is_row[:, None])
    pair = tl.load(order + at, mask=is_pair, other=0)
    to = out + pair[None, :] * features + rows[:, None]
    tl.store(to, answers.to(out.dtype.element_ty), mask=is_row[:, None] & is_pair[None, :])


def _shape(x: Tensor, mixture: MixtureOperands) -> dict[str, int]:
    """Return columns of a tile and warps: a thread has fewer weights if `tile_at` unpacks them one by one."""
    if all(form is None or ((form.low, form.high, form.step, form.group) == (4, 0, 16, 32)) for form in mixture.forms):
        return {"BLOCK": 128 // x.element_size(), "num_warps": 4}
    return {"BLOCK": 32, "num_warps": 8}


def launch_many(x: Tensor, chosen: Tensor, mixture: MixtureOperands) -> Tensor:
    """Return the outputs [N, C, D] compute dtype; the arguments are those of `few_tokens.launch_few`."""
    (tokens, dim), choices = x.shape, chosen.shape[1]
    num_experts, features, places = mixture.num_experts, mixture.features, mixture.places
    groups = grouped(chosen, num_experts, places if mixture.waiting[0] is None else None)
    hidden = x.new_empty(tokens * choices, features)
    out = x.new_zeros(tokens, choices, dim)
    gate, up, down = mixture.weights
    gate_bias, up_bias, down_bias = mixture.biases
    gate_form, up_form, down_form = mixture.forms
    sizes = {"EXPERTS": triton.next_power_of_2(num_experts), "TOKENS": groups.tile, "ROWS": ROWS}
    how = {**sizes, **_shape(x, mixture), "num_stages": 3, "enable_fp_fusion": True}
    _grouped_gate_up[(groups.num_tiles, triton.cdiv(features, ROWS))](
        x, groups.order, groups.counts, places, gate, up, *mixture.waiting[:2], gate_bias, up_bias, hidden, num_experts,
        choices, dim, features, gate.stride(0), up.stride(0), *mixture.gating[1:], GATING=mixture.gating.kernel_name,
        GATE=gate_form, UP=up_form, **how,
    )  # fmt: skip
    _grouped_down[(groups.num_tiles, triton.cdiv(dim, ROWS))](
        hidden, groups.order, groups.counts, places, down, mixture.waiting[2], down_bias, out, num_experts, features,
        dim, down.stride(0), FORM=down_form, **how,
    )  # fmt: skip
    return out
