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

from graphcore.kernels.gpu.unpacking import level_of, plane_rows, scale_and_minimum

X_LIFT = tl.constexpr(float(2**96))
LIFT = tl.constexpr(float(2**53))  # 149 - 96
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
def e2m1_in_place(words, shift, byte):
    """Return the E2M1 codes at bits shift .. shift + 3 of each byte, doubled, in multiples of 2^-127."""
    R: tl.constexpr = words.shape[0]
    G: tl.constexpr = words.shape[1]
    W: tl.constexpr = words.shape[2]
    words = words[:, :, :, None]
    place = byte[None, None, None, :] * 8 + shift
    left, right = tl.maximum(22 - place, 0), tl.maximum(place - 22, 0)
    size = tl.where(place < 22, words << left, words >> right) & 0x01C00000
    bits = size | ((words << (28 - place)) & -0x80000000)
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


@triton.jit
def two_words(words, SECOND: tl.constexpr):
    """Return words 0 and 1, or 2 and 3: [R, G, 4] -> [R, G, 2]."""
    R: tl.constexpr = words.shape[0]
    G: tl.constexpr = words.shape[1]
    first, second = tl.split(tl.permute(tl.reshape(words, (R, G, 2, 2)), (0, 1, 3, 2)))
    return second if SECOND else first


@triton.jit
def dot_rows(
    x,
    x_stride,
    tokens,
    matrix,
    first,
    rows,
    columns,
    L: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    G: tl.constexpr,
):
    """Return the products of all tokens with rows first .. first + R - 1: [N, R] float32; any numbers behind the end.

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
    slices: tl.constexpr = 8 // L.low
    weights: tl.constexpr = 16 * slices  # of a unit
    sharing: tl.constexpr = L.step // 16 if L.step > 16 else 1  # units whose weights alternate
    # Sums of one scale: whole units, or their slices, or their halves.
    outer: tl.constexpr = 1 if L.group > 16 else (2 if L.step < 16 else slices)
    inner: tl.constexpr = 2 * slices // outer
    needs_sum: tl.constexpr = L.zero != 0 or L.scale == "pair" or L.scale == "bytes" or L.scale == "nibbles"
    span: tl.constexpr = 256 // L.high if L.high > 0 else 256  # weights of 32 bytes of high codes

    row = tl.minimum(first + tl.arange(0, R), rows - 1)
    token = tl.minimum(tl.arange(0, N), tokens - 1)
    fed_rows = x + (token.to(tl.int64) * x_stride)[:, None, None, None]
    low = plane_rows(matrix, row, columns, 0, L).to(tl.pointer_type(tl.int32))[:, None, None]
    high = plane_rows(matrix, row, columns, 1, L).to(tl.pointer_type(tl.int32))
    scales = plane_rows(matrix, row, columns, 2, L)[:, None]
    supers = plane_rows(matrix, row, columns, 3, L)[:, None]
    word, byte, eight = tl.arange(0, 4), tl.arange(0, 4), tl.arange(0, 8)
    units = columns // weights
    exponent: tl.constexpr = 96
    sums = tl.zeros((N, R, G), tl.float32)
    for begin in range(0, units, G):
        unit = begin + tl.arange(0, G)
        is_there = unit < units
        is_unit = is_there[None, :, None]
        start = unit // sharing * (weights * sharing) + unit % sharing * 16  # the first weight
        words = tl.load(low + (unit * 4)[None, :, None] + word[None, None, :], mask=is_unit, other=0)
        if L.low == 8:
            words ^= -0x7F7F7F80  # 0x80808080: stored as int8
        if L.high > 0:
            if L.high_runs:
                bits = tl.load(high[:, None] + unit[None, :], mask=is_there[None, :], other=0)[:, :, None]
            elif L.step >= 32:
                places = (start // span * 8 + start % 32 // 4)[None, :, None] + word[None, None, :]
                bits = tl.load(high[:, None, None] + places, mask=is_unit, other=0)
                bits = bits >> (start % span // 32 * L.high)[None, :, None]
        for a in tl.static_range(outer):
            total = tl.zeros((N, R, G, 8), tl.float32)
            x_sum = tl.zeros((N, 1, G, 8), tl.float32)
            for b in tl.static_range(inner):
                pair: tl.constexpr = a if outer == 2 and L.step < 16 else b % 2
                part: tl.constexpr = (
                    a
                    if outer == slices and L.step >= 16 and outer > 1
                    else b // (1 if outer == 2 and L.step < 16 else 2)
                )
                shift: tl.constexpr = 8 - L.low - part * L.low if L.is_descending else part * L.low
                at = start + (pair * (16 if L.step < 16 else 8) + part * L.step)
                fed = tl.load(
                    fed_rows + at[None, None, :, None] + eight[None, None, None, :],
                    mask=is_there[None, None, :, None],
                    other=0.0,
                ).to(tl.float32)
                two = two_words(words, pair)
                place = tl.minimum(eight % 4, 2)[None, None, None, :] * 8
                if L.levels == "":
                    total += in_place(two, ((1 << L.low) - 1) << shift, byte) * (
                        fed * power_of_two(exponent - shift - place)
                    )
                elif L.levels == "e2m1":
                    total += e2m1_in_place(two, shift, byte) * (fed * X_LIFT)
                else:
                    total += levels_in_place(two, shift, byte, L.levels) * fed
                if L.high > 0:
                    if L.high_runs:
                        bit: tl.constexpr = 16 * part + 8 * pair
                        lower: tl.constexpr = 8 if bit == 24 else 0
                        run = ((bits >> lower) & (1 << (bit - lower + eight))[None, None, :]).to(
                            tl.float32, bitcast=True
                        )
                        total += run[None, :, :, :] * (
                            fed * power_of_two(exponent + L.low + lower - bit - eight)[None, None, None, :]
                        )
                    else:
                        if L.step < 32:
                            if b % 2 == 0:
                                places = (start // span * 8 + (start % 32 + part * L.step) // 4)[None, :, None] + word[
                                    None, None, :
                                ]
                                bits = tl.load(high[:, None, None] + places, mask=is_unit, other=0)
                                bits = bits >> (start % span // 32 * L.high)[None, :, None]
                        upper: tl.constexpr = L.step * part // 32 * L.high
                        total += in_place(two_words(bits, pair), ((1 << L.high) - 1) << upper, byte) * (
                            fed * power_of_two(exponent + L.low - upper - place)
                        )
                if needs_sum:
                    x_sum += fed
            product = tl.sum(total, axis=3)
            if L.levels == "":
                product *= LIFT
            elif L.levels == "e2m1":
                product *= LEVELS_LIFT
            all_x = tl.sum(x_sum, axis=3)
            if L.scale == "whole":
                sums += product - all_x * L.zero
            else:
                inside = tl.minimum(start, columns - weights) + (a * 16 if L.step < 16 else a * L.step)
                scale, minimum = scale_and_minimum(
                    scales + (inside // L.group * L.scale_nbytes)[None, :], supers, (inside // 256)[None, :], L
                )
                sums += product * scale[None, :, :]
                if L.scale == "pair":
                    sums += all_x * minimum[None, :, :]
                elif needs_sum and L.zero == 0:
                    sums -= all_x * minimum[None, :, :]
                elif needs_sum:
                    sums -= all_x * (scale * L.zero)[None, :, :]
    return tl.sum(sums, axis=2)
