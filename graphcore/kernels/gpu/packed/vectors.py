"""Vectors of a packed matrix in registers: 16 bytes of low codes, one load of a thread, and the high codes beside them.

A vector has four words: 32 weights of four bits, 64 of two, or 16 of eight. A byte has a weight in each slice of its
bits. A fragment is eight consecutive weights of a vector, one slice of the bytes of two words.

Legend: R rows, G vectors of a row.

If a function of constants is not called by a kernel that is being compiled, Triton 3.6 passes it a layout without the
names of its fields, so each such function names them again.
"""

import triton
import triton.language as tl

from graphcore.kernels.gpu.layout import DeviceLayout
from graphcore.kernels.gpu.packed.planes import scale_and_term

SIGNS = tl.constexpr(-0x7F7F7F80)  # 0x80808080
ONES = tl.constexpr(0x01010101)
SPREAD = tl.constexpr(0x02040810)  # its product with four bits has bit i at bit 4 of byte i


@triton.constexpr_function
def weights_of_vector(layout: DeviceLayout) -> int:
    """Return the number of weights in 16 bytes of low codes."""
    layout = DeviceLayout(*layout)
    return 128 // layout.low


@triton.constexpr_function
def scales_of_vector(layout: DeviceLayout) -> int:
    """Return the number of scales of a vector's weights; fragments that share a scale follow each other."""
    layout = DeviceLayout(*layout)
    if layout.group > 16:
        return 1
    return 2 if layout.step < 16 else 8 // layout.low


@triton.constexpr_function
def pair_of(fragment: int, layout: DeviceLayout) -> int:
    """Return which two of a vector's four words hold a fragment; fragments that share a scale follow each other."""
    layout = DeviceLayout(*layout)
    return fragment // (8 // layout.low) if layout.step < 16 else fragment % 2


@triton.constexpr_function
def part_of(fragment: int, layout: DeviceLayout) -> int:
    """Return which slice of the words' bits holds a fragment of a vector."""
    layout = DeviceLayout(*layout)
    return fragment % (8 // layout.low) if layout.step < 16 else fragment // 2


@triton.constexpr_function
def offset_of(fragment: int, layout: DeviceLayout) -> int:
    """Return the distance of a fragment's first weight from the vector's first, in weights."""
    layout = DeviceLayout(*layout)
    pair, part = (fragment // 2, fragment % 2) if layout.step < 16 else (fragment % 2, fragment // 2)
    return pair * (16 if layout.step < 16 else 8) + part * layout.step


@triton.jit
def two_words(words, SECOND: tl.constexpr):
    """Return words 0 and 1, or 2 and 3: [R, G, 4] -> [R, G, 2]."""
    R: tl.constexpr = words.shape[0]
    G: tl.constexpr = words.shape[1]
    first, second = tl.split(tl.permute(tl.reshape(words, (R, G, 2, 2)), (0, 1, 3, 2)))
    return second if SECOND else first


@triton.jit
def vectors_from(begin, last, EACH: tl.constexpr, G: tl.constexpr, IS_EVEN: tl.constexpr):
    """Return `begin` and the G - 1 vectors after it, each EACH times: [EACH G]; past the last vector, that one.

    A mask in place of such repeats would take instructions to clear registers.

    Args:
        IS_EVEN: True if no vector is past the last.
    """
    vector = begin + tl.arange(0, EACH * G) // EACH
    return vector if IS_EVEN else tl.minimum(vector, last)


@triton.jit
def four_words(rows, places):
    """Return the words at `places` of rows of a plane: [R] pointers to uint8 and [4 G] to [R, G, 4] int32.

    They are loaded as rows: then neighbouring threads get neighbouring vectors of a row, as sums want them. In three
    dimensions they would get neighbouring rows, and exchange words.

    Args:
        places: multiples of four and the three places after each.
    """
    G: tl.constexpr = places.shape[0] // 4
    pointers = rows.to(tl.pointer_type(tl.int32))[:, None] + places[None, :]
    pointers = tl.multiple_of(tl.max_contiguous(pointers, [1, 4]), [1, 16])
    return tl.reshape(tl.load(pointers, eviction_policy="evict_first"), (rows.shape[0], G, 4))


@triton.jit
def high_words(high, begin, last, FIRST: tl.constexpr, G: tl.constexpr, IS_EVEN: tl.constexpr, L: tl.constexpr):
    """Return four words of high codes of each vector, as they are stored: [R, G, 4] int32.

    Args:
        FIRST: distance of the words' first weight from the vector's first; the others as in `vector_words`.
    """
    span: tl.constexpr = 256 // L.high  # weights of 32 bytes
    start = first_weight(vectors_from(begin, last, 4, G, IS_EVEN), L)
    return four_words(high, start // span * 8 + start % 32 // 16 * 4 + FIRST // 4 + tl.arange(0, G * 4) % 4)


@triton.constexpr_function
def last_slice(layout: DeviceLayout) -> int:
    """Return the highest bit of a byte of high codes where a vector's first slice begins."""
    layout = DeviceLayout(*layout)
    sharing, weights, span = max(1, layout.step // 16), 128 // layout.low, 256 // layout.high
    starts = [vector // sharing * weights * sharing + vector % sharing * 16 for vector in range(span)]
    highest: int = max(start % span // 32 * layout.high for start in starts)
    return highest


@triton.jit
def moved_up(bits, begin, last, FRAGMENT: tl.constexpr, G: tl.constexpr, IS_EVEN: tl.constexpr, L: tl.constexpr):
    """Return words of high codes, [R, G, 2], shifted: a fragment's are where a byte's low codes end.

    One shift is enough if all vectors need it to the same side.
    """
    start = first_weight(vectors_from(begin, last, 1, G, IS_EVEN), L)
    slices = (start % (256 // L.high) // 32 * L.high)[None, :, None]
    up: tl.constexpr = L.low - L.step * part_of(FRAGMENT, L) // 32 * L.high  # of the first slice
    if up >= last_slice(L):
        bits = bits << (up - slices)
    elif up <= 0:
        bits = bits >> (slices - up)
    else:
        bits = (bits >> slices) << up
    return bits


@triton.jit
def first_weight(vector, L: tl.constexpr):
    """Return the column of a vector's first weight; if step is over 16, some vectors share their weights."""
    sharing: tl.constexpr = L.step // 16 if L.step > 16 else 1
    return vector // sharing * (weights_of_vector(L) * sharing) + vector % sharing * 16


@triton.jit
def vector_words(low, high, begin, last, G: tl.constexpr, IS_EVEN: tl.constexpr, L: tl.constexpr):
    """Return the words of low codes, [R, G, 4] int32, and of high codes if one load has them all, else [R, G, 1].

    Args:
        low, high: [R] pointers to uint8, at the rows of the planes.
        begin, last, IS_EVEN: as in `vectors_from`.
    """
    words = four_words(low, vectors_from(begin, last, 4, G, IS_EVEN) * 4 + tl.arange(0, G * 4) % 4)
    bits = words
    if L.high_runs:
        vector = vectors_from(begin, last, 1, G, IS_EVEN)
        bits = tl.load(high.to(tl.pointer_type(tl.int32))[:, None] + vector[None, :])[:, :, None]
    elif L.high > 0 and L.step >= 32:
        bits = high_words(high, begin, last, 0, G, IS_EVEN, L)
    return words, bits


@triton.jit
def fragment_bits(
    bits, high, begin, last, FRAGMENT: tl.constexpr, G: tl.constexpr, IS_EVEN: tl.constexpr, L: tl.constexpr
):
    """Return the words of a fragment's high codes, from `moved_up`; those stored as runs, as stored: [R, G, 1]."""
    if L.high > 0 and not L.high_runs:
        pair: tl.constexpr = pair_of(FRAGMENT, L)
        if L.step < 32:  # two fragments have four words; the compiler loads them once
            bits = high_words(high, begin, last, offset_of(FRAGMENT, L) - 8 * pair, G, IS_EVEN, L)
        bits = moved_up(two_words(bits, pair), begin, last, FRAGMENT, G, IS_EVEN, L)
    return bits


@triton.jit
def vector_scales(
    scales, supers, begin, last, OFFSET: tl.constexpr, G: tl.constexpr, IS_EVEN: tl.constexpr, L: tl.constexpr
):
    """Return the scales and the terms of vectors' weights at OFFSET: [R, G] float32, or 0.0 for no term.

    They are loaded in one dimension, one row after another: so a thread gets those of the vectors that it multiplies.
    In two it would get neighbours' too, and threads would exchange them through shared memory.

    Args:
        scales, supers: [R] pointers to uint8, at the rows of the planes.
        begin, last, IS_EVEN: as in `vectors_from`.
    """
    R: tl.constexpr = scales.shape[0]
    first = (first_weight(vectors_from(begin, last, 1, G, IS_EVEN), L) + OFFSET)[None, :]
    places = tl.max_contiguous(tl.reshape(scales[:, None] + first // L.group * L.scale_nbytes, (R * G,)), [1])
    rows = tl.reshape(tl.broadcast_to(supers[:, None], (R, G)), (R * G,))
    blocks = tl.reshape(tl.broadcast_to(first // L.super_weights, (R, G)), (R * G,))
    scale, term = scale_and_term(places, rows, blocks, L)
    if L.term != "":
        term = tl.reshape(term, (R, G))
    return tl.reshape(scale, (R, G)), term


@triton.jit
def code_words(words, bits, FRAGMENT: tl.constexpr, L: tl.constexpr):
    """Return a fragment's codes in the bytes of two words, [R, G, 2] int32, from bit `code_shift` on; other bits: any.

    Args:
        words: [R, G, 4] int32, low codes.  bits: high codes, from `fragment_bits`.
    """
    shift: tl.constexpr = low_shift(FRAGMENT, L)
    two = two_words(words, pair_of(FRAGMENT, L))
    if L.low == 8:
        two ^= SIGNS  # stored as int8
    if L.high > 0:
        if L.high_runs:
            run: tl.constexpr = 16 * part_of(FRAGMENT, L) + 8 * pair_of(FRAGMENT, L)
            upper = ((bits >> (run + 4 * tl.arange(0, 2))[None, None, :]) & 15) * SPREAD
        else:
            upper = bits
        low_bits: tl.constexpr = ((1 << L.low) - 1) * ONES
        two = ((two >> shift) & low_bits) | (upper & ~low_bits)
    return two


@triton.constexpr_function
def low_shift(fragment: int, layout: DeviceLayout) -> int:
    """Return the bit of a byte where a fragment's low codes begin."""
    layout = DeviceLayout(*layout)
    part: int = part_of(fragment, layout)
    return 8 - layout.low - part * layout.low if layout.is_descending else part * layout.low


@triton.constexpr_function
def code_shift(fragment: int, layout: DeviceLayout) -> int:
    """Return the bit of a byte of `code_words` where the codes begin."""
    layout = DeviceLayout(*layout)
    shift: int = 0 if layout.high else low_shift(fragment, layout)
    return shift


@triton.jit
def eight_codes(words, bits, FRAGMENT: tl.constexpr, L: tl.constexpr):
    """Return the codes of a fragment: [R, G, 8] int32; arguments as in `code_words`."""
    two = code_words(words, bits, FRAGMENT, L)[:, :, :, None]
    shift: tl.constexpr = code_shift(FRAGMENT, L)
    codes = (two >> (tl.arange(0, 4)[None, None, None, :] * 8 + shift)) & ((1 << (L.low + L.high)) - 1)
    return tl.reshape(codes, (words.shape[0], words.shape[1], 8))
