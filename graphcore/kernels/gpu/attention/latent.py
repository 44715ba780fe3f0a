"""Latent attention: new rows written into their pages, then queries against whole rows, split over the keys.

Legend: B batch, T tokens, H heads, R rotated features, padded to A, C latent features, padded to W, E = R + C,
N pages of a sequence, G positions of a page, Q rows of a program, M tiles of Q rows, P splits.

    a row         [R | C]: a rotated key and latent features; all heads attend the same rows, and the last C features
                  are the value, so that a tile of rows is read once for scores and for sums
    write         a chunk's rows are written first. No row is ever overwritten, because these layers have no window
    program       Q of the T H (token, head) pairs of a sequence, and one split of the keys that they see
    parts         [B, M Q, P, C] weighted sums, states [B, M Q, P, 2] highest score (in base 2) and sum of weights

The number of splits follows from the lengths of the call and the capacity of the table, and a split's keys from the
sequence's own length; a second kernel adds the splits up in their order. Quantised rows are attended in plain torch
(kernels/ops/attend.py).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphcore.kernels import limits
from graphcore.kernels.custom_ops import register_custom_op
from graphcore.kernels.gpu.attention.coded_heads import rounded_product
from graphcore.kernels.gpu.attention.decode import table_sizes
from graphcore.kernels.gpu.attention.running_softmax import (
    LOG2_E,
    divided,
    empty_splits,
    empty_state,
    precision_of,
    take_in,
)
from graphcore.kernels.gpu.attention.splits import processors_of
from graphcore.kernels.gpu.attention.write_cache import launch_write_cache
from graphcore.kernels.gpu.dependent_launch import let_next_begin, wait_for_earlier
from graphcore.kernels.gpu.pdl import pdl_options

KEYS, WIDE_KEYS = 32, 16  # keys of a tile: 32 rows of 576 in 16 bits take 36 KB of shared memory; 16 in 32 bits
LEAST_TILES = 4  # tiles of keys of a split: to write and add up a split takes about as long as to walk one
DECODE_ROWS, CHUNK_ROWS = 16, 32  # rows of a program; in 32 bits, 16 rows of sums are as many as registers hold


@triton.jit
def _tile_of(rows, at, first, is_there, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """Return features first .. first + COUNT - 1 of the rows that begin at offsets `at`, [N, WIDTH]; else zeros."""
    column = tl.arange(0, WIDTH)
    seen = is_there[:, None] & (column < COUNT)[None, :]
    return tl.load(rows + at[:, None] + (first + column)[None, :], mask=seen, other=0.0)


@triton.jit
def _attend_rows(
    query, pool, table, starts, counts, out, parts, states, q_batch, q_token, q_head, page_stride, place_stride,
    table_row, tokens, heads, scale,
    SPLITS: tl.constexpr, R: tl.constexpr, A: tl.constexpr, C: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, PAGE: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute one split of one tile of rows: grid [tiles, splits, sequences]."""
    let_next_begin(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    split, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = row // heads, row % heads
    start, count = tl.load(starts + sequence).to(tl.int32), tl.load(counts + sequence).to(tl.int32)
    is_real = (row < tokens * heads) & (token < count)
    position = tl.where(is_real, start + token, -1)  # the last one that a row sees
    tiles = tl.cdiv(start + count, TILE)
    share = tl.cdiv(tiles, SPLITS) * TILE
    begin, end = split * share, tl.minimum(split * share + share, tl.max(position, 0) + 1)
    at = sequence * q_batch + token * q_token + head * q_head
    q_turned = _tile_of(query, at, 0, is_real, R, A)
    q_latent = _tile_of(query, at, R, is_real, C, W)
    best, total, sums = empty_state(ROWS, W)
    for first in range(begin, end, TILE):
        key = first + tl.arange(0, TILE)
        is_there = key < end
        page = tl.load(table + sequence * table_row + key // PAGE, mask=is_there, other=0).to(tl.int64)
        place = page * page_stride + (key % PAGE) * place_stride
        turned = _tile_of(pool, place, 0, is_there, R, A).to(q_latent.dtype)
        latent = _tile_of(pool, place, R, is_there, C, W).to(q_latent.dtype)
        scores = tl.dot(q_latent, tl.trans(latent), input_precision=PRECISION)
        scores = tl.dot(q_turned, tl.trans(turned), acc=scores, input_precision=PRECISION) * (scale * LOG2_E)
        scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
        best, total, sums = take_in(scores, latent, best, total, sums, PRECISION)
    column = tl.arange(0, W)
    is_kept = (row < tokens * heads)[:, None] & (column < C)[None, :]
    place = sequence * tokens * heads + row
    if SPLITS == 1:
        to = out + place[:, None] * C + column[None, :]
        tl.store(to, divided(sums, total).to(out.dtype.element_ty), mask=is_kept)
    else:
        place = place * SPLITS + split
        tl.store(parts + place[:, None] * C + column[None, :], sums, mask=is_kept)
        tl.store(states + place * 2, best, mask=row < tokens * heads)
        tl.store(states + place * 2 + 1, total, mask=row < tokens * heads)


@triton.jit
def _add_splits(
    parts, states, out, SPLITS: tl.constexpr, C: tl.constexpr, W: tl.constexpr, DEPENDENT: tl.constexpr
):  # fmt: skip
    """Add up the splits of one row, in their order: grid [rows]."""
    let_next_begin(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, W)
    best = tl.full([1], float("-inf"), tl.float32)
    total, sums = tl.zeros([1], tl.float32), tl.zeros([W], tl.float32)
    for split in range(SPLITS):
        place = row * SPLITS + split
        highest = tl.maximum(best, tl.load(states + place * 2))
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        kept, weight = tl.exp2(best - shift), tl.exp2(tl.load(states + place * 2) - shift)
        part = tl.load(parts + place * C + column, mask=column < C, other=0.0)
        total = total * kept + tl.load(states + place * 2 + 1) * weight
        sums = sums * kept + part * weight
        best = highest
    answer = sums / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * C + column, answer.to(out.dtype.element_ty), mask=column < C)


def launch_attend_latent(
    query: Tensor, pool: Tensor, table: Tensor, starts: Tensor, counts: Tensor, values_from: int, scale: float
) -> Tensor:
    """Attend rows that are in their pages: [B, T, H, R + C] to [B, T, H, C], for dense pools.

    Args:
        query: queries with R rotated features first; the last stride is 1.
        pool: [P, 1, G, R + C] dense, rows of all positions up to this pass's.
        table, starts, counts: arguments as for `attend`; outputs of padding are zeros.
        values_from: R.
    """
    batch, tokens, heads, width = query.shape
    assert query.stride(3) == pool.stride(3) == table.stride(1) == 1, "rows and a sequence's pages are runs"
    is_wide = query.dtype == torch.float32
    rows, keys = (DECODE_ROWS if tokens == 1 or is_wide else CHUNK_ROWS), (WIDE_KEYS if is_wide else KEYS)
    tiles, latent = triton.cdiv(tokens * heads, rows), width - values_from
    most = triton.cdiv(table.shape[1] * pool.shape[2], keys * LEAST_TILES)
    splits = max(1, min(most, limits.SPLIT_PROGRAMS * processors_of(query.device) // (batch * tiles)))
    out = query.new_empty(batch, tokens, heads, latent)
    parts, states = out, out
    if splits > 1:
        parts, states = empty_splits((batch, tokens * heads, splits), latent, query.device)
    sizes = {"C": latent, "W": max(16, triton.next_power_of_2(latent)), "SPLITS": splits}
    _attend_rows[(tiles, splits, batch)](
        query, pool, table, starts, counts, out, parts, states, *query.stride()[:3], pool.stride(0), pool.stride(2),
        table_sizes(table)[0], tokens, heads, scale, **sizes, R=values_from,
        A=max(16, triton.next_power_of_2(values_from)), ROWS=rows, TILE=keys, PAGE=pool.shape[2],
        PRECISION=precision_of(query.dtype), num_warps=4 if rows == DECODE_ROWS else 8,
        num_stages=1 if is_wide else 2, enable_fp_fusion=True, **pdl_options(),
    )  # fmt: skip
    if splits > 1:
        _add_splits[(batch * tokens * heads,)](
            parts, states, out, **sizes, num_warps=4, enable_fp_fusion=True, **pdl_options()
        )
    return out


def launch_attend_chunk_latent(
    query: Tensor,
    row: Tensor,
    pool: Tensor,
    table: Tensor,
    starts: Tensor,
    counts: Tensor,
    values_from: int,
    scale: float,
) -> Tensor:
    """Write a pass's rows [B, T, 1, R + C] into a dense pool, then attend; arguments as for `launch_attend_latent`."""
    launch_write_cache(row, row, pool, pool, table, starts, counts)
    return launch_attend_latent(query, pool, table, starts, counts, values_from, scale)


@triton.jit
def _prepare_token(
    query, key, value, rope, pool, table, starts, counts, page_stride, place_stride, table_row, num_pages,
    HEADS: tl.constexpr, R: tl.constexpr, A: tl.constexpr, C: tl.constexpr, W: tl.constexpr, PAGE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Rotate one head of a token's query in place, or write the token's row: grid [heads + 1, sequences]."""
    let_next_begin(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column, half = tl.arange(0, A), R // 2
    source = query + (sequence * HEADS + head) * (R + C)
    if head == HEADS:
        source = key + sequence * R
    partner = tl.where(column < half, column + half, column - half)
    x = tl.load(source + column, mask=column < R, other=0.0)
    y = tl.load(source + partner, mask=column < R, other=0.0)
    cos = tl.load(rope + sequence * R + column % half, mask=column < R, other=0.0)
    sin = tl.load(rope + sequence * R + half + column % half, mask=column < R, other=0.0)
    sin = tl.where(column < half, -sin, sin)
    turned = rounded_product(x.to(tl.float32), cos) + rounded_product(y.to(tl.float32), sin)
    turned = turned.to(x.dtype)
    tl.debug_barrier()  # all threads have read before one writes
    if head < HEADS:
        tl.store(source + column, turned, mask=column < R)
    elif tl.load(counts + sequence) > 0:
        position = tl.load(starts + sequence)
        page = tl.load(table + sequence * table_row + position // PAGE % num_pages).to(tl.int64)
        to = pool + page * page_stride + (position % PAGE) * place_stride
        tl.store(to + column, turned.to(pool.dtype.element_ty), mask=column < R)
        features = tl.arange(0, W)
        latent = tl.load(value + sequence * C + features, mask=features < C, other=0.0)
        tl.store(to + R + features, latent.to(pool.dtype.element_ty), mask=features < C)


def launch_latent_token(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pool: Tensor,
    table: Tensor,
    starts: Tensor,
    counts: Tensor,
    rope: Tensor,
    scale: float,
) -> Tensor:
    """Rotate a token's queries and key, write its row, and attend: returns [B, H, C].

    Args:
        query: [B, H, R + C] contiguous; its first R features are rotated in place.
        key, value: [B, R] and [B, C] contiguous, before the rotation and after the norm.
        pool, table, starts, counts: arguments as for `attend`, one token of each sequence.
        rope: [B, 1, 2, R/2] float32, contiguous.
    """
    (batch, heads, width), rotated = query.shape, key.shape[-1]
    for one in (query, key, value, rope):
        assert one.is_contiguous(), "the kernel finds rows by shape alone"
    _prepare_token[(heads + 1, batch)](
        query, key, value, rope, pool, table, starts, counts, pool.stride(0), pool.stride(2), *table_sizes(table),
        HEADS=heads, R=rotated, A=triton.next_power_of_2(rotated), C=width - rotated,
        W=triton.next_power_of_2(width - rotated), PAGE=pool.shape[2], num_warps=2, enable_fp_fusion=False,
        **pdl_options(),
    )  # fmt: skip
    return launch_attend_latent(query[:, None], pool, table, starts, counts, rotated, scale)[:, 0]


@triton.jit
def _project_heads(
    x, weight, prefix, out, tokens, outputs, PREFIX: tl.constexpr, INPUTS: tl.constexpr, I_WIDTH: tl.constexpr,
    ROWS: tl.constexpr, HEADS: tl.constexpr, P_WIDTH: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute some output features of one head for all tokens, and copy its prefix: grid [row tiles, heads]."""
    let_next_begin(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    head = tl.program_id(1)
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, I_WIDTH)
    at = (head * outputs + row)[:, None].to(tl.int64) * INPUTS + column[None, :]
    is_there = (row < outputs)[:, None] & (column < INPUTS)[None, :]
    matrix = tl.load(weight + at, mask=is_there, other=0.0).to(tl.float32)
    width = PREFIX + outputs
    for token in range(tokens):
        place = token * HEADS + head
        values = tl.load(x + place * INPUTS + column, mask=column < INPUTS, other=0.0).to(tl.float32)
        sums = tl.sum(matrix * values[None, :], 1)
        tl.store(out + place * width + PREFIX + row, sums.to(out.dtype.element_ty), mask=row < outputs)
        if PREFIX > 0:
            if tl.program_id(0) == 0:
                feature = tl.arange(0, P_WIDTH)
                copied = tl.load(prefix + place * PREFIX + feature, mask=feature < PREFIX, other=0.0)
                tl.store(out + place * width + feature, copied, mask=feature < PREFIX)


def launch_project_heads(x: Tensor, weight: Tensor, prefix: Tensor | None) -> Tensor:
    """Multiply each head with a dense matrix of its own: [B, H * I] to [B, H * (prefix features + O)].

    Args:
        x: [B, H * I] contiguous, B up to 8; a token's results do not depend on the others.
        weight: [H, O, I].
        prefix: [B, H * F] contiguous, features that precede each head's products; None for none.
    """
    (heads, outputs, inputs), tokens = weight.shape, len(x)
    before = 0 if prefix is None else prefix.shape[-1] // heads
    assert x.is_contiguous() and (prefix is None or prefix.is_contiguous()), "rows are found by shape alone"  # noqa: PT018
    out = x.new_empty(tokens, heads * (before + outputs))
    width = triton.next_power_of_2(inputs)
    rows = max(1, min(16, 8192 // width))
    _project_heads[(triton.cdiv(outputs, rows), heads)](
        x, weight, prefix, out, tokens, outputs, PREFIX=before, INPUTS=inputs, I_WIDTH=width, ROWS=rows, HEADS=heads,
        P_WIDTH=triton.next_power_of_2(max(1, before)), num_warps=4, enable_fp_fusion=True, **pdl_options(),
    )  # fmt: skip
    return out


attend_latent_token = register_custom_op(
    "attend_latent_token",
    launch_latent_token,
    lambda query, key: query.new_empty((*query.shape[:2], query.shape[2] - key.shape[1])),
    mutates_args=["query", "pool"],
)
project_heads = register_custom_op(
    "gpu_project_heads",
    launch_project_heads,
    lambda x, weight, prefix: x.new_empty(
        len(x), weight.shape[0] * weight.shape[1] + (0 if prefix is None else prefix.shape[1])
    ),
)
