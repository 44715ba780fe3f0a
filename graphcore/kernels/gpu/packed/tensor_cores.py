"""Products of three to eight tokens with rows of a packed matrix on tensor cores, for use inside other kernels.

Legend: N tokens, O rows, I columns, R rows of a program, G vectors of a row that are read at once.

Codes minus their zero are small integers, exact in 16 bits. They are multiplied unscaled, sixteen columns at a time for
each vector, and the sums of a scale are scaled in float32. At eight tokens multiply_add.py would take more than twenty
instructions per weight; here it is about ten, for any number of tokens. Levels of nf4, which need more than 16 bits,
are multiplied in two parts: one rounded to 16 bits, and what is left, rounded, too.
"""

import triton
import triton.language as tl

from graphcore.kernels.gpu.layout import DeviceLayout
from graphcore.kernels.gpu.packed.levels_in_place import FP4_LIFT, fp4_in_place, nf4_in_place
from graphcore.kernels.gpu.packed.planes import level_of, rows_from
from graphcore.kernels.gpu.packed.vectors import (
    code_shift,
    code_words,
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


@triton.constexpr_function
def middle_of(layout: DeviceLayout) -> int:
    """Return what is subtracted from codes: a zero that all blocks share, or the middle of eight bits.

    Sums of codes of either sign lose fewer bits than sums of positive ones, from which a block's zero is subtracted.
    """
    layout = DeviceLayout(*layout)
    return 128 if layout.low == 8 and not layout.levels else layout.zero


@triton.jit
def small_numbers(words, bits, FRAGMENT: tl.constexpr, L: tl.constexpr):
    """Return eight codes minus `middle_of`, exact in 16 bits, or their levels, fp4's times 192: [R, G, 8] float32."""
    if L.levels == "fp4" or L.levels == "nf4":
        two, shift = code_words(words, bits, FRAGMENT, L), code_shift(FRAGMENT, L)
        eight = fp4_in_place(two, shift) if L.levels == "fp4" else nf4_in_place(two, shift)
        numbers = tl.reshape(eight, (words.shape[0], words.shape[1], 8))
    else:
        codes = eight_codes(words, bits, FRAGMENT, L)
        levels: tl.constexpr = L.levels  # as in multiply_add.py
        numbers = level_of(codes, levels) if L.levels != "" else (codes - middle_of(L)).to(tl.float32)
    return numbers


@triton.jit
def sixteen_of(even, odd, dtype: tl.constexpr):
    """Return a pair of fragments as the rows of a product: [R, G, 8] float32 each -> [G, R, 16] dtype."""
    R: tl.constexpr = even.shape[0]
    G: tl.constexpr = even.shape[1]
    both = tl.permute(tl.join(even.to(dtype), odd.to(dtype)), (1, 0, 3, 2))  # [G, R, 2, 8]
    return tl.reshape(both, (G, R, 16))


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
                total = tl.dot(sixteen_of(even, odd, fed.dtype), tl.permute(fed, (0, 2, 1)), total)
                if L.levels == "nf4":
                    even -= even.to(fed.dtype).to(tl.float32)
                    odd -= odd.to(fed.dtype).to(tl.float32)
                    total = tl.dot(sixteen_of(even, odd, fed.dtype), tl.permute(fed, (0, 2, 1)), total)
                if L.term != "":
                    all_x += tl.sum(fed.to(tl.float32), axis=2)
            if L.scale == "whole":
                sums += total
            else:
                scale, term = vector_scales(
                    scales, supers, begin, last, offset_of(index * pairs * 2, L), G, False, L
                )  # [R, G]
                if L.term == "zero":
                    total -= (tl.trans(term) - middle_of(L))[:, :, None] * all_x[:, None, :]
                if L.levels == "fp4":
                    total *= FP4_LIFT
                sums += total * tl.trans(scale)[:, :, None]
                if L.term == "added":
                    sums += tl.trans(term)[:, :, None] * all_x[:, None, :]
                elif L.term == "subtracted":
                    sums -= tl.trans(term)[:, :, None] * all_x[:, None, :]
    return tl.trans(tl.sum(sums, axis=0))
