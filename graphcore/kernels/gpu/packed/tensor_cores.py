"""Products of three to eight tokens with rows of a packed matrix on tensor cores, for use inside other kernels.

Legend: N tokens, O rows, I columns, R rows of a program, G vectors of a row that are read at once.

Codes minus their zero are small integers, exact in 16 bits. They are multiplied unscaled, sixteen columns at a time for
each vector, and the sums of a scale are scaled in float32. At eight tokens multiply_add.py would take more than twenty
instructions per weight; here it is about ten, for any number of tokens.
"""

import triton
import triton.language as tl

from graphcore.kernels.gpu.packed.planes import level_of, rows_from
from graphcore.kernels.gpu.packed.vectors import (
    eight_codes,
    first_weight,
    fragment_bits,
    offset_of,
    scales_of_vector,
    vector_scales,
    vector_words,
    vectors_from,
    weights_of_vector,
)


@triton.jit
def small_numbers(words, bits, FRAGMENT: tl.constexpr, L: tl.constexpr):
    """Return eight codes minus their zero, or their levels: [R, G, 8] float32, exact in 16 bits."""
    codes = eight_codes(words, bits, FRAGMENT, L)
    levels: tl.constexpr = L.levels  # as in multiply_add.py
    return level_of(codes, levels) if L.levels != "" else (codes - L.zero).to(tl.float32)


@triton.jit
def dotted_rows(
    x, x_stride, tokens, matrix, first, rows, columns,
    L: tl.constexpr, N: tl.constexpr, R: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Return the same as `multiply_add.dot_rows`, for x in 16 bits: [N, R] float32; N and R are 16 or more."""
    weights: tl.constexpr = weights_of_vector(L)
    num_scales: tl.constexpr = scales_of_vector(L)
    pairs: tl.constexpr = weights // 16 // num_scales  # pairs of fragments that share a scale
    low, high = rows_from(matrix, first, rows, columns, 0, L, R), rows_from(matrix, first, rows, columns, 1, L, R)
    token = tl.arange(0, N)[None, :, None]
    scales = rows_from(matrix, first, rows, columns, 2, L, R)
    supers = rows_from(matrix, first, rows, columns, 3, L, R)
    last = columns // weights - 1
    sums = tl.zeros((G, R, N), tl.float32)
    for begin in range(0, columns // weights, G):
        is_there = begin + tl.arange(0, G) <= last
        start = first_weight(vectors_from(begin, last, 1, G, False), L)
        words, bits = vector_words(low, high, begin, last, G, False, L)
        for index in tl.static_range(num_scales):
            total = tl.zeros((G, R, N), tl.float32)
            all_x = tl.zeros((G, N), tl.float32)
            for pair in tl.static_range(index * pairs, (index + 1) * pairs):
                at = (start + offset_of(2 * pair, L))[:, None, None] + tl.arange(0, 16)[None, None, :]
                is_fed = is_there[:, None, None] & (token < tokens)
                fed = tl.load(x + token.to(tl.int64) * x_stride + at, mask=is_fed, other=0.0)  # [G, N, 16]
                own = fragment_bits(bits, high, begin, last, 2 * pair, G, False, L)
                even = small_numbers(words, own, 2 * pair, L)
                own = fragment_bits(bits, high, begin, last, 2 * pair + 1, G, False, L)
                odd = small_numbers(words, own, 2 * pair + 1, L)
                sixteen = tl.permute(tl.join(even.to(fed.dtype), odd.to(fed.dtype)), (1, 0, 3, 2))  # [G, R, 2, 8]
                total = tl.dot(tl.reshape(sixteen, (G, R, 16)), tl.permute(fed, (0, 2, 1)), total)
                if L.scale == "pair" or L.scale == "bytes" or L.scale == "nibbles":
                    all_x += tl.sum(fed.to(tl.float32), axis=2)
            if L.scale == "whole":
                sums += total
            else:
                scale, minimum = vector_scales(
                    scales, supers, begin, last, offset_of(index * pairs * 2, L), G, False, L
                )  # [R, G]
                sums += total * tl.trans(scale)[:, :, None]
                if L.scale == "pair":
                    sums += tl.trans(minimum)[:, :, None] * all_x[:, None, :]
                elif L.scale == "bytes" or L.scale == "nibbles":
                    sums -= tl.trans(minimum)[:, :, None] * all_x[:, None, :]
    return tl.trans(tl.sum(sums, axis=0))
