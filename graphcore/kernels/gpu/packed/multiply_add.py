"""Products of a few tokens with rows of a packed matrix, for use inside other kernels, with few instructions.

Legend: N tokens, O rows, I columns, R rows of a program, G vectors of a row that are read at once.

A row is read in vectors and multiplied in fragments (vectors.py): a fragment with eight x, which are one load, too.

Codes are neither shifted nor converted. The lowest 24 bits of a float whose exponent is 0 or 1 are an integer in units
of 2^-149, so a code that is masked in place, at bit p of a word, is the float code * 2^(p - 149); x is multiplied by
2^(96 - p) before, once for all rows. A weight takes a logical operation and a multiply-add:

    sum(code x) = 2^53 sum((word & mask) (2^(96 - p) x))

Zero codes and minimums are applied with the sum of x, which all rows share, too. A GPU's multiply-add handles
denormals at full speed and exactly, unless they are flushed to zero; |x| has to be under 2^31.
"""

import triton
import triton.language as tl

from graphcore.kernels.gpu.packed.levels_in_place import (
    E2M1_LIFT,
    E4M3_LIFT,
    FP4_LIFT,
    e2m1_in_place,
    e4m3_in_place,
    fp4_in_place,
    levels_in_place,
    nf4_in_place,
)
from graphcore.kernels.gpu.packed.planes import rows_from
from graphcore.kernels.gpu.packed.vectors import (
    code_shift,
    code_words,
    first_weight,
    fragment_bits,
    offset_of,
    scales_of_vector,
    vector_scales,
    vector_words,
    vectors_from,
    weights_of_vector,
)

LIFT = tl.constexpr(float(2**53))  # 149 - 96


@triton.jit
def in_place(words, mask, byte):
    """Return the bits `mask` << place of each byte of words as floats; place is 8 byte, and 16 for byte 3.

    Args:
        words: [R, G, W] int32.  byte: [4].

    Returns:
        [1, R, G, 4 W] float32, in multiples of 2^(place - 149).
    """
    R: tl.constexpr = words.shape[0]
    G: tl.constexpr = words.shape[1]
    W: tl.constexpr = words.shape[2]
    words = words[:, :, :, None]
    byte = byte[None, None, None, :]
    bits = tl.where(byte == 3, words >> 8, words) & (mask << (tl.minimum(byte, 2) * 8))
    return tl.reshape(bits, (1, R, G, 4 * W)).to(tl.float32, bitcast=True)


@triton.jit
def eight_of(x, first):
    """Return x[first] to x[first + 7], [N, 1, G, 8] float32: pointers [N, 1, 1, 1], multiples of 8 [1, 1, G, 1].

    bf16 is read as pairs, which a shift and a mask widen; single numbers the compiler would shift once more.
    """
    N: tl.constexpr = x.shape[0]
    G: tl.constexpr = first.shape[2]
    if x.dtype.element_ty == tl.bfloat16:
        pairs = tl.load(x.to(tl.pointer_type(tl.int32)) + first // 2 + tl.arange(0, 4)[None, None, None, :])
        both = tl.join((pairs << 16).to(tl.float32, bitcast=True), (pairs & -65536).to(tl.float32, bitcast=True))
        eight = tl.reshape(both, (N, 1, G, 8))
    else:
        eight = tl.load(x + first + tl.arange(0, 8)[None, None, None, :]).to(tl.float32)
    return eight


@triton.jit
def power_of_two(exponent):
    """Return 2^exponent, float32: int32 -126 .. 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def eight_products(total, fed, words, bits, FRAGMENT: tl.constexpr, L: tl.constexpr):
    """Return `total` [N, R, G, 8] plus the products of eight x [N, 1, G, 8] with their codes.

    Args:
        words: [R, G, 4] int32, low codes.
        bits: high codes, from `fragment_bits`.
    """
    levels: tl.constexpr = L.levels  # Triton 3.6 takes a string as an argument only as a constant
    shift: tl.constexpr = code_shift(FRAGMENT, L)
    byte = tl.arange(0, 4)
    two = code_words(words, bits, FRAGMENT, L)
    if L.levels == "e2m1":
        total += e2m1_in_place(two, shift) * fed
    elif L.levels == "fp8":
        total += e4m3_in_place(two) * fed
    elif L.levels == "fp4":
        total += fp4_in_place(two, shift) * fed
    elif L.levels == "nf4":
        total += nf4_in_place(two, shift) * fed
    elif L.levels != "":
        total += levels_in_place(two, shift, byte, levels, L.low + L.high) * fed
    else:
        place = tl.minimum(tl.arange(0, 8) % 4, 2)[None, None, None, :] * 8
        codes = in_place(two, ((1 << (L.low + L.high)) - 1) << shift, byte)
        total += codes * (fed * power_of_two(96 - shift - place))
    return total


@triton.jit
def products_of_weights(product, all_x, scale, term, L: tl.constexpr):
    """Return the products of weights, [N, R, G], from those of codes.

    Args:
        product: [N, R, G], products of codes and x.  all_x: [N, 1, G], the sum of x.
        scale, term: from `vector_scales`; a scale of `whole` is not applied.
    """
    if L.levels == "":
        product *= LIFT
    elif L.levels == "e2m1":
        product *= E2M1_LIFT
    elif L.levels == "fp8":
        product *= E4M3_LIFT
    elif L.levels == "fp4":
        product *= FP4_LIFT
    if L.scale == "whole":
        product -= all_x * L.zero
    else:
        if L.term == "zero":
            product -= all_x * term[None, :, :]
        product *= scale[None, :, :]
        if L.term == "added":
            product += all_x * term[None, :, :]
        elif L.term == "subtracted":
            product -= all_x * term[None, :, :]
        elif L.zero != 0:
            product -= all_x * (scale * L.zero)[None, :, :]
    return product


@triton.jit
def dot_rows(
    x, x_stride, tokens, matrix, first, rows, columns,
    L: tl.constexpr, N: tl.constexpr, R: tl.constexpr, G: tl.constexpr, IS_EVEN: tl.constexpr = False,
):  # fmt: skip
    """Return the products of all tokens with rows first .. first + R - 1: [N, R] float32; rows past the end: arbitrary.

    The scale of an i2_s tensor is not applied (planes.tensor_scale).

    Args:
        x: pointer to any float dtype; token t begins at t * x_stride, at a multiple of 16 bytes.
        tokens: number of tokens, at most N.
        matrix: pointer to uint8, at a multiple of 16 bytes.
        first: first row, a multiple of R.
        rows: O; memory after the group of the last is not read.
        columns: I; known when the kernel is compiled, they take no registers and no instructions for addresses.
        N, R: powers of two.
        G: number of vectors that are read at once; 32 for each warp of the program keep every sum in its thread.
        IS_EVEN: True if a row's vectors are a multiple of G.
    """
    return dot_each(x, x_stride, tokens, (matrix,), first, rows, columns, L, N, R, G, IS_EVEN)[0]


@triton.jit
def dot_each(
    x, x_stride, tokens, matrices, first, rows, columns,
    L: tl.constexpr, N: tl.constexpr, R: tl.constexpr, G: tl.constexpr, IS_EVEN: tl.constexpr = False,
):  # fmt: skip
    """Return the same as `dot_rows` for each of several matrices of one format, as a tuple; x is prepared once for all.

    Args:
        matrices: tuple of pointers.
    """
    weights: tl.constexpr = weights_of_vector(L)
    num_scales: tl.constexpr = scales_of_vector(L)
    fragments: tl.constexpr = weights // 8 // num_scales  # fragments that share a scale
    last = columns // weights - 1
    token = tl.minimum(tl.arange(0, N), tokens - 1)
    product_input = x + (token.to(tl.int64) * x_stride)[:, None, None, None]
    planes, sums = (), ()
    for at in tl.static_range(len(matrices)):
        low = rows_from(matrices[at], first, rows, columns, 0, L, R)
        high = rows_from(matrices[at], first, rows, columns, 1, L, R)
        scales = rows_from(matrices[at], first, rows, columns, 2, L, R)
        supers = rows_from(matrices[at], first, rows, columns, 3, L, R)
        planes = planes + ((low, high, scales, supers),)
        sums = sums + (tl.zeros((N, R, G), tl.float32),)
    for begin in range(0, columns // weights, G):
        start = first_weight(vectors_from(begin, last, 1, G, IS_EVEN), L)
        words = ()
        for at in tl.static_range(len(matrices)):
            words = words + (vector_words(planes[at][0], planes[at][1], begin, last, G, IS_EVEN, L),)
        for index in tl.static_range(num_scales):
            all_x = tl.zeros((N, 1, G, 8), tl.float32)
            totals = ()
            for _ in tl.static_range(len(matrices)):
                totals = totals + (tl.zeros((N, R, G, 8), tl.float32),)
            for fragment in tl.static_range(index * fragments, (index + 1) * fragments):
                fed = eight_of(product_input, (start + offset_of(fragment, L))[None, None, :, None])
                all_x += fed
                grown = ()
                for at in tl.static_range(len(matrices)):
                    own = fragment_bits(words[at][1], planes[at][1], begin, last, fragment, G, IS_EVEN, L)
                    grown = grown + (eight_products(totals[at], fed, words[at][0], own, fragment, L),)
                totals = grown
            more = ()
            for at in tl.static_range(len(matrices)):
                scale, term = 1.0, 0.0
                if L.scale != "whole":
                    scale, term = vector_scales(
                        planes[at][2], planes[at][3], begin, last, offset_of(index * fragments, L), G, IS_EVEN, L
                    )
                products = products_of_weights(tl.sum(totals[at], axis=3), tl.sum(all_x, axis=3), scale, term, L)
                if not IS_EVEN:
                    products = tl.where((begin + tl.arange(0, G) <= last)[None, None, :], products, 0.0)
                more = more + (sums[at] + products,)
            sums = more
    results = ()
    for at in tl.static_range(len(matrices)):
        results = results + (tl.sum(sums[at], axis=2),)
    return results
