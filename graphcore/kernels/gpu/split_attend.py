"""The kernel of split-KV decode; decode_attend.py launches it and says how programs are divided.

Legend: H heads, K kv heads, E head dim, R rows of a tile (the H / K heads of one kv head, padded).

What a split leaves: parts [B, K, splits, H / K, E] weighted sums of values; states [B, K, splits, H / K, 2] highest
score, in powers of two, and sum of weights; float32.
"""

import triton
import triton.language as tl

from graphcore.kernels.gpu.attend_tiles import LOG2_E, divided, empty_state, load_rows, walk


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
def _merge(parts, states, used, GROUP: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
           WIDTH: tl.constexpr, MERGED_SPLITS: tl.constexpr):  # fmt: skip
    """Return total [HEADS] and sums [HEADS, E] over all splits that had keys.

    They were written by other processors while this one ran: `.cg` reads what they share, not what this one remembers.
    """
    head, column = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    best, total, sums = empty_state(HEADS, WIDTH)
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
def _leave(part, state, best, total, sums, ROWS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
           WIDTH: tl.constexpr):  # fmt: skip
    """Write a split's row state for the last one to find."""
    row = tl.arange(0, ROWS)
    tl.store(state + row * 2, best, mask=row < GROUP)
    tl.store(state + row * 2 + 1, total, mask=row < GROUP)
    _store_heads(part, sums, ROWS, GROUP, HEAD_DIM, WIDTH)


@triton.jit
def attend_splits(
    query, k_cache, v_cache, starts, counts, sinks, out, parts, states, arrivals,
    q_batch, q_head, k_batch, k_head, k_slot, v_batch, v_head, v_slot, slots, window, scale, cap,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, MERGED_SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute `attend_written`: grid [splits, K, B]; every tensor has whole vectors, strides are in elements."""
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
    best, total, sums = empty_state(ROWS, WIDTH)
    if sinks is not None:  # the first split counts it, as a key that it has seen and whose value is zero
        sink = tl.load(sinks + kv_head * GROUP + row, mask=is_head, other=0.0) * LOG2_E
        best = tl.where(split == 0, sink, best)
        total = tl.where(split == 0, 1.0, total)
    k_rows, v_rows = k_cache + sequence * k_batch + kv_head * k_head, v_cache + sequence * v_batch + kv_head * v_head
    begin, end = split * share, tl.minimum(split * share + share, visible)
    best, total, sums = walk(
        q, k_rows, v_rows, first % slots, begin, end, 0, best, total, sums, k_slot, v_slot, slots, window, scale, cap,
        WINDOWED, True, False, False, CAPPED, HEAD_DIM, WIDTH, TILE, PRECISION,
    )  # fmt: skip
    answer = out + place * GROUP * HEAD_DIM
    if used == 1:
        _store_heads(answer, divided(sums, total), ROWS, GROUP, HEAD_DIM, WIDTH)
    elif arrivals is not None:
        left = place * splits * GROUP
        _leave(parts + (left + split * GROUP) * HEAD_DIM, states + (left + split * GROUP) * 2, best, total, sums,
               ROWS, GROUP, HEAD_DIM, WIDTH)  # fmt: skip
        tl.debug_barrier()  # one thread announces what all have written
        arrived = tl.atomic_add(arrivals + place, 1, sem="acq_rel", scope="gpu")
        if arrived == used - 1:
            tl.store(arrivals + place, 0)
            all_total, all_sums = _merge(parts + left * HEAD_DIM, states + left * 2, used,
                                         GROUP, HEADS, HEAD_DIM, WIDTH, MERGED_SPLITS)  # fmt: skip
            _store_heads(answer, divided(all_sums, all_total), HEADS, GROUP, HEAD_DIM, WIDTH)
