"""Levels of the codes in a word's bytes, for products: as few instructions as each kind of level allows.

Legend: R rows, G vectors of a row, W words of a vector.

    e2m1, e4m3     bits are moved to where a float16 has them, in both halves of a word at once
    fp4            three bits choose the upper byte of a float16 (192 times a level needs no lower one), for four codes
                   in one instruction, which permutes bytes; the sign is a fourth bit
    nf4            four bits choose each of a float32's four bytes in this way; then the bytes of each are joined
    iq1, iq2, ...  one level at a time (planes.level_of)
"""

import struct

import triton
import triton.language as tl

from graphcore.encodings import FP4_LEVELS, NF4_LEVELS
from graphcore.kernels.gpu.packed.planes import half_of, level_of

IS_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))  # the interpreter cannot run machine code
WIDEN = tl.constexpr("{.reg .b16 lo, hi; mov.b32 {lo, hi}, $2; cvt.f32.f16 $0, lo; cvt.f32.f16 $1, hi;}")
E2M1_SIZES, E4M3_SIZES = tl.constexpr(0x0E000E00), tl.constexpr(0x3F803F80)
HALF_SIGNS = tl.constexpr(-0x7FFF8000)  # 0x80008000
BYTE_SIGNS, UPPER_BYTES = tl.constexpr(-0x7F7F7F80), tl.constexpr(-0x00FF0100)  # 0x80808080, 0xff00ff00
# Factors for codes in place: doubled e2m1 has a unit of 2^-15, e4m3 one of 2^-8, and fp4 one of 192.
E2M1_LIFT, E4M3_LIFT, FP4_LIFT = tl.constexpr(float(2**15)), tl.constexpr(float(2**8)), tl.constexpr(1 / 192)


def _words(stored: bytes) -> tuple[int, ...]:
    """Return bytes as words, the first one lowest."""
    return struct.unpack(f"<{len(stored) // 4}i", stored)


def _halves() -> tuple[int, ...]:
    """Return the upper bytes of 192 times fp4's eight sizes, as float16, in two words."""
    stored = struct.pack("<8e", *(round(192 * level) for level in FP4_LEVELS[:8]))
    assert not any(stored[::2]), "192 times a level has two bits"
    return _words(stored[1::2])


# Of nf4's levels, as float32, all lowest bytes, then all second ones, ...: four words each.
NF4_BYTES = tl.constexpr(_words(b"".join(struct.pack("<16f", *NF4_LEVELS)[byte::4] for byte in range(4))))
FP4_BYTES = tl.constexpr(_halves())


@triton.jit
def widened(words):
    """Return the lower and the upper float16 of words: int32 -> two float32.

    The compiler's own code takes one more instruction for each: it joins halves of two words first.
    """
    if IS_INTERPRETED:
        low, high = half_of(words, 0), half_of(words, 1)
    else:
        low, high = tl.inline_asm_elementwise(
            WIDEN, "=f,=f,r", [words], dtype=(tl.float32, tl.float32), is_pure=True, pack=1
        )
    return low, high


@triton.jit
def e2m1_in_place(words, SHIFT: tl.constexpr):
    """Return the E2M1 codes at bits SHIFT .. SHIFT + 3 of each byte, doubled, in multiples of 2^-15.

    Two codes at once become float16 in the halves of a word, s...eem.........; one instruction widens each.

    Args:
        words: [R, G, W] int32.

    Returns:
        [1, R, G, 4 W] float32.
    """
    R: tl.constexpr = words.shape[0]
    G: tl.constexpr = words.shape[1]
    W: tl.constexpr = words.shape[2]
    place = tl.arange(0, 2)[None, None, None, :] * 8 + SHIFT  # bit of a code in its half
    words = words[:, :, :, None]
    sizes = tl.where(place < 9, words << tl.maximum(9 - place, 0), words >> tl.maximum(place - 9, 0))
    halves = (sizes & E2M1_SIZES) | ((words << (12 - place)) & HALF_SIGNS)
    both = tl.join(*widened(halves))
    return tl.reshape(tl.permute(both, (0, 1, 2, 4, 3)), (1, R, G, 4 * W))  # byte = 2 * upper + place


@triton.jit
def e4m3_in_place(words):
    """Return the E4M3 in each byte, in multiples of 2^-8: two at once become float16, as in `e2m1_in_place`.

    Args:
        words: [R, G, W] int32.

    Returns:
        [1, R, G, 4 W] float32.
    """
    R: tl.constexpr = words.shape[0]
    G: tl.constexpr = words.shape[1]
    W: tl.constexpr = words.shape[2]
    upper = words[:, :, :, None] << (8 - tl.arange(0, 2)[None, None, None, :] * 8)  # a code in a half's upper byte
    halves = ((upper >> 1) & E4M3_SIZES) | (upper & HALF_SIGNS)
    both = tl.join(*widened(halves))
    return tl.reshape(tl.permute(both, (0, 1, 2, 4, 3)), (1, R, G, 4 * W))


@triton.jit
def levels_in_place(words, shift, byte, LEVELS: tl.constexpr, BITS: tl.constexpr):
    """Return the levels of the codes of BITS bits at bit `shift` of each byte."""
    R: tl.constexpr = words.shape[0]
    G: tl.constexpr = words.shape[1]
    W: tl.constexpr = words.shape[2]
    code = words[:, :, :, None] >> (byte[None, None, None, :] * 8 + shift) & ((1 << BITS) - 1)
    return tl.reshape(level_of(code, LEVELS), (1, R, G, 4 * W))


@triton.jit
def permuted(low, high, places):
    """Return four bytes: nibble i of `places`, 0 .. 7, says which byte of `low`, or of `high` from 4 on, is byte i.

    Args:
        low, high, places: int32 that broadcast against each other; the upper half of `places` has no effect.
    """
    if IS_INTERPRETED:
        none = ((low | high | places) * 0).to(tl.int64)
        both = tl.expand_dims((none + high) << 32 | (none + low) & 0xFFFFFFFF, -1)
        index = tl.arange(0, 4)
        place = (tl.expand_dims(none + places, -1) >> (4 * index)) & 7
        word = tl.sum(((both >> (place * 8)) & 255) << (8 * index), axis=-1).to(tl.int32)
    else:
        word = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, places], dtype=tl.int32, is_pure=True, pack=1
        )
    return word


@triton.jit
def four_nibbles(words, SHIFT: tl.constexpr):
    """Return the codes at bits SHIFT .. SHIFT + 3 of each byte side by side, in the lower half of each word."""
    codes = (words >> SHIFT) & 0x0F0F0F0F
    return permuted(codes | (codes >> 4), 0, 0x4420)


@triton.jit
def fp4_in_place(words, SHIFT: tl.constexpr):
    """Return 192 times the fp4 levels of the codes at bits SHIFT .. SHIFT + 3 of each byte, exact in 16 bits.

    Args:
        words: [R, G, W] int32.

    Returns:
        [1, R, G, 4 W] float32.
    """
    R: tl.constexpr = words.shape[0]
    G: tl.constexpr = words.shape[1]
    W: tl.constexpr = words.shape[2]
    sizes = permuted(FP4_BYTES[0], FP4_BYTES[1], four_nibbles(words, SHIFT) & 0x7777)
    uppers = sizes | ((words << (4 - SHIFT)) & BYTE_SIGNS)
    halves = (uppers[:, :, :, None] << (8 - tl.arange(0, 2)[None, None, None, :] * 8)) & UPPER_BYTES
    both = tl.join(*widened(halves))
    return tl.reshape(tl.permute(both, (0, 1, 2, 4, 3)), (1, R, G, 4 * W))


@triton.jit
def nf4_byte(small, upper, BYTE: tl.constexpr):
    """Return byte BYTE of the levels of four codes: indexes among the lower eight levels, and places as in `permuted`.

    Args:
        small: int32, nibbles of three bits.  upper: int32, nibble i is i, or i + 4 for a level of the upper eight.
    """
    lower_half = permuted(NF4_BYTES[4 * BYTE], NF4_BYTES[4 * BYTE + 1], small)
    upper_half = permuted(NF4_BYTES[4 * BYTE + 2], NF4_BYTES[4 * BYTE + 3], small)
    return permuted(lower_half, upper_half, upper)


@triton.jit
def nf4_in_place(words, SHIFT: tl.constexpr):
    """Return the nf4 levels of the codes at bits SHIFT .. SHIFT + 3 of each byte, exact.

    Args:
        words: [R, G, W] int32.

    Returns:
        [1, R, G, 4 W] float32.
    """
    R: tl.constexpr = words.shape[0]
    G: tl.constexpr = words.shape[1]
    W: tl.constexpr = words.shape[2]
    codes = four_nibbles(words, SHIFT)
    small, upper = codes & 0x7777, ((codes & 0x8888) >> 1) | 0x3210
    zero, one = nf4_byte(small, upper, 0), nf4_byte(small, upper, 1)
    two, three = nf4_byte(small, upper, 2), nf4_byte(small, upper, 3)
    lows, highs = permuted(zero, one, 0x5140), permuted(two, three, 0x5140)  # of the first two codes
    first, second = permuted(lows, highs, 0x5410), permuted(lows, highs, 0x7632)
    lows, highs = permuted(zero, one, 0x7362), permuted(two, three, 0x7362)
    third, fourth = permuted(lows, highs, 0x5410), permuted(lows, highs, 0x7632)
    levels = tl.join(tl.join(first, third), tl.join(second, fourth))
    return tl.reshape(levels, (1, R, G, 4 * W)).to(tl.float32, bitcast=True)
