"""One new token's attention: queries prepared, key and value written, and split-KV decode, as one kernel.

Legend: B batch, H heads, K kv heads, E head dim, padded to W, N pages of a sequence, G positions of a page, S slots
of a sequence (N G), P splits, R rows of a tile (the H / K heads of one kv head, padded).

    program: reads starts and counts, and finds which split of which kv head it is (splits.py), or that it is none
    split: prepares its queries, walks its share of the visible keys; the last one of a sequence, whose share has the
    new position, writes that first, and no other split reads it
    the split of a kv head that arrives last adds up the results of all, in their order: the bits do not depend on
    which one that is

Results of a split: parts [B, K, P, H / K, E], weighted sums of values; states [B, K, P, H / K, 2], highest score (in
base 2) and sum of weights; float32. P: the most that a sequence may have.

The H / K heads of a kv head are rows of one tile, so that a key is read once. A split's share is a share of the live
length, in whole tiles: the cost follows the context.
Source: split-KV as in Flash-Decoding (Dao et al. 2023); the last arrival as in CUDA's threadFenceReduction sample.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphcore.kernels import limits
from graphcore.kernels.custom_ops import register_custom_op
from graphcore.kernels.gpu.attention.coded_heads import mix, pool_kind, strides_of
from graphcore.kernels.gpu.attention.new_token import (
    prepared_queries,
    reread_heads,
    store_heads,
    write_new,
)
from graphcore.kernels.gpu.attention.running_softmax import (
    LOG2_E,
    MERGED,
    divided,
    empty_splits,
    empty_state,
    merge_splits,
    precision_of,
    walk,
)
from graphcore.kernels.gpu.attention.splits import (
    ALONE_TILES,
    keys_of_tile,
    most_splits,
    of_row,
    processors_of,
    shares_of,
    split_count,
    visible_keys,
)
from graphcore.kernels.gpu.dependent_launch import let_next_begin, wait_for_earlier
from graphcore.kernels.gpu.pdl import pdl_options
from graphcore.kernels.ops.attention_parameters import AttentionParameters

MOST_CODED_WIDTH = 128  # wider heads in codes would not fit in registers with a whole tile
REGISTERS = 53248  # bound for all programs of a multiprocessor, out of 65536: without it ptxas spills some


@triton.jit
def _store_answers(out, answers, ROWS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
                   WIDTH: tl.constexpr, IS_MIXED: tl.constexpr):  # fmt: skip
    """Store the answers [ROWS, W], and undo the mixing of the values that they are sums of."""
    store_heads(out, answers, ROWS, GROUP, HEAD_DIM, WIDTH)
    if IS_MIXED:  # read again: to mix them where they are takes registers that the tiles of keys have
        x = reread_heads(out, HEADS, GROUP, HEAD_DIM, WIDTH)
        tl.debug_barrier()  # all threads have read before one writes
        store_heads(out, mix(x.to(tl.float32), HEADS, WIDTH, HEAD_DIM), HEADS, GROUP, HEAD_DIM, WIDTH)


@triton.jit
def _leave(part, state, best, total, sums, ROWS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
           WIDTH: tl.constexpr):  # fmt: skip
    """Write a split's row state for the last split to read."""
    row = tl.arange(0, ROWS)
    tl.store(state + row * 2, best, mask=row < GROUP)
    tl.store(state + row * 2 + 1, total, mask=row < GROUP)
    store_heads(part, sums, ROWS, GROUP, HEAD_DIM, WIDTH)


@triton.jit
def _attend_split(
    query, key, value, k_cache, v_cache, table, sinks, rope, q_weight, k_weight, out, parts, states, arrivals,
    q_batch, q_head, new_k_batch, new_k_head, new_v_batch, new_v_head, eps,
    k_page, k_head, k_place, v_page, v_head, v_place, table_row, window, scale, cap,
    split, kv_head, sequence, place, slots, first, visible, share, used, most,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr, MERGED_SPLITS: tl.constexpr,
    PRECISION: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr, ROTATED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Attend a share of the `visible` keys from position `first`; `place` is the kv head's number in the batch."""
    pages, k_rows, v_rows = table + sequence * table_row, k_cache + kv_head * k_head, v_cache + kv_head * v_head
    cosines = rope if rope is None else rope + sequence * ROTATED
    if key is not None:
        if (split == used - 1) & (visible > 0):
            slot = (first + visible - 1) % slots
            page = tl.load(pages + slot // PAGE).to(tl.int64)
            new_k = key + sequence * new_k_batch + kv_head * new_k_head
            new_v = value + sequence * new_v_batch + kv_head * new_v_head
            write_new(
                new_k, new_v, k_rows + page * k_page, v_rows + page * v_page, slot % PAGE, k_place, v_place,
                k_weight, cosines, eps, ROTATED, WIDE, HEAD_DIM, WIDTH, PAGE, K_KIND, V_KIND,
            )  # fmt: skip
    answer = out + place * GROUP * HEAD_DIM
    q = prepared_queries(
        query + sequence * q_batch + kv_head * GROUP * q_head, q_head, q_weight, cosines, eps, answer,
        GROUP, HEADS, ROWS, ROTATED, WIDE, K_KIND > 0, HEAD_DIM, WIDTH,
    )  # fmt: skip
    row = tl.arange(0, ROWS)
    is_head = row < GROUP
    best, total, sums = empty_state(ROWS, WIDTH)
    if sinks is not None:  # the first split counts the sink, as a key that it has seen and whose value is zero
        sink = tl.load(sinks + kv_head * GROUP + row, mask=is_head, other=0.0) * LOG2_E
        best = tl.where(split == 0, sink, best)
        total = tl.where(split == 0, 1.0, total)
    begin, end = split * share, tl.minimum(split * share + share, visible)
    best, total, sums = walk(
        q, k_rows, v_rows, pages, first % slots, begin, end, 0, best, total, sums, k_page, k_place, v_page, v_place,
        slots, window, scale, cap, WINDOWED, True, False, False, CAPPED, HEAD_DIM, WIDTH, TILE, PAGE, PRECISION,
        K_KIND, V_KIND,
    )  # fmt: skip
    if used == 1:
        _store_answers(answer, divided(sums, total), ROWS, HEADS, GROUP, HEAD_DIM, WIDTH, V_KIND > 0)
    elif arrivals is not None:
        left = place * most * GROUP
        _leave(parts + (left + split * GROUP) * HEAD_DIM, states + (left + split * GROUP) * 2, best, total, sums,
               ROWS, GROUP, HEAD_DIM, WIDTH)  # fmt: skip
        tl.debug_barrier()  # one thread counts the arrival after all have written
        arrived = tl.atomic_add(arrivals + place, 1, sem="acq_rel", scope="gpu")
        if arrived == used - 1:
            tl.store(arrivals + place, 0)
            all_total, all_sums = merge_splits(parts + left * HEAD_DIM, states + left * 2, used,
                                               GROUP, HEADS, HEAD_DIM, WIDTH, MERGED_SPLITS)  # fmt: skip
            all_answers = divided(all_sums, all_total)
            _store_answers(answer, all_answers, HEADS, HEADS, GROUP, HEAD_DIM, WIDTH, V_KIND > 0)


@triton.jit
def attend_splits(
    query, key, value, k_cache, v_cache, table, starts, counts, sinks, rope, q_weight, k_weight, out, parts, states,
    arrivals, q_batch, q_head, new_k_batch, new_k_head, new_v_batch, new_v_head, eps,
    k_page, k_head, k_place, v_page, v_head, v_place, table_row, num_pages, window, scale, cap,
    batch, kv_heads, few, most, beta, period,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SCALED: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr,
    MERGED_SPLITS: tl.constexpr, ALONE: tl.constexpr, ALL_ROWS: tl.constexpr, PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr, ROTATED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute `attend_token`: grid [programs]; every tensor has whole vectors, strides are in elements."""
    let_next_begin(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    slots = num_pages * PAGE
    firsts, visibles = visible_keys(starts, counts, batch, slots, window, WINDOWED, ALL_ROWS)
    shares = shares_of(visibles, few, most, TILE, ALONE)
    used_by = tl.maximum(tl.cdiv(visibles, shares), 1)  # a row without a token: one split writes its zeros
    used_by = tl.where(tl.arange(0, ALL_ROWS) < batch, used_by, 0)
    ends, program = tl.cumsum(used_by, 0) * kv_heads, tl.program_id(0)
    if program >= tl.max(ends, 0):
        return
    row = tl.sum((ends <= program).to(tl.int32), 0)
    first, visible = of_row(firsts, row, ALL_ROWS), of_row(visibles, row, ALL_ROWS)
    share, used = of_row(shares, row, ALL_ROWS), of_row(used_by, row, ALL_ROWS)
    at = program - tl.max(tl.where(ends <= program, ends, 0), 0)
    kv_head = at // used
    if SCALED:  # a factor of the query is one of its scores
        periods = 1 + (first + visible - 1) // period
        scale = scale * (1.0 + beta * tl.log(periods.to(tl.float32)))
    _attend_split(
        query, key, value, k_cache, v_cache, table, sinks, rope, q_weight, k_weight, out, parts, states, arrivals,
        q_batch, q_head, new_k_batch, new_k_head, new_v_batch, new_v_head, eps,
        k_page, k_head, k_place, v_page, v_head, v_place, table_row, window, scale, cap,
        at % used, kv_head.to(tl.int64), row.to(tl.int64), row * kv_heads + kv_head, slots, first, visible,
        share, used, most, WINDOWED, CAPPED, GROUP, HEADS, ROWS, HEAD_DIM, WIDTH, TILE, PAGE, MERGED_SPLITS,
        PRECISION, K_KIND, V_KIND, ROTATED, WIDE,
    )  # fmt: skip


def warps_and_stages(dtype: torch.dtype, width: int, rows: int, is_coded: bool) -> tuple[int, int]:
    """Return a program's warps and pipeline stages.

    Of tiles of 16 rows and 128 features, two warps are the fastest at all lengths (docs/lab/gpu_attention.md); wider
    and narrower tiles, and codes, would spill registers with them. Triton gives every load that waits for another, as
    keys wait for their page, half of the stages.

    Args:
        width: features of a head, padded.
        rows: heads of a kv head, padded.
        is_coded: True if keys or values are kept in another format than the compute dtype's.
    """
    if dtype == torch.float32:
        return 8, 2  # it would spill with more
    return (2 if (width, rows) == (128, 16) and not is_coded else 4), 5


def table_sizes(table: Tensor) -> tuple[int, int]:
    """Return a table's row stride and row length, in entries."""
    return table.stride(0), table.shape[1]


class HeadNorms(NamedTuple):
    """RMSNorms of each head of the queries and the keys, before they are rotated.

    Attributes:
        q_weight, k_weight: [E] float32; None for no norm.
        eps, scale_in_float32: settings of both, as in gpu/norm.py.
    """

    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    eps: float = 0.0
    scale_in_float32: bool = True


NO_NORMS = HeadNorms()


def launch_attend_token(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    starts: Tensor,
    counts: Tensor,
    scoring: AttentionParameters,
    arrivals: Tensor | None = None,
    rope: Tensor | None = None,
    norms: HeadNorms = NO_NORMS,
    beta: float = 0.0,
    period: int = 0,
    *,
    tile: int = 0,
    alone: int = ALONE_TILES,
) -> Tensor:
    """Write one new token's key and value into each sequence's cache, and attend to them and all earlier keys.

    Args:
        query: [B, 1, H, E] compute dtype; the last stride is 1, as of key and value.
        key, value: [B, 1, K, E] compute dtype, or None if the cache holds them already.
        k_cache, v_cache: pools as in `attend`; position start is written if count is not 0.
        table: [B, N] int32, pages of each sequence, as in `attend`.
        starts: [B] int64, the token's position.
        counts: [B] int64, 1, or 0 for a row without a token, whose output is zeros.
        scoring: settings, as in `attend`.
        arrivals: [B * K or more] int32, counters that are zero before and after; all layers of a stream may share
            them. None to allocate them in each call, which launches one more fill.
        rope: [B, 1, 2, A/2] float32, contiguous, as in nn/rope.py's `rotate`, for queries and keys; or None. A is the
            number of features of a head that rotate.
        norms: norms of queries and keys.
        beta, period: arguments of nn/rope.py's `scale_queries`; a period of 0 for queries that have no such factor.
        tile: keys of a tile, 0 for the size that suits the head dim.
        alone: largest number of tiles that a single split computes, so that nothing has to be merged.

    Returns:
        [B, 1, H, E] compute dtype, contiguous.
    """
    window, scale, sinks, _, cap, _ = scoring
    batch, _, heads, head_dim = query.shape
    kv_heads, page = k_cache.shape[1:3]
    new = [query if one is None else one for one in (key, value)]
    _check_operands([query, *new, k_cache, v_cache], table, rope)
    group, width = heads // kv_heads, max(16, triton.next_power_of_2(head_dim))
    kinds = pool_kind(k_cache), pool_kind(v_cache)
    tile, slots = tile or decode_tile(width, query.dtype, max(kinds)), table.shape[1] * page
    sizes = (batch, kv_heads, min(slots, window or slots), tile, processors_of(query.device))
    few, most = split_count(*sizes), most_splits(*sizes)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    parts = states = None
    if most > 1:
        parts, states = empty_splits((batch, kv_heads, most, group), head_dim, query.device)
        if arrivals is None:
            arrivals = torch.zeros(batch * kv_heads, dtype=torch.int32, device=query.device)
        assert arrivals.numel() >= batch * kv_heads, f"{arrivals.numel()} arrivals for {batch} x {kv_heads} kv heads"
    heads_width = triton.next_power_of_2(group)
    rows = max(16, heads_width)
    warps, stages = warps_and_stages(query.dtype, width, rows, max(kinds) > 0)
    attend_splits[(batch * kv_heads * most,)](
        query, key, value, k_cache, v_cache, table, starts, counts, sinks, rope, norms.q_weight, norms.k_weight, out,
        parts, states, arrivals if most > 1 else None, query.stride(0), query.stride(2),
        *(one.stride(axis) for one in new for axis in (0, 2)), norms.eps,
        *strides_of(k_cache), *strides_of(v_cache), *table_sizes(table), window, scale, cap,
        batch, kv_heads, few, most, beta, period, WINDOWED=window > 0, CAPPED=cap != 0, SCALED=period > 0,
        GROUP=group, HEADS=heads_width, ROWS=rows, ALL_ROWS=triton.next_power_of_2(batch), HEAD_DIM=head_dim,
        WIDTH=width, TILE=tile, PAGE=page, MERGED_SPLITS=max(1, MERGED // (heads_width * width)),
        ALONE=alone, PRECISION=precision_of(query.dtype), num_warps=warps, num_stages=stages, enable_fp_fusion=True,
        maxnreg=REGISTERS // (limits.SPLIT_PROGRAMS * 32 * warps), K_KIND=kinds[0], V_KIND=kinds[1],
        ROTATED=0 if rope is None else 2 * rope.shape[-1], WIDE=norms.scale_in_float32, **pdl_options(),
    )  # fmt: skip
    return out


def _check_operands(vectors: Sequence[Tensor], table: Tensor, rope: Tensor | None) -> None:
    """Check what the kernel takes for granted. Args: vectors: queries, keys and values, those of the query first."""
    tokens, head_dim = vectors[0].shape[1], vectors[0].shape[-1]
    assert tokens == 1, f"{tokens} tokens of a sequence, this kernel takes one"
    assert table.stride(1) == 1, "a sequence's pages are one run"
    assert rope is None or rope.is_contiguous(), "the kernel finds a token's angles by shape alone"
    assert head_dim % 2 == 0 or rope is None, f"heads of {head_dim} have no halves"
    for one in vectors:
        assert one.stride(-1) == 1, "vectors lie in one run"


def decode_tile(width: int, dtype: torch.dtype, kind: int) -> int:
    """Return the number of keys of a tile.

    Args:
        width: features of a head, padded.
        kind: larger `pool_kind` of keys and values.
    """
    is_wide = width > MOST_CODED_WIDTH and kind > 1
    return max(16, keys_of_tile(width, dtype) // (2 if is_wide else 1))


attend_token = register_custom_op(
    "attend_token",
    launch_attend_token,
    lambda query: torch.empty_like(query, memory_format=torch.contiguous_format),
    mutates_args=["k_cache", "v_cache", "arrivals"],
)
