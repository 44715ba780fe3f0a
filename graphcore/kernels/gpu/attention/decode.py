"""One new token's attention over a cache that already holds its key and value: split-KV decode, as one kernel.

Legend: B batch, H heads, K kv heads, E head dim, N pages of a sequence, G positions of a page, S slots of a sequence
(N G), P splits,
R rows of a tile (the H / K heads of one kv head, padded).

    program (split, kv head, sequence): reads starts and counts, walks its share of the visible keys
    the last split of a kv head to arrive adds up the results of all, in their order: the bits do not depend on which
    split is last

Results of a split: parts [B, K, P, H / K, E], weighted sums of values; states [B, K, P, H / K, 2], highest score (in
base 2) and sum of weights; float32.

The H / K heads of a kv head are rows of one tile, so that a key is read once. A split's share is a share of the live
length, in whole tiles: the cost follows the context, and splits without keys exit at once.
Source: split-KV as in Flash-Decoding (Dao et al. 2023); the last arrival as in CUDA's threadFenceReduction sample.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphcore.kernels.gpu.attention.coded_heads import launch_mix_heads, pool_kind, strides_of
from graphcore.kernels.gpu.attention.running_softmax import (
    LOG2_E,
    MERGED,
    divided,
    empty_state,
    load_rows,
    merge_splits,
    precision_of,
    walk,
)
from graphcore.kernels.gpu.dependence import dependence
from graphcore.kernels.gpu.dependent_launch import let_next_begin, wait_for_earlier

TILE_NBYTES = 1 << 14  # bytes of keys that a program reads at once, and as many of values: 64 keys of 128 in 16 bits
MOST_CODED_WIDTH = 128  # wider heads in codes would not fit in registers with a whole tile
RESIDENT = 2  # programs that run on a multiprocessor at once; more splits would only add sums
REGISTERS = 53248  # bound for all programs of a multiprocessor, out of 65536: without it ptxas spills some
ALONE_TILES = 6  # most tiles of a sequence that one split takes alone: adding up splits takes as long as walking more
ABSENT_PROCESSORS = 132  # multiprocessors to assume without a GPU: those of an H100 or H200


@triton.jit
def _visible_keys(starts, counts, sequence, slots, window, WINDOWED: tl.constexpr):
    """Return the first visible position and the number of visible ones, both int32."""
    start = tl.load(starts + sequence).to(tl.int32)
    visible = tl.minimum(start + 1, slots)
    if WINDOWED:
        visible = tl.minimum(visible, window)
    visible = tl.where(tl.load(counts + sequence) > 0, visible, 0)
    return start + 1 - visible, visible


@triton.jit
def _store_heads(out, answers, ROWS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    is_real = (row < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    at = row[:, None] * HEAD_DIM + column[None, :]
    tl.store(out + at, answers.to(out.dtype.element_ty), mask=is_real)


@triton.jit
def _leave(part, state, best, total, sums, ROWS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
           WIDTH: tl.constexpr):  # fmt: skip
    """Write a split's row state for the last split to read."""
    row = tl.arange(0, ROWS)
    tl.store(state + row * 2, best, mask=row < GROUP)
    tl.store(state + row * 2 + 1, total, mask=row < GROUP)
    _store_heads(part, sums, ROWS, GROUP, HEAD_DIM, WIDTH)


@triton.jit
def attend_splits(
    query, k_cache, v_cache, table, starts, counts, sinks, out, parts, states, arrivals,
    q_batch, q_head, k_page, k_head, k_place, v_page, v_head, v_place, table_row, num_pages, window, scale, cap,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr,
    MERGED_SPLITS: tl.constexpr, ALONE: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
    K_KIND: tl.constexpr, V_KIND: tl.constexpr,
):  # fmt: skip
    """Compute `attend_written`: grid [splits, K, B]; every tensor has whole vectors, strides are in elements."""
    let_next_begin(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    split, kv_head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    splits, place = tl.num_programs(0), sequence * tl.num_programs(1) + kv_head
    slots = num_pages * PAGE
    first, visible = _visible_keys(starts, counts, sequence, slots, window, WINDOWED)
    share = tl.maximum(tl.cdiv(tl.cdiv(visible, splits), TILE), 1) * TILE
    share = tl.maximum(share, tl.where(visible <= ALONE * TILE, ALONE * TILE, 0))
    used = tl.maximum(tl.cdiv(visible, share), 1)  # a row without a token: one split writes its zeros
    if split >= used:
        return
    row = tl.arange(0, ROWS)
    is_head = row < GROUP
    q = load_rows(query + sequence * q_batch + kv_head * GROUP * q_head, row, q_head, is_head, HEAD_DIM, WIDTH)
    best, total, sums = empty_state(ROWS, WIDTH)
    if sinks is not None:  # the first split counts the sink, as a key that it has seen and whose value is zero
        sink = tl.load(sinks + kv_head * GROUP + row, mask=is_head, other=0.0) * LOG2_E
        best = tl.where(split == 0, sink, best)
        total = tl.where(split == 0, 1.0, total)
    k_rows, v_rows, pages = k_cache + kv_head * k_head, v_cache + kv_head * v_head, table + sequence * table_row
    begin, end = split * share, tl.minimum(split * share + share, visible)
    best, total, sums = walk(
        q, k_rows, v_rows, pages, first % slots, begin, end, 0, best, total, sums, k_page, k_place, v_page, v_place,
        slots, window, scale, cap, WINDOWED, True, False, False, CAPPED, HEAD_DIM, WIDTH, TILE, PAGE, PRECISION,
        K_KIND, V_KIND,
    )  # fmt: skip
    answer = out + place * GROUP * HEAD_DIM
    if used == 1:
        _store_heads(answer, divided(sums, total), ROWS, GROUP, HEAD_DIM, WIDTH)
    elif arrivals is not None:
        left = place * splits * GROUP
        _leave(parts + (left + split * GROUP) * HEAD_DIM, states + (left + split * GROUP) * 2, best, total, sums,
               ROWS, GROUP, HEAD_DIM, WIDTH)  # fmt: skip
        tl.debug_barrier()  # one thread counts the arrival after all have written
        arrived = tl.atomic_add(arrivals + place, 1, sem="acq_rel", scope="gpu")
        if arrived == used - 1:
            tl.store(arrivals + place, 0)
            all_total, all_sums = merge_splits(parts + left * HEAD_DIM, states + left * 2, used,
                                               GROUP, HEADS, HEAD_DIM, WIDTH, MERGED_SPLITS)  # fmt: skip
            _store_heads(answer, divided(all_sums, all_total), HEADS, GROUP, HEAD_DIM, WIDTH)


torch.library.define(
    "graphcore::attend_written",
    "(Tensor query, Tensor k_cache, Tensor v_cache, Tensor table, Tensor starts, Tensor counts, int window,"
    " float scale, Tensor? sinks=None, Tensor(a!)? arrivals=None, float cap=0.0) -> Tensor",
)


def attend_written(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    starts: Tensor,
    counts: Tensor,
    window: int,
    scale: float,
    sinks: Tensor | None = None,
    arrivals: Tensor | None = None,
    cap: float = 0.0,
) -> Tensor:
    """Attend one new token of each sequence, whose key and value are already in the cache.

    Args:
        query: [B, 1, H, E] compute dtype, mixed if the keys are; the last stride is 1.
        k_cache, v_cache: pages of keys and values of all sequences, as in `attend`.
        table: [B, N] int32, pages of each sequence, as in `attend`; they hold positions 0 .. starts.
        starts: [B] int64, the new token's position.
        counts: [B] int64, 1, or 0 for a row without a token, whose answer is zeros.
        window: number of visible keys, the new one included; 0 for all.
        scale: factor of q . k.
        sinks: [H] float32, as in `attend`.
        arrivals: [B * K or more] int32 zeros, zeros again afterwards; all layers of a stream may share one. If it is
            None, each call makes its own, which is one more fill on the stream.
        cap: bound of the scores, as in `attend`.

    Returns:
        [B, 1, H, E] compute dtype, contiguous.
    """
    op = torch.ops.graphcore.attend_written.default
    return op(query, k_cache, v_cache, table, starts, counts, window, scale, sinks, arrivals, cap)  # type: ignore[no-any-return]


@torch.library.register_fake("graphcore::attend_written")
def _fake(query: Tensor, *_: object) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


def split_count(batch: int, kv_heads: int, visible: int, tile: int, processors: int) -> int:
    """Return the number of programs that share the keys of one kv head.

    Args:
        batch, kv_heads: numbers of sequences and kv heads, each pair with programs of its own.
        visible: keys that a query may ever see: the buffer's slots, or the window.
        tile: keys of a tile; a split has at least one tile.
        processors: multiprocessors of the device; each runs RESIDENT programs, and one more would wait for the others.
    """
    return max(1, min(RESIDENT * processors // (batch * kv_heads), -(-visible // tile)))


def keys_of_tile(width: int, dtype: torch.dtype) -> int:
    """Return the number of keys of a tile, for vectors padded to `width` elements in the product's dtype."""
    return max(16, min(128, TILE_NBYTES // (width * dtype.itemsize)))


def table_sizes(table: Tensor) -> tuple[int, int]:
    """Return a table's entries from one row to the next, and its entries of each row."""
    return table.stride(0), table.shape[1]


def processors_of(device: torch.device) -> int:
    """Return how many streaming multiprocessors a device has."""
    if device.type != "cuda":
        return ABSENT_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def launch_attend_written(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    starts: Tensor,
    counts: Tensor,
    window: int,
    scale: float,
    sinks: Tensor | None = None,
    arrivals: Tensor | None = None,
    cap: float = 0.0,
    tile: int = 0,
    alone: int = ALONE_TILES,
) -> Tensor:
    """Implement `attend_written`.

    Args:
        tile: keys of a tile, 0 for the size that suits the head dim.
        alone: tiles that one split takes alone, without the sums of others.
    """
    batch, tokens, heads, head_dim = query.shape
    kv_heads, page = k_cache.shape[1:3]
    slots = table.shape[1] * page
    assert tokens == 1, f"{tokens} tokens of a sequence, this kernel takes one"
    assert query.stride(3) == k_cache.stride(-1) == v_cache.stride(-1) == 1, "vectors lie in one run"
    assert table.stride(1) == 1, "a sequence's pages are one run"
    group, width = heads // kv_heads, max(16, triton.next_power_of_2(head_dim))
    kinds = pool_kind(k_cache), pool_kind(v_cache)
    is_wide = width > MOST_CODED_WIDTH and max(kinds) > 1
    tile = tile or max(16, keys_of_tile(width, query.dtype) // (2 if is_wide else 1))
    splits = split_count(batch, kv_heads, min(slots, window or slots), tile, processors_of(query.device))
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    parts = states = None
    if splits > 1:
        parts = torch.empty(batch, kv_heads, splits, group, head_dim, dtype=torch.float32, device=query.device)
        states = torch.empty(batch, kv_heads, splits, group, 2, dtype=torch.float32, device=query.device)
        if arrivals is None:
            arrivals = torch.zeros(batch * kv_heads, dtype=torch.int32, device=query.device)
        assert arrivals.numel() >= batch * kv_heads, f"{arrivals.numel()} arrivals for {batch} x {kv_heads} kv heads"
    heads_width = triton.next_power_of_2(group)
    # Triton gives every load that waits for another, as keys wait for their page, half of the stages.
    warps, stages = (8, 3) if query.dtype == torch.float32 else (4, 5)  # float32 would spill with more
    attend_splits[(splits, kv_heads, batch)](
        query, k_cache, v_cache, table, starts, counts, sinks, out, parts, states, arrivals if splits > 1 else None,
        query.stride(0), query.stride(2), *strides_of(k_cache), *strides_of(v_cache), *table_sizes(table),
        window, scale, cap,
        WINDOWED=window > 0, CAPPED=cap != 0, GROUP=group, HEADS=heads_width, ROWS=max(16, heads_width),
        HEAD_DIM=head_dim, WIDTH=width, TILE=tile, PAGE=page, MERGED_SPLITS=max(1, MERGED // (heads_width * width)),
        ALONE=alone, PRECISION=precision_of(query.dtype), num_warps=warps, num_stages=stages, enable_fp_fusion=True,
        maxnreg=REGISTERS // (RESIDENT * 32 * warps), K_KIND=kinds[0], V_KIND=kinds[1], **dependence(),
    )  # fmt: skip
    return launch_mix_heads(out, v_cache)


# Not as a decorator: torch's would leave None under the function's name. Without a GPU the interpreter runs it.
torch.library.impl("graphcore::attend_written", "CompositeExplicitAutograd", launch_attend_written)
