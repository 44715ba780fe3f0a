"""Turns a token's projections into its query, and its key and value in the cache, in one kernel.

Legend: B batch (one token of each), H heads, K kv heads, E head dim, R features of a head that rotate, P pages,
N pages of a sequence, G positions of a page.

    projected: [q of H heads | k of K heads | v of K heads]     q, k: normalised per head, rotated     position: start

One program takes one head of one token: two halves of R, because rotation pairs x[i] with x[i + R/2], and the rest.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphcore.kernels.cache_codes import head_dim_of, is_mixed
from graphcore.kernels.gpu.attention.coded_heads import launch_mix_heads
from graphcore.kernels.gpu.attention.decode import table_sizes
from graphcore.kernels.gpu.attention.write_cache import launch_write_cache
from graphcore.kernels.gpu.dependence import dependence
from graphcore.kernels.gpu.dependent_launch import let_next_begin, wait_for_earlier

torch.library.define(
    "graphcore::rotate_and_write",
    "(Tensor projected, Tensor? rope, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor table, Tensor starts,"
    " Tensor counts, Tensor? q_weight, Tensor? k_weight, float eps, bool scale_in_float32) -> Tensor",
)


def rotate_and_write(
    projected: Tensor,
    rope: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    starts: Tensor,
    counts: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    scale_in_float32: bool = True,
) -> Tensor:
    """Write one new token's key and value into each sequence's cache and return its query.

    Args:
        projected: [B, (H + 2 K) E] compute dtype, contiguous.
        rope: [B, 1, 2, R/2] float32, as in nn/rope.py's `rotate`, or None.
        k_cache, v_cache: pools as in `attend`, contiguous; position start is written if count is not 0.
        table: [B, N] int32, pages of each sequence, as in `attend`.
        starts: [B] int64, the token's position.  counts: [B] int64, 1 or 0.
        q_weight, k_weight: [E] float32, weights of an RMSNorm of each head before the rotation, or None.
        eps, scale_in_float32: settings of that norm, as in gpu/norm.py.

    Returns:
        [B, 1, H, E] compute dtype, mixed if the keys are; meaningless for a sequence without a token.
    """
    op = torch.ops.graphcore.rotate_and_write.default
    norm = (q_weight, k_weight, eps, scale_in_float32)
    return op(projected, rope, k_cache, v_cache, table, starts, counts, *norm)  # type: ignore[no-any-return]


@torch.library.register_fake("graphcore::rotate_and_write")
def _fake(projected: Tensor, _rope: Tensor | None, k_cache: Tensor, *_: object) -> Tensor:
    kv_heads, head_dim = k_cache.shape[1], head_dim_of(k_cache)
    heads = projected.shape[1] // head_dim - 2 * kv_heads
    return projected.new_empty(len(projected), 1, heads, head_dim)


@triton.jit
def _rotate_and_write(
    projected, rope, k_cache, v_cache, table, starts, counts, q_weight, k_weight, query, heads, kv_heads,
    table_row, num_pages, eps,
    HALF: tl.constexpr, REST: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
    PAGE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    head, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    dtype = projected.dtype.element_ty
    at = tl.arange(0, BLOCK)
    is_there = at < HALF
    width: tl.constexpr = 2 * HALF + REST
    source = projected + (token * (heads + 2 * kv_heads) + head) * width
    first = tl.load(source + at, mask=is_there, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + at, mask=is_there, other=0.0).to(tl.float32)
    behind = tl.arange(0, REST_BLOCK)
    is_rest = behind < REST
    rest = tl.load(source + 2 * HALF + behind, mask=is_rest, other=0.0).to(tl.float32)
    is_value = head >= heads + kv_heads
    if q_weight is not None:
        if not is_value:
            weight = tl.where(head < heads, q_weight, k_weight)
            squares = tl.sum(first * first) + tl.sum(second * second)
            if REST:
                squares += tl.sum(rest * rest)
            scale = tl.rsqrt(squares / width + eps)
            first = _weighted(first * scale, tl.load(weight + at, mask=is_there, other=0.0), WIDE, dtype)
            second = _weighted(second * scale, tl.load(weight + HALF + at, mask=is_there, other=0.0), WIDE, dtype)
            if REST:
                of_rest = tl.load(weight + 2 * HALF + behind, mask=is_rest, other=0.0)
                rest = _weighted(rest * scale, of_rest, WIDE, dtype)
    if rope is not None:
        if not is_value:
            cos = tl.load(rope + token * 2 * HALF + at, mask=is_there, other=0.0)
            sin = tl.load(rope + token * 2 * HALF + HALF + at, mask=is_there, other=0.0)
            first, second = first * cos - second * sin, second * cos + first * sin
    first, second, rest = first.to(dtype), second.to(dtype), rest.to(dtype)
    if head < heads:
        _store_head(query + (token * heads + head) * width, first, second, rest, HALF, REST)
    elif tl.load(counts + token) > 0:
        cache = tl.where(is_value, v_cache, k_cache)
        kv_head = tl.where(is_value, head - heads - kv_heads, head - heads)
        start = tl.load(starts + token)
        page = tl.load(table + token * table_row + start // PAGE % num_pages).to(tl.int64)
        _store_head(
            cache + ((page * kv_heads + kv_head) * PAGE + start % PAGE) * width, first, second, rest, HALF, REST
        )


@triton.jit
def _store_head(target, first, second, rest, HALF: tl.constexpr, REST: tl.constexpr):
    """Store both halves of a head and the rest after them, in the dtype that `target` points to."""
    at, behind = tl.arange(0, first.shape[0]), tl.arange(0, rest.shape[0])
    tl.store(target + at, first.to(target.dtype.element_ty), mask=at < HALF)
    tl.store(target + HALF + at, second.to(target.dtype.element_ty), mask=at < HALF)
    if REST:
        tl.store(target + 2 * HALF + behind, rest.to(target.dtype.element_ty), mask=behind < REST)


@triton.jit
def _weighted(values, weight, WIDE: tl.constexpr, DTYPE: tl.constexpr):
    """Return values * weight, rounded as DTYPE, in float32."""
    if not WIDE:
        values, weight = values.to(DTYPE).to(tl.float32), weight.to(DTYPE).to(tl.float32)
    return (values * weight).to(DTYPE).to(tl.float32)


def launch_rotate_and_write(
    projected: Tensor,
    rope: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    starts: Tensor,
    counts: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    scale_in_float32: bool,
) -> Tensor:
    """Implement `rotate_and_write`."""
    batch, (kv_heads, page), head_dim = len(projected), k_cache.shape[1:3], head_dim_of(k_cache)
    if is_mixed(k_cache) or is_mixed(v_cache):
        # The kernel writes each token's heads to a page of its own, from where they are kept in another form.
        pools = projected.new_empty(2, batch, kv_heads, 1, head_dim)
        own = torch.arange(batch, dtype=table.dtype, device=table.device)[:, None]
        norm = (q_weight, k_weight, eps, scale_in_float32)
        query = launch_rotate_and_write(projected, rope, pools[0], pools[1], own, starts, counts, *norm)
        new = [one.transpose(1, 2) for one in pools]
        launch_write_cache(new[0], new[1], k_cache, v_cache, table, starts, counts)
        return launch_mix_heads(query, k_cache)
    assert table.stride(1) == 1, "a sequence's pages are one run"
    assert head_dim % 2 == 0, f"heads of {head_dim} have no halves"
    for tensor in (projected, k_cache, v_cache) if rope is None else (projected, k_cache, v_cache, rope):
        assert tensor.is_contiguous(), "the kernel finds its place by shape alone"
    heads = projected.shape[1] // head_dim - 2 * kv_heads
    query = torch.empty(batch, 1, heads, head_dim, dtype=projected.dtype, device=projected.device)
    half = head_dim // 2 if rope is None else rope.shape[-1]
    rest = head_dim - 2 * half
    _rotate_and_write[(heads + 2 * kv_heads, batch)](
        projected, rope, k_cache, v_cache, table, starts, counts, q_weight, k_weight, query, heads, kv_heads,
        *table_sizes(table), eps,
        HALF=half, REST=rest, WIDE=scale_in_float32, BLOCK=triton.next_power_of_2(half),
        REST_BLOCK=triton.next_power_of_2(max(rest, 1)), PAGE=page, num_warps=1,
        **dependence(),
        enable_fp_fusion=False,  # products are rounded before they are added, as nn/rope.py's are
    )  # fmt: skip
    return query


# Not as a decorator: torch's would leave None under the function's name. Without a GPU the interpreter runs it.
torch.library.impl("graphcore::rotate_and_write", "CompositeExplicitAutograd", launch_rotate_and_write)
