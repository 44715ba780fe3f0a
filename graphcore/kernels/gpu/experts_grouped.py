"""Many tokens through their experts: each expert's tokens together, in tiles, as one grouped matrix product.

Legend: N tokens, D model dim, X experts, F hidden features of an expert, C choices, P = N C pairs, S places.

    pairs in the order of their experts    0 0 0 0 0 | 2 2 | 3 3 3 ...       sorted on the device, nobody's last
    tiles of at most four of them          [0 0 0 0] [0] [2 2] [3 3 3] ...   an expert begins a tile of its own

No length is read back: the grid holds as many tiles as there could be, and those that are too many leave at once. A
tile's matrix rows are the first operand of the products, so that few tokens still fill a tensor core's instruction.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphcore.kernels.gpu.experts_form import MixtureOperands, activated, place_of
from graphcore.kernels.gpu.experts_tile import tile_at
from graphcore.kernels.gpu.unpacking import tensor_scale

ROWS = 64  # of a matrix that one program multiplies
LEAST_TILE, MOST_TILE = 16, 64  # pairs


@dataclass(frozen=True)
class Groups:
    """Pairs by expert.

    Attributes:
        order: [P] int64, pairs (token C + choice) in the order of their experts; nobody's last.
        counts: [X] int32, pairs of each expert that is there.
        tile: pairs of a tile.
        num_tiles: that there could be.
    """

    order: Tensor
    counts: Tensor
    tile: int
    num_tiles: int


def grouped(chosen: Tensor, num_experts: int, places: Tensor | None) -> Groups:
    """Return the pairs of `chosen` [N, C] by expert, nothing read back; `places` as in experts_decode.py."""
    flat = chosen.flatten()
    if places is not None:
        is_there = (flat >= 0) & (places[flat.clamp(min=0)] >= 0)
        flat = torch.where(is_there, flat, -1)
    flat = torch.where(flat < 0, num_experts, flat)
    counts = (flat[None] == torch.arange(num_experts, device=flat.device)[:, None]).sum(1, dtype=torch.int32)
    tile = triton.next_power_of_2(max(len(flat) // num_experts, 1))
    tile = min(max(tile, LEAST_TILE), MOST_TILE)
    return Groups(flat.argsort(stable=True), counts, tile, triton.cdiv(len(flat), tile) + num_experts)


@triton.jit
def _find_tile(counts, num_experts, EXPERTS: tl.constexpr, TOKENS: tl.constexpr):
    """Return this program's expert, and where its pairs begin and end; a tile that is not needed has none."""
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
        matrix: pointer to the expert's.  rows: [ROWS].
        fed: [TOKENS] pointers to vectors [I].
        L: the DeviceLayout of what is packed; None is dense.
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
    x, order, counts, places, gate, up, gate_bias, up_bias, hidden, num_experts, choices, columns, features,
    gate_stride, up_stride, limit, alpha, GATE: tl.constexpr, UP: tl.constexpr, EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
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
    gate += place * gate_stride
    up += place * up_stride
    gates = _rows_times(gate, rows, is_row, fed, is_pair, features, columns, GATE, BLOCK, ROWS, TOKENS)
    ups = _rows_times(up, rows, is_row, fed, is_pair, features, columns, UP, BLOCK, ROWS, TOKENS)
    gates += tl.load(gate_bias + expert * features + rows, mask=is_row, other=0.0).to(tl.float32)[:, None]
    ups += tl.load(up_bias + expert * features + rows, mask=is_row, other=0.0).to(tl.float32)[:, None]
    values = activated(gates, ups, limit, alpha).to(hidden.dtype.element_ty)
    to = hidden + at.to(tl.int64)[None, :] * features + rows[:, None]
    tl.store(to, values, mask=is_row[:, None] & is_pair[None, :])


@triton.jit
def _grouped_down(
    hidden, order, counts, places, down, bias, out, num_experts, columns, features, stride,
    FORM: tl.constexpr, EXPERTS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert, begin, end = _find_tile(counts, num_experts, EXPERTS, TOKENS)
    if begin >= end:
        return
    at = begin + tl.arange(0, TOKENS)
    is_pair = at < end
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_row = rows < features
    matrix = down + place_of(expert, places) * stride
    fed = hidden + at.to(tl.int64) * columns
    answers = _rows_times(matrix, rows, is_row, fed, is_pair, features, columns, FORM, BLOCK, ROWS, TOKENS)
    answers += tl.load(bias + expert * features + rows, mask=is_row, other=0.0).to(tl.float32)[:, None]
    pair = tl.load(order + at, mask=is_pair, other=0)
    to = out + pair[None, :] * features + rows[:, None]
    tl.store(to, answers.to(out.dtype.element_ty), mask=is_row[:, None] & is_pair[None, :])


def _shape(x: Tensor, mixture: MixtureOperands) -> dict[str, int]:
    """Return columns of a tile and warps: a thread has fewer weights where they are unpacked one by one."""
    if all(form is None or (form.low == 4 and form.high == 0 and form.step == 16) for form in mixture.forms):
        return {"BLOCK": 128 // x.element_size(), "num_warps": 4}
    return {"BLOCK": 32, "num_warps": 8}


def launch_many(x: Tensor, chosen: Tensor, mixture: MixtureOperands) -> Tensor:
    """Return the answers [N, C, D] compute dtype; arguments as of `experts_decode.launch_few`."""
    (tokens, dim), choices = x.shape, chosen.shape[1]
    num_experts, features, places = mixture.num_experts, mixture.features, mixture.places
    groups = grouped(chosen, num_experts, places)
    hidden = x.new_empty(tokens * choices, features)
    out = x.new_zeros(tokens, choices, dim)
    gate, up, down = mixture.weights
    gate_bias, up_bias, down_bias = mixture.biases
    gate_form, up_form, down_form = mixture.forms
    sizes = {"EXPERTS": triton.next_power_of_2(num_experts), "TOKENS": groups.tile, "ROWS": ROWS}
    how = {**sizes, **_shape(x, mixture), "num_stages": 3, "enable_fp_fusion": True}
    _grouped_gate_up[(groups.num_tiles, triton.cdiv(features, ROWS))](
        x, groups.order, groups.counts, places, gate, up, gate_bias, up_bias, hidden, num_experts, choices, dim,
        features, gate.stride(0), up.stride(0), mixture.limit, mixture.alpha, GATE=gate_form, UP=up_form, **how,
    )  # fmt: skip
    _grouped_down[(groups.num_tiles, triton.cdiv(dim, ROWS))](
        hidden, groups.order, groups.counts, places, down, down_bias, out, num_experts, features, dim,
        down.stride(0), FORM=down_form, **how,
    )  # fmt: skip
    return out
