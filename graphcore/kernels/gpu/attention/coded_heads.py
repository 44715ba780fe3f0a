"""Quantised KV cache on a GPU: heads are mixed by a Hadamard matrix, quantised into pages, and read back.

Legend: B batch, T tokens, H heads, K kv heads, E head dim, padded to W, N keys of a tile, G positions of a page.

kernels/ops/kv_formats.py has the layout and the definition. Kernels take a pool's format as a number: 0 for unchanged
heads, 1 for mixed heads in float8, and 8, 5 or 4 for mixed heads in codes of that many bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphcore.kernels.ops.kv_formats import FLOAT8, MOST_FLOAT8, format_of, head_dim_of, is_mixed

BITS = {"q8_0": 8, "q5_0": 5, "q4_0": 4}
MOST = tl.constexpr(MOST_FLOAT8)


def pool_kind(pool: Tensor) -> int:
    """Return the number of a pool's format in the kernels."""
    name = format_of(pool)
    return int(pool.dtype is FLOAT8) if name is None else BITS[name]


def strides_of(pool: Tensor) -> tuple[int, int, int]:
    """Return a pool's strides in elements, of pages, heads and positions; that of positions is 0 if it holds codes."""
    return pool.stride(0), pool.stride(1), 0 if format_of(pool) else pool.stride(2)


@triton.jit
def rounded_product(x, y):
    """Return x * y, never fused with a sum that follows, which would be rounded once instead of twice."""
    return tl.fma(x, y, 0.0)


@triton.jit
def mix(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Return heads [ROWS, W] float32 multiplied with the Hadamard matrix; summed as in kernels/ops/kv_formats.py."""
    SIZE: tl.constexpr = HEAD_DIM & -HEAD_DIM
    STEPS: tl.constexpr = (SIZE > 1) + (SIZE > 2) + (SIZE > 4) + (SIZE > 8) + (SIZE > 16) + (SIZE > 32) + (
        SIZE > 64
    ) + (SIZE > 128) + (SIZE > 256)  # fmt: skip
    for at in tl.static_range(STEPS):
        pairs = tl.permute(tl.reshape(x, (ROWS, WIDTH >> (at + 1), 2, 1 << at)), (0, 1, 3, 2))
        first, second = tl.split(pairs)
        x = tl.reshape(tl.permute(tl.join(first + second, first - second), (0, 1, 3, 2)), (ROWS, WIDTH))
    return x * (1.0 / tl.sqrt(SIZE * 1.0))


@triton.jit
def load_codes(pool, at, place, is_there, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
               BITS: tl.constexpr):  # fmt: skip
    """Return the heads [N, W] float32 of entries, still mixed; zeros where none is valid.

    Args:
        at: [N] place in the pool of the page's codes of this head.  place: [N] position in the page.
    """
    column = tl.arange(0, WIDTH)
    seen = is_there[:, None] & (column < HEAD_DIM)[None, :]
    if BITS == 8:
        code = tl.load(pool + (at + place * HEAD_DIM)[:, None] + column[None, :], mask=seen, other=0)
        value = code.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        byte, shift = column // 32 * 16 + column % 16, column % 32 // 16 * 4
        code = tl.load(pool + (at + place * (HEAD_DIM // 2))[:, None] + byte[None, :], mask=seen, other=0)
        code = (code.to(tl.int32) >> shift[None, :]) & 15
        if BITS == 5:
            fifths = pool + (at + PAGE * (HEAD_DIM // 2) + place * (HEAD_DIM // 8))[:, None] + (column // 8)[None, :]
            fifth = tl.load(fifths, mask=seen, other=0).to(tl.int32)
            code += ((fifth >> (column % 8)[None, :]) & 1) << 4
        value = (code - (1 << (BITS - 1))).to(tl.float32)
    before: tl.constexpr = PAGE * (HEAD_DIM if BITS == 8 else HEAD_DIM // 2 + (HEAD_DIM // 8 if BITS == 5 else 0))
    block = tl.arange(0, WIDTH // 32)
    scales = pool + (at + before + place * (HEAD_DIM // 16))[:, None] + (block * 2)[None, :]
    has_scale = is_there[:, None] & (block < HEAD_DIM // 32)[None, :]
    scale = tl.load(scales.to(tl.pointer_type(tl.float16)), mask=has_scale, other=0.0).to(tl.float32)
    blocks = tl.reshape(value, (at.shape[0], WIDTH // 32, 32)) * scale[:, :, None]
    return tl.reshape(blocks, (at.shape[0], WIDTH))


@triton.jit
def _rounded(x, WIDTH: tl.constexpr, BITS: tl.constexpr):
    """Return codes [W] int32 and scales [W / 32] float32 of a mixed head, as libggml rounds it."""
    blocks = tl.reshape(x, (WIDTH // 32, 32))
    most = tl.max(tl.abs(blocks), 1)
    if BITS == 8:
        scale = tl.div_rn(most, tl.full([WIDTH // 32], 127.0, tl.float32))
    else:
        is_extreme = tl.abs(blocks) == most[:, None]
        first = tl.min(tl.where(is_extreme, tl.arange(0, 32)[None, :], 32), 1)  # of equal ones
        extreme = tl.sum(tl.where(tl.arange(0, 32)[None, :] == first[:, None], blocks, 0.0), 1)
        scale = extreme / (-1.0 * (1 << (BITS - 1)))
    one = tl.full([WIDTH // 32], 1.0, tl.float32)
    steps = tl.where(scale == 0.0, 0.0, tl.div_rn(one, tl.where(scale == 0.0, 1.0, scale)))
    scaled = rounded_product(blocks, steps[:, None])
    if BITS == 8:
        size = tl.floor(tl.abs(scaled))
        size += tl.where(tl.abs(scaled) - size >= 0.5, 1.0, 0.0)  # half away from zero
        codes = tl.where(scaled < 0, -size, size).to(tl.int32)
    else:
        codes = tl.minimum((scaled + ((1 << (BITS - 1)) + 0.5)).to(tl.int32), (1 << BITS) - 1)
    return tl.reshape(codes, (WIDTH,)), scale


@triton.jit
def _keep_codes(pool, place, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, BITS: tl.constexpr):
    """Write a mixed head [W] as codes into a place of a page; `pool` points to the page's codes of this head."""
    codes, scale = _rounded(x, WIDTH, BITS)
    column = tl.arange(0, WIDTH)
    before: tl.constexpr = PAGE * (HEAD_DIM if BITS == 8 else HEAD_DIM // 2 + (HEAD_DIM // 8 if BITS == 5 else 0))
    if BITS == 8:
        tl.store(pool + place * HEAD_DIM + column, codes.to(tl.int8).to(tl.uint8, bitcast=True), mask=column < HEAD_DIM)
    else:
        halves = tl.permute(tl.reshape(codes, (WIDTH // 32, 2, 16)), (0, 2, 1))
        low, high = tl.split(halves)  # [W / 32, 16] each
        byte = tl.arange(0, WIDTH // 2)
        nibbles = tl.reshape((low & 15) | ((high & 15) << 4), (WIDTH // 2,)).to(tl.uint8)
        tl.store(pool + place * (HEAD_DIM // 2) + byte, nibbles, mask=byte < HEAD_DIM // 2)
    if BITS == 5:
        eights = tl.reshape(codes >> 4, (WIDTH // 8, 8))
        fifths = tl.sum(eights << tl.arange(0, 8)[None, :], 1).to(tl.uint8)
        eighth = tl.arange(0, WIDTH // 8)
        to = pool + PAGE * (HEAD_DIM // 2) + place * (HEAD_DIM // 8) + eighth
        tl.store(to, fifths, mask=eighth < HEAD_DIM // 8)
    block = tl.arange(0, WIDTH // 32)
    scales = (pool + before + place * (HEAD_DIM // 16) + 2 * block).to(tl.pointer_type(tl.float16))
    tl.store(scales, scale.to(tl.float16), mask=block < HEAD_DIM // 32)


@triton.jit
def _rounded_to_float8(x):
    """Return the float32 numbers that are nearest in e4m3, half to even, at most 448."""
    x = tl.minimum(tl.maximum(x, -MOST), MOST)
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    step = 24576.0  # 1.5 * 2^23 times the smallest number, 2^-9: adding it rounds to a multiple of that
    return tl.where(tl.abs(x) < 0.015625, (x + step) - step, normal)


@triton.jit
def keep_head(pool, place, place_stride, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
              KIND: tl.constexpr):  # fmt: skip
    """Write a head [1, W] into a place of a page, as a pool of this KIND keeps it.

    Args:
        pool: pointer to the page's entries of this head; place_stride: elements from one to the next, 0 for codes.
    """
    if KIND:
        x = mix(x.to(tl.float32), 1, WIDTH, HEAD_DIM)
    x, column = tl.reshape(x, (WIDTH,)), tl.arange(0, WIDTH)
    if KIND > 1:
        _keep_codes(pool, place, x, HEAD_DIM, WIDTH, PAGE, KIND)
    else:
        if KIND == 1:
            x = _rounded_to_float8(x)
        tl.store(pool + place * place_stride + column, x.to(pool.dtype.element_ty), mask=column < HEAD_DIM)


@triton.jit
def _stood_for(x, WIDTH: tl.constexpr, KIND: tl.constexpr):
    """Return the numbers that an entry of a mixed head [W] stands for."""
    if KIND == 1:
        return _rounded_to_float8(x)
    codes, scale = _rounded(x, WIDTH, KIND)
    zero: tl.constexpr = 0 if KIND == 8 else 1 << (KIND - 1)
    blocks = tl.reshape((codes - zero).to(tl.float32), (WIDTH // 32, 32))
    return tl.reshape(blocks * scale.to(tl.float16).to(tl.float32)[:, None], (WIDTH,))


@triton.jit
def _mix_heads(heads, out, batch_stride, token_stride, head_stride, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
               KIND: tl.constexpr):  # fmt: skip
    """Write a head, mixed, to `out` [B, T, heads, E]; with a KIND, as an entry of such a pool stands for it."""
    head, token, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    column = tl.arange(0, WIDTH)
    is_there = column < HEAD_DIM
    source = heads + sequence * batch_stride + token * token_stride + head * head_stride
    x = tl.load(source + column, mask=is_there, other=0.0).to(tl.float32)
    x = tl.reshape(mix(tl.reshape(x, (1, WIDTH)), 1, WIDTH, HEAD_DIM), (WIDTH,))
    if KIND:
        x = _stood_for(x, WIDTH, KIND)
    to = ((sequence * tl.num_programs(1) + token) * tl.num_programs(0) + head) * HEAD_DIM
    tl.store(out + to + column, x.to(out.dtype.element_ty), mask=is_there)


def launch_mix_heads(heads: Tensor, pool: Tensor, is_entry: bool = False) -> Tensor:
    """Return heads [B, T, H, E] mixed by the Hadamard matrix if the pool's heads are, else unchanged.

    Args:
        is_entry: True to also round mixed heads to the values that the pool would store, for keys and values.
    """
    if not is_mixed(pool):
        return heads
    batch, tokens, count, head_dim = heads.shape
    assert heads.stride(3) == 1, "vectors lie in one run"
    out = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    _mix_heads[(count, tokens, batch)](
        heads, out, *heads.stride()[:3], HEAD_DIM=head_dim, WIDTH=max(32, triton.next_power_of_2(head_dim)),
        KIND=pool_kind(pool) if is_entry else 0, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit
def _keep_heads(
    heads, pool, table, starts, counts, batch_stride, token_stride, head_stride, page_stride, pool_head_stride,
    place_stride, table_row, num_pages, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    head, token, sequence = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    count = tl.load(counts + sequence)
    if (token >= count) | (token < count - num_pages * PAGE):  # padding, or a token whose slot a later one overwrites
        return
    position = tl.load(starts + sequence) + token
    page = tl.load(table + sequence * table_row + position // PAGE % num_pages).to(tl.int64)
    column, place = tl.arange(0, WIDTH), position % PAGE
    is_there = column < HEAD_DIM
    source = heads + sequence * batch_stride + token * token_stride + head * head_stride
    x = tl.load(source + column, mask=is_there, other=0.0)
    entries = pool + page * page_stride + head * pool_head_stride
    keep_head(entries, place, place_stride, tl.reshape(x, (1, WIDTH)), HEAD_DIM, WIDTH, PAGE, KIND)


def launch_keep_heads(heads: Tensor, pool: Tensor, table: Tensor, starts: Tensor, counts: Tensor) -> None:
    """Write heads [B, T, K, E] of each sequence's real tokens, at most the last that fit, to a pool of mixed heads."""
    batch, tokens, kv_heads, head_dim = heads.shape
    assert heads.stride(3) == 1, "vectors lie in one run"
    assert pool.is_contiguous(), "a head's codes of a page are one run"
    _keep_heads[(kv_heads, tokens, batch)](
        heads, pool, table, starts, counts, *heads.stride()[:3], *strides_of(pool), table.stride(0), table.shape[1],
        PAGE=pool.shape[2], HEAD_DIM=head_dim_of(pool), WIDTH=max(32, triton.next_power_of_2(head_dim)),
        KIND=pool_kind(pool), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
