"""A chunk's attention over the cached past and over itself: flash attention with two sources, as one kernel.

Legend: B batch, T tokens, H heads, K kv heads, Q = H / K, E head dim, N pages of a sequence, G positions of a page,
R rows of a program.

    rows of a program    R of the T Q (token, head) pairs of one kv head, in order, tokens before heads
    keys that it reads   past:  first visible .. start, in the sequence's pages; the chunk is written afterwards
                         chunk: first visible .. last token of the rows, from the projections

A key is read once for R / Q tokens and all their heads; with a window that is window + R / Q keys. Keys that no row
sees are never read. The last rows see the most keys, so they start first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphcore.kernels.gpu.attention.coded_heads import launch_mix_heads, pool_kind, strides_of
from graphcore.kernels.gpu.attention.decode import MOST_CODED_WIDTH, table_sizes
from graphcore.kernels.gpu.attention.running_softmax import LOG2_E, divided, empty_state, load_rows, precision_of, walk
from graphcore.kernels.scoring import Scoring


@triton.jit
def _attend_chunk(
    query, key, value, k_cache, v_cache, table, starts, counts, sinks, out, tokens,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    k_page, old_k_head, k_place, v_page, old_v_head, v_place, table_row, num_pages, window, scale, cap,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr, PRECISION: tl.constexpr,
    K_KIND: tl.constexpr, V_KIND: tl.constexpr,
):  # fmt: skip
    part, kv_head, sequence = tl.program_id(1), tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    row = (tl.num_programs(1) - 1 - part) * ROWS + tl.arange(0, ROWS)
    token, head = row // GROUP, kv_head * GROUP + row % GROUP
    first_token = (tl.num_programs(1) - 1 - part) * ROWS // GROUP
    start, count = tl.load(starts + sequence).to(tl.int32), tl.load(counts + sequence).to(tl.int32)
    end = tl.minimum(((tl.num_programs(1) - part) * ROWS - 1) // GROUP + 1, count)
    is_padding = first_token >= count  # no row is real: no key is read, and the answer is zeros
    best, total, sums = empty_state(ROWS, WIDTH)
    if sinks is not None:  # a key that every row sees and whose value is zero
        best = tl.load(sinks + head) * LOG2_E
        total = tl.full([ROWS], 1.0, tl.float32)
    q = load_rows(query + sequence * q_batch, token * q_token + head * q_head, 1, token < count, HEAD_DIM, WIDTH)
    first, new_first = 0, 0
    if WINDOWED:
        first = tl.minimum(tl.maximum(start + first_token - window + 1, 0), start)
        new_first = tl.maximum(first_token - window + 1, 0)
    past, since = tl.where(is_padding, 0, start - first), start - first + token
    old_keys, old_values = k_cache + kv_head * old_k_head, v_cache + kv_head * old_v_head
    pages, slots = table + sequence * table_row, num_pages * PAGE
    keys, values = key + sequence * k_batch + kv_head * k_head, value + sequence * v_batch + kv_head * v_head
    rest = 0
    if not WINDOWED:  # whole tiles of the past, visible to all rows
        rest = past // TILE * TILE
        best, total, sums = walk(
            q, old_keys, old_values, pages, 0, 0, rest, since, best, total, sums, k_page, k_place, v_page, v_place,
            slots, window, scale, cap, False, False, False, False, CAPPED, HEAD_DIM, WIDTH, TILE, PAGE, PRECISION,
            K_KIND, V_KIND,
        )  # fmt: skip
    best, total, sums = walk(
        q, old_keys, old_values, pages, first % slots, rest, past, since, best, total, sums,
        k_page, k_place, v_page, v_place,
        slots, window, scale, cap, WINDOWED, True, WINDOWED, WINDOWED, CAPPED, HEAD_DIM, WIDTH, TILE, PAGE, PRECISION,
        K_KIND, V_KIND,
    )  # fmt: skip
    best, total, sums = walk(
        q, keys, values, None, 0, new_first, end, token, best, total, sums, 0, k_token, 0, v_token,
        slots, window, scale, cap, False, True, True, WINDOWED, CAPPED, HEAD_DIM, WIDTH, TILE, PAGE, PRECISION,
    )  # fmt: skip
    column = tl.arange(0, WIDTH)
    answer = ((sequence * tokens + token) * tl.num_programs(0) * GROUP + head) * HEAD_DIM
    is_answer = (token < tokens)[:, None] & (column < HEAD_DIM)[None, :]
    answers = out + answer[:, None] + column[None, :]
    tl.store(answers, divided(sums, total).to(out.dtype.element_ty), mask=is_answer)


def tiles_of(rows: int, width: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Return a tile's rows and keys, and a program's warps: as large as registers allow, on sm_80 and on sm_90.

    Args:
        rows: number of rows in all.  width: padded elements of a vector.  dtype: dtype of the products; float32 has no
            tensor cores.
    """
    if dtype == torch.float32:
        return 16, 16, 4
    if width > 256:  # heads of 512: a tile of 64 rows would not fit in registers
        return min(max(16, triton.next_power_of_2(rows)), 32), 32, 8
    most = 128 if width <= 128 else 64
    tile = 64 if width <= 128 else 32
    return (most, tile, 8) if rows > 64 else (max(16, triton.next_power_of_2(rows)), tile, 4)


def launch_attend_chunk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    starts: Tensor,
    counts: Tensor,
    scoring: Scoring,
    is_kept: bool = False,
) -> Tensor:
    """Return the result of `attend`, before the cache is written.

    Args:
        is_kept: True for keys and values that were read from the cache, which are mixed already if it mixes.
    """
    window, scale, sinks, _, cap = scoring
    batch, tokens, heads, head_dim = query.shape
    kv_heads, page = k_cache.shape[1:3]
    assert table.stride(1) == 1, "a sequence's pages are one run"
    for operand in (query, key, value, k_cache, v_cache):
        assert operand.stride(-1) == 1, "vectors lie in one run"
    query = launch_mix_heads(query, k_cache)
    if not is_kept:
        key, value = launch_mix_heads(key, k_cache, is_entry=True), launch_mix_heads(value, v_cache, is_entry=True)
    group, width = heads // kv_heads, max(16, triton.next_power_of_2(head_dim))
    rows, tile, warps = tiles_of(tokens * group, width, query.dtype)
    kinds = pool_kind(k_cache), pool_kind(v_cache)
    tile = 16 if width > MOST_CODED_WIDTH and max(kinds) > 1 else tile
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    _attend_chunk[(kv_heads, -(-tokens * group // rows), batch)](
        query, key, value, k_cache, v_cache, table, starts, counts, sinks, out, tokens,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *strides_of(k_cache), *strides_of(v_cache),
        *table_sizes(table), window, scale, cap, WINDOWED=window > 0, CAPPED=cap != 0, GROUP=group, HEAD_DIM=head_dim,
        WIDTH=width, ROWS=rows, TILE=tile, PAGE=page, PRECISION=precision_of(query.dtype), num_warps=warps,
        num_stages=2, enable_fp_fusion=True, K_KIND=kinds[0], V_KIND=kinds[1],
    )  # fmt: skip
    return launch_mix_heads(out, v_cache)
