"""One new token's attention over a cache that holds its key and value already: split-KV decode, as one kernel.

Legend: B batch, H heads, K kv heads, E head dim, S cache slots, P splits.

    program (split, kv head, sequence): reads starts and counts, walks its share of the visible keys
    the last split of a kv head to arrive adds up what the others left, in their order: the bits do not depend on who
    is last

The H / K heads of a kv head are rows of one tile, so that a key is read once. The share is that of the live length,
in whole tiles: cost follows the context that is there, and splits that have nothing leave at once.
Source: split-KV as in Flash-Decoding (Dao et al. 2023); the last arrival as in CUDA's threadFenceReduction sample.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphcore.kernels.gpu.attend_tiles import LOG2_E, divided, load_rows, precision_of, take_in

TILE_NBYTES = 1 << 14  # of keys that a program reads at once, and as many of values: 64 of 128 in 16 bits
RESIDENT = 2  # programs that a processor holds at once; more splits than that would only be more to add up
MERGED = 1 << 13  # float32 of other splits' sums that the last one holds at once: 64 registers of 128 threads
ABSENT_PROCESSORS = 132  # where there is no GPU to ask: an H100's or H200's

torch.library.define(
    "graphcore::attend_written",
    "(Tensor query, Tensor k_cache, Tensor v_cache, Tensor starts, Tensor counts, int window, float scale,"
    " Tensor? sinks=None, Tensor(a!)? arrivals=None) -> Tensor",
)


def attend_written(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    starts: Tensor,
    counts: Tensor,
    window: int,
    scale: float,
    sinks: Tensor | None = None,
    arrivals: Tensor | None = None,
) -> Tensor:
    """Attend one new token of each sequence, whose key and value are in the cache.

    Args:
        query: [B, 1, H, E] compute dtype; the last stride is 1.
        k_cache, v_cache: [B, K, S, E] cache dtype; position p in slot p mod S, positions 0 .. starts are there.
        starts: [B] int64, the new token's position.
        counts: [B] int64, 1, or 0 of a row without a token; that row's answer is zeros.
        window: the last `window` keys are visible, the new one included; 0 is all.
        scale: multiplies q . k.
        sinks: [H] float32, as in `attend`.
        arrivals: [B * K or more] int32 zeros, and zeros again afterwards; all layers of a stream may share one.
            Without it each call makes its own, which is one more fill on the stream.

    Returns:
        [B, 1, H, E] compute dtype, contiguous.
    """
    op = torch.ops.graphcore.attend_written.default
    return op(query, k_cache, v_cache, starts, counts, window, scale, sinks, arrivals)  # type: ignore[no-any-return]


@torch.library.register_fake("graphcore::attend_written")
def _fake(query: Tensor, *_: object) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


@triton.jit
def _visible_keys(starts, counts, sequence, slots, window, WINDOWED: tl.constexpr):
    """Return the first visible position and how many there are, both int32."""
    start = tl.load(starts + sequence).to(tl.int32)
    visible = tl.minimum(start + 1, slots)
    if WINDOWED:
        visible = tl.minimum(visible, window)
    visible = tl.where(tl.load(counts + sequence) > 0, visible, 0)
    return start + 1 - visible, visible


@triton.jit
def _attend_share(
    q, k_cache, v_cache, first, begin, end, best, total, sums, k_stride, v_stride, slots, scale,
    WINDOWED: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the row state after the visible keys begin .. end, counted from position `first`."""
    slot_of_first = first % slots
    for at in range(begin, end, TILE):
        key = at + tl.arange(0, TILE)
        is_there = key < end
        slot = slot_of_first + key
        if WINDOWED:
            slot = tl.where(slot >= slots, slot - slots, slot)
        k = load_rows(k_cache, slot, k_stride, is_there, HEAD_DIM, WIDTH).to(q.dtype)
        v = load_rows(v_cache, slot, v_stride, is_there, HEAD_DIM, WIDTH).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2_E)
        scores = tl.where(is_there[None, :], scores, float("-inf"))
        best, total, sums = take_in(scores, v, best, total, sums, PRECISION)
    return best, total, sums


@triton.jit
def _merge(parts, states, used, GROUP: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
           WIDTH: tl.constexpr, MERGED_SPLITS: tl.constexpr):  # fmt: skip
    """Return total [HEADS] and sums [HEADS, E] over all splits that had keys.

    They were written by other processors while this one ran: `.cg` reads what they share, not what this one remembers.
    """
    head, column = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    best = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    sums = tl.zeros([HEADS, WIDTH], tl.float32)
    for at in range(0, used, MERGED_SPLITS):
        split = at + tl.arange(0, MERGED_SPLITS)
        row = split[:, None] * GROUP + head[None, :]
        is_row = (split < used)[:, None] & (head < GROUP)[None, :]
        bests = tl.load(states + row * 2, mask=is_row, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(states + row * 2 + 1, mask=is_row, other=0.0, cache_modifier=".cg")
        is_part = is_row[:, :, None] & (column < HEAD_DIM)[None, None, :]
        part = row[:, :, None] * HEAD_DIM + column[None, None, :]
        partial = tl.load(parts + part, mask=is_part, other=0.0, cache_modifier=".cg")
        highest = tl.maximum(best, tl.max(bests, 0))
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        kept, weights = tl.exp2(best - shift), tl.exp2(bests - shift[None, :])
        total = total * kept + tl.sum(totals * weights, 0)
        sums = sums * kept[:, None] + tl.sum(partial * weights[:, :, None], 0)
        best = highest
    return total, sums


@triton.jit
def _store_heads(out, answers, ROWS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    is_real = (row < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    at = row[:, None] * HEAD_DIM + column[None, :]
    tl.store(out + at, answers.to(out.dtype.element_ty), mask=is_real)


@triton.jit
def _attend_written(
    query, k_cache, v_cache, starts, counts, sinks, out, parts, states, arrivals,
    q_batch, q_head, k_batch, k_head, k_slot, v_batch, v_head, v_slot, slots, window, scale,
    WINDOWED: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr, TILE: tl.constexpr, MERGED_SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    split, kv_head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    splits, place = tl.num_programs(0), sequence * tl.num_programs(1) + kv_head
    first, visible = _visible_keys(starts, counts, sequence, slots, window, WINDOWED)
    share = tl.maximum(tl.cdiv(tl.cdiv(visible, splits), TILE), 1) * TILE
    used = tl.maximum(tl.cdiv(visible, share), 1)  # a row without a token: one split writes its zeros
    if split >= used:
        return
    row = tl.arange(0, ROWS)
    is_head = row < GROUP
    q = load_rows(query + sequence * q_batch + kv_head * GROUP * q_head, row, q_head, is_head, HEAD_DIM, WIDTH)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks is not None:  # the first split counts it, as a key that it has seen and whose value is zero
        sink = tl.load(sinks + kv_head * GROUP + row, mask=is_head, other=0.0) * LOG2_E
        best = tl.where(split == 0, sink, best)
        total = tl.where(split == 0, 1.0, total)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    k_rows, v_rows = k_cache + sequence * k_batch + kv_head * k_head, v_cache + sequence * v_batch + kv_head * v_head
    begin, end = split * share, tl.minimum(split * share + share, visible)
    best, total, sums = _attend_share(
        q, k_rows, v_rows, first, begin, end, best, total, sums, k_slot, v_slot, slots, scale,
        WINDOWED, HEAD_DIM, WIDTH, TILE, PRECISION,
    )  # fmt: skip
    answer = out + place * GROUP * HEAD_DIM
    if used == 1:
        _store_heads(answer, divided(sums, total), ROWS, GROUP, HEAD_DIM, WIDTH)
    elif arrivals is not None:
        rows_before = place * splits * GROUP
        states += rows_before * 2
        parts += rows_before * HEAD_DIM
        tl.store(states + (split * GROUP + row) * 2, best, mask=is_head)
        tl.store(states + (split * GROUP + row) * 2 + 1, total, mask=is_head)
        _store_heads(parts + split * GROUP * HEAD_DIM, sums, ROWS, GROUP, HEAD_DIM, WIDTH)
        tl.debug_barrier()  # one thread announces what all have written
        arrived = tl.atomic_add(arrivals + place, 1, sem="acq_rel", scope="gpu")
        if arrived == used - 1:
            tl.store(arrivals + place, 0)
            all_total, all_sums = _merge(parts, states, used, GROUP, HEADS, HEAD_DIM, WIDTH, MERGED_SPLITS)
            _store_heads(answer, divided(all_sums, all_total), HEADS, GROUP, HEAD_DIM, WIDTH)


def split_count(batch: int, kv_heads: int, visible: int, tile: int, processors: int) -> int:
    """Return into how many programs the keys of one kv head are split.

    Args:
        batch, kv_heads: what there are programs for anyway.
        visible: keys that a query may ever see: the buffer's slots, or the window.
        tile: keys of a tile; a split has one at least.
        processors: of the device; each holds RESIDENT programs, and one more would wait for all the others.
    """
    return max(1, min(RESIDENT * processors // (batch * kv_heads), -(-visible // tile)))


def tile_of(width: int, dtype: torch.dtype) -> int:
    """Return how many keys a tile has, of vectors of `width` elements as they are multiplied."""
    return max(16, min(128, TILE_NBYTES // (width * dtype.itemsize)))


def processors_of(device: torch.device) -> int:
    """Return how many streaming multiprocessors a device has."""
    if device.type != "cuda":
        return ABSENT_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def launch_attend_written(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    starts: Tensor,
    counts: Tensor,
    window: int,
    scale: float,
    sinks: Tensor | None = None,
    arrivals: Tensor | None = None,
    tile: int = 0,
) -> Tensor:
    """Implement `attend_written`; tile: keys of a tile, 0 for what suits the head dim."""
    batch, tokens, heads, head_dim = query.shape
    kv_heads, slots = k_cache.shape[1:3]
    assert tokens == 1, f"{tokens} tokens of a sequence, this kernel takes one"
    assert query.stride(3) == k_cache.stride(3) == v_cache.stride(3) == 1, "vectors lie in one run"
    assert slots * max(k_cache.stride(2), v_cache.stride(2)) < 1 << 31, f"{slots} slots do not fit 32-bit offsets"
    group, width = heads // kv_heads, max(16, triton.next_power_of_2(head_dim))
    tile = tile or tile_of(width, query.dtype)
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
    _attend_written[(splits, kv_heads, batch)](
        query, k_cache, v_cache, starts, counts, sinks, out, parts, states, arrivals if splits > 1 else None,
        query.stride(0), query.stride(2), *k_cache.stride()[:3], *v_cache.stride()[:3], slots, window, scale,
        WINDOWED=window > 0, GROUP=group, HEADS=heads_width, ROWS=max(16, heads_width), HEAD_DIM=head_dim,
        WIDTH=width, TILE=tile, MERGED_SPLITS=max(1, MERGED // (heads_width * width)),
        PRECISION=precision_of(query.dtype), num_warps=8 if query.dtype == torch.float32 else 4, num_stages=3,
        enable_fp_fusion=True,
    )  # fmt: skip
    return out


# Not as a decorator: torch's would leave None under the function's name. Without a GPU the interpreter runs it.
torch.library.impl("graphcore::attend_written", "CompositeExplicitAutograd", launch_attend_written)
