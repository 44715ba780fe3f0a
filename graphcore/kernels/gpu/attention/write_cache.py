"""The kernel that writes a pass's keys and values into the pages of a cache."""

import triton
import triton.language as tl
from torch import Tensor

from graphcore.kernels.gpu.attention.coded_heads import launch_keep_heads
from graphcore.kernels.gpu.attention.decode import table_sizes
from graphcore.kernels.gpu.attention.running_softmax import load_rows
from graphcore.kernels.ops.kv_formats import is_mixed

VALUES = 8  # values that a thread moves at once


@triton.jit
def _write_cache(
    key, value, k_cache, v_cache, table, starts, counts,
    k_batch, k_token, k_head, v_batch, v_token, v_head,
    k_page, old_k_head, k_place, v_page, old_v_head, v_place, table_row, num_pages, PAGE: tl.constexpr,
    HEADS: tl.constexpr, ALL_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    count = tl.load(counts + sequence)
    if (token >= count) | (token < count - num_pages * PAGE):  # padding, or a token whose slot a later one overwrites
        return
    position = tl.load(starts + sequence) + token
    page = tl.load(table + sequence * table_row + position // PAGE % num_pages).to(tl.int64)
    place = position % PAGE
    head, column = tl.arange(0, ALL_HEADS), tl.arange(0, WIDTH)
    is_head = head < HEADS
    is_there = is_head[:, None] & (column < HEAD_DIM)[None, :]
    k = load_rows(key + sequence * k_batch + token * k_token, head, k_head, is_head, HEAD_DIM, WIDTH)
    v = load_rows(value + sequence * v_batch + token * v_token, head, v_head, is_head, HEAD_DIM, WIDTH)
    head = head.to(tl.int64)
    k_at = k_cache + page * k_page + place * k_place + (head * old_k_head)[:, None] + column[None, :]
    v_at = v_cache + page * v_page + place * v_place + (head * old_v_head)[:, None] + column[None, :]
    tl.store(k_at, k.to(k_cache.dtype.element_ty), mask=is_there)
    tl.store(v_at, v.to(v_cache.dtype.element_ty), mask=is_there)


def launch_write_cache(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, starts: Tensor, counts: Tensor
) -> None:
    """Write each sequence's real tokens, at most the last that fit into its pages; arguments as for `attend`."""
    if is_mixed(k_cache) or is_mixed(v_cache):
        for new, pool in ((key, k_cache), (value, v_cache)):
            if is_mixed(pool):
                launch_keep_heads(new, pool, table, starts, counts)
            else:
                launch_write_cache(new, new, pool, pool, table, starts, counts)
        return
    batch, tokens, kv_heads, head_dim = key.shape
    assert key.stride(3) == value.stride(3) == k_cache.stride(3) == v_cache.stride(3) == 1, "vectors lie in one run"
    warps = min(max(kv_heads * head_dim // (32 * VALUES), 1), 4)
    _write_cache[(tokens, batch)](
        key, value, k_cache, v_cache, table, starts, counts,
        *key.stride()[:3], *value.stride()[:3], *k_cache.stride()[:3], *v_cache.stride()[:3], *table_sizes(table),
        PAGE=k_cache.shape[2], HEADS=kv_heads, ALL_HEADS=triton.next_power_of_2(kv_heads), HEAD_DIM=head_dim,
        WIDTH=triton.next_power_of_2(head_dim), num_warps=warps, enable_fp_fusion=True,
    )  # fmt: skip
