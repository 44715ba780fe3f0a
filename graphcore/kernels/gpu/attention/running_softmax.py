"""The running softmax over tiles of keys and values that decode and prefill attention share.

Legend: R rows (queries of one kv head), N keys of a tile, E head dim, padded to a power of two, G positions of a page.

The softmax is that of FlashAttention-2 (Dao 2023, arXiv 2307.08691, algorithm 1), in powers of two, for which a GPU has
an instruction. A row's state is its highest score, the sum of its weights, and the weighted sum of values:

    best' = max(best, scores)    kept = 2^(best - best')    total' = kept total + sum(2^(scores - best'))

Splits of the keys have states of their own, which add up by the same rule.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphcore.kernels.gpu.attention.coded_heads import load_codes

LOG2_E = tl.constexpr(1.4426950408889634)  # factor of the scores, because e^x = 2^(x log2 e)
MERGED = 1 << 13  # float32 of splits' sums that one program holds at once: 64 registers of 128 threads


@triton.jit
def load_rows(rows, at, stride, is_there, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Return the vectors at indices `at`, [N, E]; zeros where none is valid, since memory there may hold NaN."""
    column = tl.arange(0, WIDTH)
    seen = is_there[:, None]
    if WIDTH != HEAD_DIM:
        seen = seen & (column < HEAD_DIM)[None, :]
    return tl.load(rows + at[:, None] * stride + column[None, :], mask=seen, other=0.0)


@triton.jit
def capped_scores(scores, cap):
    """Return cap tanh(scores / cap) as 1 - 2 / (1 + e^(2 z)), which is 1 if the power overflows."""
    return cap - 2 * cap / (1 + tl.exp2(scores * (2 * LOG2_E / cap)))


@triton.jit
def take_in(scores, values, best, total, sums, PRECISION: tl.constexpr):
    """Return the row state after one more tile.

    Scores are [R, N] in powers of two, -inf where hidden; values [N, E]; best, total [R]; sums [R, E] float32.
    """
    highest = tl.maximum(best, tl.max(scores, 1))
    shift = tl.where(highest == float("-inf"), 0.0, highest)  # for a row that has seen no key, -inf - -inf is NaN
    weights = tl.exp2(scores - shift[:, None])
    kept = tl.exp2(best - shift)
    total = total * kept + tl.sum(weights, 1)
    sums = tl.dot(weights.to(values.dtype), values, acc=sums * kept[:, None], input_precision=PRECISION)
    return highest, total, sums


@triton.jit
def empty_state(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the state of rows that have seen no key: best, total and sums."""
    best = tl.full([ROWS], float("-inf"), tl.float32)
    return best, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)


@triton.jit
def walk(
    q, keys, values, pages, first_slot, begin, end, distance, best, total, sums, k_page, k_stride, v_page, v_stride,
    slots, window, scale, cap,
    RING: tl.constexpr, ENDS: tl.constexpr, HIDES: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr, PRECISION: tl.constexpr,
    K_KIND: tl.constexpr = 0, V_KIND: tl.constexpr = 0,
):  # fmt: skip
    """Return the row state after keys begin .. end; key 0 is in `first_slot`.

    Slot s is row s of `keys`, or, if there are pages, row s mod G of page `pages[s // G]`. A tile may span pages.

    RING: slots wrap.  ENDS: the last tile may hold fewer keys.  HIDES: rows see only some of the keys, by distance [R],
    each row's position counted from key 0: none later than the row and, if WINDOWED, only the last `window`.
    CAPPED: scores are bounded by `cap`.  K_KIND, V_KIND: what pages hold (coded_heads.py).
    """
    for at in range(begin, end, TILE):
        key = at + tl.arange(0, TILE)
        is_there = key < end
        slot = first_slot + key
        if RING:
            slot = tl.where(slot >= slots, slot - slots, slot)
        k_at, v_at = slot * k_stride, slot * v_stride
        if pages is not None:
            page, place = tl.load(pages + slot // PAGE, mask=is_there, other=0).to(tl.int64), slot % PAGE
            k_at, v_at = page * k_page + place * k_stride, page * v_page + place * v_stride
        if K_KIND > 1:
            k = load_codes(keys, k_at, slot % PAGE, is_there, HEAD_DIM, WIDTH, PAGE, K_KIND).to(q.dtype)
        else:
            k = load_rows(keys, k_at, 1, is_there, HEAD_DIM, WIDTH).to(q.dtype)
        if V_KIND > 1:
            v = load_codes(values, v_at, slot % PAGE, is_there, HEAD_DIM, WIDTH, PAGE, V_KIND).to(q.dtype)
        else:
            v = load_rows(values, v_at, 1, is_there, HEAD_DIM, WIDTH).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores = capped_scores(scores * scale, cap) * LOG2_E if CAPPED else scores * (scale * LOG2_E)
        if HIDES:
            ago = distance[:, None] - key[None, :]
            is_seen = (ago >= 0) & is_there[None, :]
            if WINDOWED:
                is_seen = is_seen & (ago < window)
            scores = tl.where(is_seen, scores, float("-inf"))
        elif ENDS:
            scores = tl.where(is_there[None, :], scores, float("-inf"))
        best, total, sums = take_in(scores, v, best, total, sums, PRECISION)
    return best, total, sums


@triton.jit
def merge_splits(parts, states, used, GROUP: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
                 WIDTH: tl.constexpr, MERGED_SPLITS: tl.constexpr):  # fmt: skip
    """Return total [HEADS] and sums [HEADS, E] over the first `used` splits, in their order.

    A split left GROUP rows of sums, [E] each, in `parts`, and of highest scores and totals in `states`. Rows from GROUP
    on are padding. MERGED_SPLITS: splits that are held at once.
    Other multiprocessors wrote them, maybe while this one ran, so `.cg` reads the shared cache and not this one's own.
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
def divided(sums, total):
    """Return the answers [R, E]; zeros for a row that saw no key."""
    return sums / tl.where(total == 0.0, 1.0, total)[:, None]


def empty_splits(sizes: Sequence[int], head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return memory for what splits leave, float32, not set: weighted sums [*sizes, E], and best and total [*sizes, 2].

    Args:
        sizes: numbers of splits and of the rows of each, in whatever order a kernel has them.
    """
    sums = torch.empty(*sizes, head_dim, dtype=torch.float32, device=device)
    return sums, torch.empty(*sizes, 2, dtype=torch.float32, device=device)


def precision_of(dtype: torch.dtype) -> str:
    """Return the precision of `tl.dot`: float32 without rounding to tf32; it has no effect on narrower types."""
    return "ieee" if dtype == torch.float32 else "tf32"
