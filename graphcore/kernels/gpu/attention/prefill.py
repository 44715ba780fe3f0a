"""A chunk's attention over the cached past and over itself: flash attention with two sources, split over the keys.

Legend: B batch, T tokens, H heads, K kv heads, Q = H / K, E head dim, N pages of a sequence, G positions of a page,
R rows of a program, M tiles of R rows, P splits.

    rows of a program    R of the T Q (token, head) pairs of one kv head, in order, tokens before heads
    keys that it reads   past:  first visible .. start, in the sequence's pages; the chunk is written afterwards
                         chunk: first visible .. last token of the rows, from the projections

A key is read once for R / Q tokens and all their heads; with a window that is window + R / Q keys. Keys that no row
sees are never read. The last rows see the most keys, so they start first.

Where rows alone do not fill the device, the keys of a tile of rows, past and then chunk, are shared by splits:

    parts  [B, K, M, P, R, E]  weighted sums of values, float32
    states [B, K, M, P, R, 2]  highest score (in base 2) and sum of weights, float32

A second kernel adds them up in their order. A split's share is a share of the tile's own keys, at least LEAST_TILES
tiles, so a sequence's output depends only on its own lengths and on the number of tokens of the call. If a tile of rows
has one split, that split writes the output.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphcore.kernels import limits
from graphcore.kernels.gpu.attention.coded_heads import launch_mix_heads, pool_kind, strides_of
from graphcore.kernels.gpu.attention.decode import MOST_CODED_WIDTH, table_sizes
from graphcore.kernels.gpu.attention.running_softmax import (
    LOG2_E,
    MERGED,
    divided,
    empty_splits,
    empty_state,
    load_rows,
    merge_splits,
    precision_of,
    walk,
)
from graphcore.kernels.gpu.attention.splits import processors_of
from graphcore.kernels.ops.attention_parameters import AttentionParameters

LEAST_TILES = 4  # tiles of keys of a split: to write and add up a split takes about as long as to walk one
RESIDENT_WARPS = 8  # of a multiprocessor: two programs of four warps, or one of eight
ADDED = 4  # rows that one program adds up


@triton.jit
def _keys_of_rows(starts, counts, sequence, rows_at, window, WINDOWED: tl.constexpr, GROUP: tl.constexpr,
                  ROWS: tl.constexpr):  # fmt: skip
    """Return the first past key and their number, and the begin and end of the chunk's keys, that rows see.

    The rows are ROWS from `rows_at` on; if none is a token, they see none.
    """
    start, count = tl.load(starts + sequence).to(tl.int32), tl.load(counts + sequence).to(tl.int32)
    first_token = rows_at // GROUP
    is_padding = first_token >= count
    first, begin = 0, 0
    if WINDOWED:
        first = tl.minimum(tl.maximum(start + first_token - window + 1, 0), start)
        begin = tl.maximum(first_token - window + 1, 0)
    end = tl.minimum((rows_at + ROWS - 1) // GROUP + 1, count)
    return first, tl.where(is_padding, 0, start - first), begin, tl.where(is_padding, begin, end)


@triton.jit
def _share(past, chunk, splits, TILE: tl.constexpr, LEAST: tl.constexpr):
    """Return the number of tiles of a split, and how many splits have any."""
    tiles = tl.cdiv(past, TILE) + tl.cdiv(chunk, TILE)
    share = tl.maximum(tl.cdiv(tiles, splits), LEAST)
    return share, tl.maximum(tl.cdiv(tiles, share), 1)  # rows without a key: one split writes their zeros


@triton.jit
def _keys_of_split(split, share, past, begin, end, TILE: tl.constexpr):
    """Return the begin and end of a split's past keys, and of its keys of the chunk's begin .. end."""
    at = split * share
    new = at - tl.cdiv(past, TILE)  # tile of the chunk; below 0 in the past
    new_end = tl.minimum(begin + tl.maximum(new + share, 0) * TILE, end)
    return at * TILE, tl.minimum((at + share) * TILE, past), begin + tl.maximum(new, 0) * TILE, new_end


@triton.jit
def _store_rows(out, sequence, kv_head, row, sums, tokens, GROUP: tl.constexpr, KV_HEADS: tl.constexpr,
                HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Write answers [R, E] to the (token, head) rows `row`."""
    column, token = tl.arange(0, WIDTH), row // GROUP
    answer = ((sequence * tokens + token) * KV_HEADS * GROUP + kv_head * GROUP + row % GROUP) * HEAD_DIM
    is_answer = (token < tokens)[:, None] & (column < HEAD_DIM)[None, :]
    tl.store(out + answer[:, None] + column[None, :], sums.to(out.dtype.element_ty), mask=is_answer)


@triton.jit
def _attend_chunk(
    query, key, value, k_cache, v_cache, table, starts, counts, sinks, out, parts, states, tokens,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    k_page, old_k_head, k_place, v_page, old_v_head, v_place, table_row, num_pages, window, scale, cap,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, LEAST: tl.constexpr, PAGE: tl.constexpr,
    PRECISION: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr,
):  # fmt: skip
    """Attend before the cache is written: grid [K P, M, B]; strides are in elements."""
    kv_head, split = (tl.program_id(0) % KV_HEADS).to(tl.int64), tl.program_id(0) // KV_HEADS
    part, sequence = tl.num_programs(1) - 1 - tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = part * ROWS + tl.arange(0, ROWS)
    token, head = row // GROUP, kv_head * GROUP + row % GROUP
    first, past, new_begin, new_end = _keys_of_rows(starts, counts, sequence, part * ROWS, window, WINDOWED, GROUP,
                                                    ROWS)  # fmt: skip
    begin, end, since, used, splits = 0, past, past + token, 1, tl.num_programs(0) // KV_HEADS
    if parts is not None:
        share, used = _share(past, new_end - new_begin, splits, TILE, LEAST)
        if split >= used:
            return
        begin, end, new_begin, new_end = _keys_of_split(split, share, past, new_begin, new_end, TILE)
    best, total, sums = empty_state(ROWS, WIDTH)
    if sinks is not None:  # the first split counts the sink: a key that every row sees and whose value is zero
        best = tl.where(split == 0, tl.load(sinks + head) * LOG2_E, best)
        total = tl.where(split == 0, 1.0, total)
    is_token = token < tl.load(counts + sequence)
    q = load_rows(query + sequence * q_batch, token * q_token + head * q_head, 1, is_token, HEAD_DIM, WIDTH)
    old_keys, old_values = k_cache + kv_head * old_k_head, v_cache + kv_head * old_v_head
    pages, slots = table + sequence * table_row, num_pages * PAGE
    keys, values = key + sequence * k_batch + kv_head * k_head, value + sequence * v_batch + kv_head * v_head
    rest = begin
    if not WINDOWED:  # whole tiles of the past, visible to all rows
        rest = begin + tl.maximum(end - begin, 0) // TILE * TILE
        best, total, sums = walk(
            q, old_keys, old_values, pages, 0, begin, rest, since, best, total, sums, k_page, k_place, v_page, v_place,
            slots, window, scale, cap, False, False, False, False, CAPPED, HEAD_DIM, WIDTH, TILE, PAGE, PRECISION,
            K_KIND, V_KIND,
        )  # fmt: skip
    best, total, sums = walk(
        q, old_keys, old_values, pages, first % slots, rest, end, since, best, total, sums,
        k_page, k_place, v_page, v_place,
        slots, window, scale, cap, WINDOWED, True, WINDOWED, WINDOWED, CAPPED, HEAD_DIM, WIDTH, TILE, PAGE, PRECISION,
        K_KIND, V_KIND,
    )  # fmt: skip
    best, total, sums = walk(
        q, keys, values, None, 0, new_begin, new_end, token, best, total, sums, 0, k_token, 0, v_token,
        slots, window, scale, cap, False, True, True, WINDOWED, CAPPED, HEAD_DIM, WIDTH, TILE, PAGE, PRECISION,
    )  # fmt: skip
    if used == 1:
        _store_rows(out, sequence, kv_head, row, divided(sums, total), tokens, GROUP, KV_HEADS, HEAD_DIM, WIDTH)
    elif parts is not None:
        place = ((sequence * KV_HEADS + kv_head) * tl.num_programs(1) + part) * splits + split
        left, column = place * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
        tl.store(states + left * 2, best)
        tl.store(states + left * 2 + 1, total)
        tl.store(parts + left[:, None] * HEAD_DIM + column[None, :], sums, mask=(column < HEAD_DIM)[None, :])


@triton.jit(do_not_specialize=["splits"])
def _add_splits(
    parts, states, starts, counts, out, tokens, splits, window,
    WINDOWED: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, LEAST: tl.constexpr, ADDED: tl.constexpr, MERGED_SPLITS: tl.constexpr,
):  # fmt: skip
    """Answer ADDED rows of a tile whose keys were split: grid [K, T Q / ADDED, B]."""
    kv_head, sequence = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    part, at = tl.program_id(1) * ADDED // ROWS, tl.program_id(1) * ADDED % ROWS
    _, past, begin, end = _keys_of_rows(starts, counts, sequence, part * ROWS, window, WINDOWED, GROUP, ROWS)
    _, used = _share(past, end - begin, splits, TILE, LEAST)
    if used == 1:
        return
    num_parts = tl.cdiv(tl.num_programs(1) * ADDED, ROWS)
    left = ((sequence * KV_HEADS + kv_head) * num_parts + part) * splits * ROWS + at
    total, sums = merge_splits(parts + left * HEAD_DIM, states + left * 2, used,
                               ROWS, ADDED, HEAD_DIM, WIDTH, MERGED_SPLITS)  # fmt: skip
    row = part * ROWS + at + tl.arange(0, ADDED)
    _store_rows(out, sequence, kv_head, row, divided(sums, total), tokens, GROUP, KV_HEADS, HEAD_DIM, WIDTH)


def tiles_of(
    rows: int, width: int, dtype: torch.dtype, is_coded: bool = False, is_hopper: bool = True
) -> tuple[int, int, int]:
    """Return a tile's rows and keys, and a program's warps: as large as registers allow.

    Args:
        rows: number of rows in all.  width: padded elements of a vector.  dtype: dtype of the products; float32 has no
            tensor cores.  is_coded: True for keys or values in codes; products of fewer than 64 rows would spill.
        is_hopper: False for GPUs before a Hopper, on which larger tiles of codes would spill.
    """
    if dtype == torch.float32:
        return 16, 16, 4
    if is_coded and not is_hopper and width <= limits.WIDE_HEAD:
        return (32, 32, 8) if width > 128 else (64, 64, 4)
    tile = 16 if is_coded and width > MOST_CODED_WIDTH else 32
    few = max(16, triton.next_power_of_2(rows), 64 if is_coded else 0)
    if width > limits.WIDE_HEAD:
        return min(few, limits.WIDE_HEAD_ROWS), tile, 8
    if width > 128:
        return (few, tile, 4) if few <= 32 else (64, tile, 8)
    return (few, 64, 4) if few <= limits.PREFILL_ROWS // 2 else (limits.PREFILL_ROWS, 64, 8)


def stages_of(warps: int, query: Tensor) -> int:
    """Return the number of pipeline stages of a program's loop, each with one tile of keys.

    With two programs of four warps, a Hopper has room for a third stage; on an A100 it would spill.
    """
    if warps == 8 or query.dtype == torch.float32:
        return 2
    return 3 if is_like_hopper(query) else 2


def is_like_hopper(query: Tensor) -> bool:
    """Return whether kernels for a tensor are compiled as for a Hopper or a later GPU, as the interpreter's are."""
    return query.is_cpu or torch.cuda.get_device_capability() >= (9, 0)


def splits_of_rows(kv_heads: int, rows_tiles: int, keys_tiles: int, warps: int, processors: int) -> int:
    """Return the number of programs that share the keys of a tile of rows.

    It does not depend on the number of sequences, so that a sequence's output is the same in every batch.

    Args:
        kv_heads, rows_tiles: numbers of kv heads and of tiles of rows, each pair with programs of its own.
        keys_tiles: most tiles of keys that a row may ever see.
        warps: warps of a program.
        processors: multiprocessors of the device.
    """
    programs = RESIDENT_WARPS // warps * processors
    return max(1, min(programs // (kv_heads * rows_tiles), -(-keys_tiles // LEAST_TILES)))


def launch_attend_chunk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    starts: Tensor,
    counts: Tensor,
    scoring: AttentionParameters,
    is_kept: bool = False,
) -> Tensor:
    """Return the result of `attend`, before the cache is written.

    Args:
        is_kept: True for keys and values that were read from the cache: they are mixed already if the cache's are.
    """
    window, scale, sinks, _, cap, _ = scoring
    batch, tokens, heads, head_dim = query.shape
    kv_heads, page = k_cache.shape[1:3]
    assert table.stride(1) == 1, "a sequence's pages are one run"
    for operand in (query, key, value, k_cache, v_cache):
        assert operand.stride(-1) == 1, "vectors lie in one run"
    query = launch_mix_heads(query, k_cache)
    if not is_kept:
        key, value = launch_mix_heads(key, k_cache, is_entry=True), launch_mix_heads(value, v_cache, is_entry=True)
    group, width = heads // kv_heads, max(16, triton.next_power_of_2(head_dim))
    kinds = pool_kind(k_cache), pool_kind(v_cache)
    rows, tile, warps = tiles_of(tokens * group, width, query.dtype, max(kinds) > 1, is_like_hopper(query))
    rows_tiles, slots = -(-tokens * group // rows), table.shape[1] * page
    keys_tiles = -(-min(slots, window or slots) // tile) + -(-tokens // tile)
    splits = splits_of_rows(kv_heads, rows_tiles, keys_tiles, warps, processors_of(query.device))
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    parts = states = None
    if splits > 1:
        parts, states = empty_splits((batch, kv_heads, rows_tiles, splits, rows), head_dim, query.device)
    sizes = {"WINDOWED": window > 0, "KV_HEADS": kv_heads, "GROUP": group, "HEAD_DIM": head_dim, "WIDTH": width,
             "ROWS": rows, "TILE": tile, "LEAST": LEAST_TILES, "enable_fp_fusion": True}  # fmt: skip
    _attend_chunk[(kv_heads * splits, rows_tiles, batch)](
        query, key, value, k_cache, v_cache, table, starts, counts, sinks, out, parts, states, tokens,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *strides_of(k_cache), *strides_of(v_cache),
        *table_sizes(table), window, scale, cap, CAPPED=cap != 0, PAGE=page, PRECISION=precision_of(query.dtype),
        K_KIND=kinds[0], V_KIND=kinds[1], num_warps=warps, num_stages=stages_of(warps, query), **sizes,
    )  # fmt: skip
    if splits > 1:
        _add_splits[(kv_heads, -(-tokens * group // ADDED), batch)](
            parts, states, starts, counts, out, tokens, splits, window, ADDED=ADDED,
            MERGED_SPLITS=max(1, MERGED // (ADDED * width)), num_warps=4, **sizes,
        )  # fmt: skip
    return launch_mix_heads(out, v_cache)
