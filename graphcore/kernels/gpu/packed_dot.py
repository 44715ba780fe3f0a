"""The products of a few tokens with rows of a packed matrix, inside other kernels: as few instructions as it takes.

Legend: N tokens, O rows, I columns, R rows of a program, G units of a row that are read at once.

A unit is 16 bytes of low codes, one load of a thread: 32 weights of four bits, 64 of two, 16 of eight. A byte has a
weight in each slice of its bits; the bytes of two words meet eight x, which are one load too.

Codes are neither shifted nor converted. The lowest 24 bits of a float, under an exponent of 0 or 1, are a whole number
of 2^-149, so a code that is masked in its place, at bit p of a word, is the float code * 2^(p - 149); x is multiplied
with 2^(96 - p) before, once for all rows. A weight takes a logical operation and a multiply-add:

    sum(code x) = 2^53 sum((word & mask) (2^(96 - p) x))

The zero code and minimums take the sum of x, which all rows share, too. Denormals are at full speed in a GPU's
multiply-add, and exact, as long as nobody flushes them; |x| has to be under 2^31.
"""

import triton
import triton.language as tl

from graphcore.kernels.device_layout import DeviceLayout
from graphcore.kernels.gpu.unpacking import level_of, plane_rows, scale_and_minimum

X_LIFT = tl.constexpr(float(2**96))
LIFT = tl.constexpr(float(2**53))  # 149 - 96
SIGNS = tl.constexpr(-0x7F7F7F80)  # 0x80808080
E2M1_SIZES = tl.constexpr(0x01C001C0)
E2M1_SIGNS = tl.constexpr(-0x7FFF8000)  # 0x80008000
LEVELS_LIFT = tl.constexpr(float(2**31))  # of e2m1, which is 2^-127 in its place


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
def e2m1_in_place(words, SHIFT: tl.constexpr):
    """Return the E2M1 codes at bits SHIFT .. SHIFT + 3 of each byte, doubled, in multiples of 2^-127.

    Two codes are made bf16 at once, in the halves of a word: s......e em......  and then widened.

    Args:
        words: [R, G, W] int32.

    Returns:
        [1, R, G, 4 W] float32.
    """
    R: tl.constexpr = words.shape[0]
    G: tl.constexpr = words.shape[1]
    W: tl.constexpr = words.shape[2]
    words = tl.reshape(words, (R, G, W, 1, 1))
    place = tl.arange(0, 2)[None, None, None, None, :] * 8 + SHIFT  # of a code in its half
    sizes = tl.where(place < 6, words << tl.maximum(6 - place, 0), words >> tl.maximum(place - 6, 0))
    halves = (sizes & E2M1_SIZES) | ((words << (12 - place)) & E2M1_SIGNS)
    is_upper = tl.arange(0, 2)[None, None, None, :, None] == 1
    bits = tl.where(is_upper, halves & -0x10000, halves << 16)  # [R, G, W, 2, 2]: byte = 2 * upper + place
    return tl.reshape(bits, (1, R, G, 4 * W)).to(tl.float32, bitcast=True)


@triton.jit
def levels_in_place(words, shift, byte, LEVELS: tl.constexpr):
    """Return what the codes at bits shift .. shift + 3 of each byte stand for."""
    R: tl.constexpr = words.shape[0]
    G: tl.constexpr = words.shape[1]
    W: tl.constexpr = words.shape[2]
    code = words[:, :, :, None] >> (byte[None, None, None, :] * 8 + shift) & 15
    return tl.reshape(level_of(code, LEVELS), (1, R, G, 4 * W))


@triton.jit
def power_of_two(exponent):
    """Return 2^exponent, float32: int32 -126 .. 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.constexpr_function
def pair_of(octet: int, layout: DeviceLayout) -> int:
    """Return which two of a unit's four words hold eight of its weights: octets of one scale follow each other."""
    return octet // (8 // layout.low) if layout.step < 16 else octet % 2


@triton.constexpr_function
def part_of(octet: int, layout: DeviceLayout) -> int:
    """Return which slice of the words' bits holds eight weights of a unit."""
    return octet % (8 // layout.low) if layout.step < 16 else octet // 2


@triton.constexpr_function
def offset_of(octet: int, layout: DeviceLayout) -> int:
    """Return how far eight weights of a unit begin from its first."""
    pair, part = (octet // 2, octet % 2) if layout.step < 16 else (octet % 2, octet // 2)
    return pair * (16 if layout.step < 16 else 8) + part * layout.step


@triton.jit
def two_words(words, SECOND: tl.constexpr):
    """Return words 0 and 1, or 2 and 3: [R, G, 4] -> [R, G, 2]."""
    R: tl.constexpr = words.shape[0]
    G: tl.constexpr = words.shape[1]
    first, second = tl.split(tl.permute(tl.reshape(words, (R, G, 2, 2)), (0, 1, 3, 2)))
    return second if SECOND else first


@triton.jit
def high_words(high, start, is_there, FIRST: tl.constexpr, COUNT: tl.constexpr, L: tl.constexpr):
    """Return words of high codes, the bits of the unit's first slice lowest: [R, G, COUNT] int32.

    Args:
        high: [R] pointers to int32, at the rows of the plane.
        start: [G] first weight of each unit.  is_there: [G].
        FIRST: weights behind `start` that the first byte is for.
    """
    span: tl.constexpr = 256 // L.high  # weights of 32 bytes
    places = (start // span * 8 + start % 32 // 16 * 4 + FIRST // 4)[None, :, None] + tl.arange(0, COUNT)[None, None, :]
    bits = tl.load(high[:, None, None] + places, mask=is_there[None, :, None], other=0)
    return bits >> (start % span // 32 * L.high)[None, :, None]


@triton.jit
def eight_products(total, fed, words, bits, OCTET: tl.constexpr, L: tl.constexpr):
    """Return `total` [N, R, G, 8] and the products of eight x [N, 1, G, 8] with their codes.

    Args:
        words: [R, G, 4] int32, low codes.
        bits: high codes: [R, G, 1], [R, G, 2] or [R, G, 4] int32, or the low ones again where there are none.
    """
    exponent: tl.constexpr = 96
    pair: tl.constexpr = pair_of(OCTET, L)
    part: tl.constexpr = part_of(OCTET, L)
    shift: tl.constexpr = 8 - L.low - part * L.low if L.is_descending else part * L.low
    byte, eight = tl.arange(0, 4), tl.arange(0, 8)[None, None, None, :]
    place = tl.minimum(eight % 4, 2) * 8
    two = two_words(words, pair)
    if L.levels == "e2m1":
        total += e2m1_in_place(two, shift) * (fed * X_LIFT)
    elif L.levels != "":
        total += levels_in_place(two, shift, byte, L.levels) * fed
    else:
        total += in_place(two, ((1 << L.low) - 1) << shift, byte) * (fed * power_of_two(exponent - shift - place))
    if L.high_runs:
        bit: tl.constexpr = 16 * part + 8 * pair
        lower: tl.constexpr = 8 if bit == 24 else 0
        run = (bits >> lower) & (1 << (bit - lower + tl.arange(0, 8)))[None, None, :]
        factor = power_of_two(exponent + L.low + lower - bit - eight)
        total += run.to(tl.float32, bitcast=True)[None, :, :, :] * (fed * factor)
    elif L.high > 0:
        upper: tl.constexpr = L.step * part // 32 * L.high
        own = two_words(bits, pair) if L.step >= 32 else bits
        factor = power_of_two(exponent + L.low - upper - place)
        total += in_place(own, ((1 << L.high) - 1) << upper, byte) * (fed * factor)
    return total


@triton.jit
def scaled(product, all_x, scales, supers, first, L: tl.constexpr):
    """Return the products of weights, [N, R, G], from those of codes.

    Args:
        product: [N, R, G], of codes and x.  all_x: [N, 1, G], the sum of x.
        scales, supers: [R, 1] pointers to uint8, at the rows of the planes.
        first: [G] a weight that has the scale.
    """
    if L.levels == "":
        product *= LIFT
    elif L.levels == "e2m1":
        product *= LEVELS_LIFT
    if L.scale == "whole":
        product -= all_x * L.zero
    else:
        places = scales + (first // L.group * L.scale_nbytes)[None, :]
        scale, minimum = scale_and_minimum(places, supers, (first // 256)[None, :], L)
        product *= scale[None, :, :]
        if L.scale == "pair":
            product += all_x * minimum[None, :, :]
        elif L.scale == "bytes" or L.scale == "nibbles":
            product -= all_x * minimum[None, :, :]
        elif L.zero != 0:
            product -= all_x * (scale * L.zero)[None, :, :]
    return product


@triton.jit
def dot_rows(
    x, x_stride, tokens, matrix, first, rows, columns,
    L: tl.constexpr, N: tl.constexpr, R: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Return the products of all tokens with rows first .. first + R - 1: [N, R] float32; any numbers behind the end.

    Without the scale of an i2_s tensor (unpacking.tensor_scale).

    Args:
        x: pointer to any float dtype; token t begins at t * x_stride, at a multiple of 16 bytes.
        tokens: how many there are, at most N.
        matrix: pointer to uint8, at a multiple of 16 bytes.
        first: row; R is 1, 2, 4, 8 or 16.
        rows: O; what lies behind is not read.
        columns: I.
        N: a power of two.
        G: units that are read at once; 32 for each warp of the program keep every sum in its thread.
    """
    weights: tl.constexpr = 128 // L.low  # of a unit
    sharing: tl.constexpr = L.step // 16 if L.step > 16 else 1  # units whose weights alternate
    scales_of_unit: tl.constexpr = 1 if L.group > 16 else (2 if L.step < 16 else 8 // L.low)
    octets: tl.constexpr = weights // 8 // scales_of_unit  # of one scale
    row = tl.minimum(first + tl.arange(0, R), rows - 1)
    token = tl.minimum(tl.arange(0, N), tokens - 1)
    fed_rows = x + (token.to(tl.int64) * x_stride)[:, None, None, None]
    low = plane_rows(matrix, row, columns, 0, L).to(tl.pointer_type(tl.int32))[:, None, None]
    high = plane_rows(matrix, row, columns, 1, L).to(tl.pointer_type(tl.int32))
    scales = plane_rows(matrix, row, columns, 2, L)[:, None]
    supers = plane_rows(matrix, row, columns, 3, L)[:, None]
    units = columns // weights
    sums = tl.zeros((N, R, G), tl.float32)
    for begin in range(0, units, G):
        unit = begin + tl.arange(0, G)
        is_there = unit < units
        start = unit // sharing * (weights * sharing) + unit % sharing * 16  # the first weight
        places = (unit * 4)[None, :, None] + tl.arange(0, 4)[None, None, :]
        words = tl.load(low + places, mask=is_there[None, :, None], other=0)
        bits = words
        if L.low == 8:
            words ^= SIGNS  # stored as int8
        if L.high_runs:
            bits = tl.load(high[:, None] + unit[None, :], mask=is_there[None, :], other=0)[:, :, None]
        elif L.high > 0 and L.step >= 32:
            bits = high_words(high, start, is_there, 0, 4, L)
        for index in tl.static_range(scales_of_unit):
            total = tl.zeros((N, R, G, 8), tl.float32)
            all_x = tl.zeros((N, 1, G, 8), tl.float32)
            for octet in tl.static_range(index * octets, (index + 1) * octets):
                at = start + offset_of(octet, L)
                fed = tl.load(
                    fed_rows + at[None, None, :, None] + tl.arange(0, 8)[None, None, None, :],
                    mask=is_there[None, None, :, None],
                    other=0.0,
                ).to(tl.float32)
                if L.high > 0 and L.step < 32 and not L.high_runs:
                    bits = high_words(high, start, is_there, offset_of(octet, L), 2, L)
                total = eight_products(total, fed, words, bits, octet, L)
                all_x += fed
            known = tl.minimum(start, columns - weights) + offset_of(index * octets, L)
            sums += scaled(tl.sum(total, axis=3), tl.sum(all_x, axis=3), scales, supers, known, L)
    return tl.sum(sums, axis=2)
