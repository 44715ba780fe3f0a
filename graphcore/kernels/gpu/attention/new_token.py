"""A new token's heads on their way into attention: normalised, rotated, mixed, and written into a page.

Legend: R heads of one token, E head dim, padded to W, A features of a head that rotate.

    query: [R, W]     norm, rotation, rounding, mixing if the keys are mixed
    key:   [1, W]     norm, rotation, rounding, and into its place of a page; the value without the first two

Rotation pairs x[i] with x[i + A/2]. A tile of heads is read twice, once with each feature's partner in its place, so
that nothing moves between threads.
"""

import triton
import triton.language as tl

from graphcore.kernels.gpu.attention.coded_heads import keep_head, mix, rounded_product
from graphcore.kernels.gpu.attention.running_softmax import load_rows


@triton.jit
def prepared_heads(
    heads, stride, weight, rope, eps,
    COUNT: tl.constexpr, ROWS: tl.constexpr, ROTATED: tl.constexpr, WIDE: tl.constexpr, MIXES: tl.constexpr,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return COUNT heads, padded to [ROWS, W], in their own dtype; every step is rounded to it, as in nn/.

    Args:
        heads: pointer to the first head; stride: elements from one to the next.
        weight: pointer to [E] float32, of an RMSNorm of each head, or None; eps: its constant.
        rope: pointer to A/2 cosines and A/2 sines, float32, or None.
        ROTATED: A.  WIDE: True to multiply by the weight before rounding.
        MIXES: True to multiply with the Hadamard matrix (kernels/ops/kv_formats.py).
    """
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    x = load_rows(heads, row, stride, row < COUNT, HEAD_DIM, WIDTH)
    dtype = x.dtype
    scale = tl.full([ROWS], 1.0, tl.float32)
    if weight is not None:
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(rounded_product(wide, wide), 1) / HEAD_DIM + eps)
        x = _weighted(x, scale, weight, column, WIDE, HEAD_DIM)
    if rope is not None:
        half: tl.constexpr = ROTATED // 2
        is_turned = column < ROTATED
        partner = tl.where(column < half, column + half, tl.where(is_turned, column - half, column))
        is_there = (row < COUNT)[:, None] & (column < HEAD_DIM)[None, :]
        y = tl.load(heads + row[:, None] * stride + partner[None, :], mask=is_there, other=0.0)
        if weight is not None:
            y = _weighted(y, scale, weight, partner, WIDE, HEAD_DIM)
        cos = tl.load(rope + column % half, mask=is_turned, other=0.0)[None, :]
        sin = tl.load(rope + half + column % half, mask=is_turned, other=0.0)
        sin = tl.where(column < half, -sin, sin)[None, :]
        turned = rounded_product(x.to(tl.float32), cos) + rounded_product(y.to(tl.float32), sin)
        x = tl.where(is_turned[None, :], turned.to(dtype), x)
    if MIXES:
        x = mix(x.to(tl.float32), ROWS, WIDTH, HEAD_DIM).to(dtype)
    return x


@triton.jit
def prepared_queries(
    heads, stride, weight, rope, eps, scratch,
    GROUP: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, ROTATED: tl.constexpr, WIDE: tl.constexpr,
    MIXES: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return the GROUP query heads of a kv head, padded to [ROWS, W]; HEADS is the power of two that holds them.

    Args:
        scratch: pointer to [GROUP, E] of the query's dtype, which the kv head's programs may all write: the same bits.
    """
    if MIXES:  # read again, as heads that nothing was done to: registers would hold them through the loop over keys
        q = prepared_heads(heads, stride, weight, rope, eps, GROUP, HEADS, ROTATED, WIDE, True, HEAD_DIM, WIDTH)
        store_heads(scratch, q, HEADS, GROUP, HEAD_DIM, WIDTH)
        q = reread_heads(scratch, ROWS, GROUP, HEAD_DIM, WIDTH)
    else:
        q = prepared_heads(heads, stride, weight, rope, eps, GROUP, ROWS, ROTATED, WIDE, False, HEAD_DIM, WIDTH)
    return q


@triton.jit
def store_heads(out, heads, ROWS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Store the first GROUP of heads [ROWS, W] one after another."""
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    is_real = (row < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    at = row[:, None] * HEAD_DIM + column[None, :]
    tl.store(out + at, heads.to(out.dtype.element_ty), mask=is_real)


@triton.jit
def reread_heads(heads, ROWS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Return heads [ROWS, W] that this program's threads have just stored."""
    tl.debug_barrier()
    row = tl.arange(0, ROWS)
    return load_rows(heads, row, HEAD_DIM, row < GROUP, HEAD_DIM, WIDTH)


@triton.jit
def _weighted(x, scale, weight, column, WIDE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Return x * scale * weight of these columns, rounded to the dtype of x as nn/norm.py does."""
    of_columns = tl.load(weight + column, mask=column < HEAD_DIM, other=0.0)[None, :]
    values = x.to(tl.float32) * scale[:, None]
    if not WIDE:
        values, of_columns = values.to(x.dtype).to(tl.float32), of_columns.to(x.dtype).to(tl.float32)
    return (values * of_columns).to(x.dtype)


@triton.jit
def write_new(
    key, value, k_pool, v_pool, place, k_place, v_place, k_weight, rope, eps,
    ROTATED: tl.constexpr, WIDE: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    K_KIND: tl.constexpr, V_KIND: tl.constexpr,
):  # fmt: skip
    """Write a key and a value into one place of their page; then all threads of the program may read them.

    Args:
        key, value: pointers to [E].
        k_pool, v_pool: pointers to this head's part of the page; k_place, v_place: elements from place to place.
    """
    k = prepared_heads(key, 0, k_weight, rope, eps, 1, 1, ROTATED, WIDE, False, HEAD_DIM, WIDTH)
    v = prepared_heads(value, 0, None, None, 0.0, 1, 1, 0, True, False, HEAD_DIM, WIDTH)
    keep_head(k_pool, place, k_place, k, HEAD_DIM, WIDTH, PAGE, K_KIND)
    keep_head(v_pool, place, v_place, v, HEAD_DIM, WIDTH, PAGE, V_KIND)
    tl.debug_barrier()
