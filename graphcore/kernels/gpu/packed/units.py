"""Units of a packed matrix in registers: 16 bytes of low codes, one load of a thread, and the high codes beside them.

Legend: R rows, G units of a row. Octet: eight consecutive weights of a unit, in two of its words, in one slice of bits.

If a function of constants is not called by a kernel that is being compiled, Triton 3.6 passes it a layout without the
names of its fields, so each such function names them again.
"""

import triton
import triton.language as tl

from graphcore.kernels.device_layout import DeviceLayout
from graphcore.kernels.gpu.packed.planes import plane_rows

SIGNS = tl.constexpr(-0x7F7F7F80)  # 0x80808080


@triton.constexpr_function
def weights_of_unit(layout: DeviceLayout) -> int:
    """Return the number of weights in 16 bytes of low codes."""
    layout = DeviceLayout(*layout)
    return 128 // layout.low


@triton.constexpr_function
def scales_of_unit(layout: DeviceLayout) -> int:
    """Return the number of scales of a unit's weights; octets that share a scale follow each other."""
    layout = DeviceLayout(*layout)
    if layout.group > 16:
        return 1
    return 2 if layout.step < 16 else 8 // layout.low


@triton.constexpr_function
def pair_of(octet: int, layout: DeviceLayout) -> int:
    """Return which two of a unit's four words hold an octet; octets that share a scale follow each other."""
    layout = DeviceLayout(*layout)
    return octet // (8 // layout.low) if layout.step < 16 else octet % 2


@triton.constexpr_function
def part_of(octet: int, layout: DeviceLayout) -> int:
    """Return which slice of the words' bits holds an octet of a unit."""
    layout = DeviceLayout(*layout)
    return octet % (8 // layout.low) if layout.step < 16 else octet // 2


@triton.constexpr_function
def offset_of(octet: int, layout: DeviceLayout) -> int:
    """Return the distance of an octet's first weight from the unit's first, in weights."""
    layout = DeviceLayout(*layout)
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
def high_words(matrix, row, columns, start, FIRST: tl.constexpr, COUNT: tl.constexpr, L: tl.constexpr):
    """Return words of high codes, the bits of the unit's first slice lowest: [R, G, COUNT] int32.

    Args:
        row: [R].
        start: [G] first weight of each unit.
        FIRST: offset from `start` of the first weight that the words hold.
    """
    span: tl.constexpr = 256 // L.high  # weights of 32 bytes
    high = plane_rows(matrix, row, columns, 1, L).to(tl.pointer_type(tl.int32))
    places = (start // span * 8 + start % 32 // 16 * 4 + FIRST // 4)[None, :, None] + tl.arange(0, COUNT)[None, None, :]
    bits = tl.load(high[:, None, None] + places)
    return bits >> (start % span // 32 * L.high)[None, :, None]


@triton.jit
def first_weight(unit, L: tl.constexpr):
    """Return the column of a unit's first weight; if step is over 16, some units share their weights."""
    sharing: tl.constexpr = L.step // 16 if L.step > 16 else 1
    return unit // sharing * (weights_of_unit(L) * sharing) + unit % sharing * 16


@triton.jit
def unit_words(matrix, row, columns, unit, L: tl.constexpr):
    """Return the words of low codes, [R, G, 4] int32, and of high codes if one load serves all octets, else [R, G, 1].

    Args:
        row: [R].
        unit: [G], units that exist; a mask would take instructions to clear registers.
    """
    low = plane_rows(matrix, row, columns, 0, L).to(tl.pointer_type(tl.int32))
    places = (unit * 4)[None, :, None] + tl.arange(0, 4)[None, None, :]
    words = tl.load(low[:, None, None] + places)
    bits = words
    if L.low == 8:
        words ^= SIGNS  # stored as int8
    if L.high_runs:
        high = plane_rows(matrix, row, columns, 1, L).to(tl.pointer_type(tl.int32))
        bits = tl.load(high[:, None] + unit[None, :])[:, :, None]
    elif L.high > 0 and L.step >= 32:
        bits = high_words(matrix, row, columns, first_weight(unit, L), 0, 4, L)
    return words, bits


@triton.jit
def octet_bits(bits, matrix, row, columns, start, OCTET: tl.constexpr, L: tl.constexpr):
    """Return the words of an octet's high codes: [R, G, 2] int32; [R, G, 1] if they are stored as runs."""
    if L.high > 0 and not L.high_runs:
        if L.step >= 32:
            bits = two_words(bits, pair_of(OCTET, L))
        else:
            bits = high_words(matrix, row, columns, start, offset_of(OCTET, L), 2, L)
    return bits


@triton.jit
def eight_codes(words, bits, OCTET: tl.constexpr, L: tl.constexpr):
    """Return the codes of an octet: [R, G, 8] int32.

    Args:
        words: [R, G, 4] int32, low codes.  bits: high codes, from `octet_bits`.
    """
    R: tl.constexpr = words.shape[0]
    G: tl.constexpr = words.shape[1]
    part: tl.constexpr = part_of(OCTET, L)
    shift: tl.constexpr = 8 - L.low - part * L.low if L.is_descending else part * L.low
    byte = tl.arange(0, 4)[None, None, None, :] * 8
    two = two_words(words, pair_of(OCTET, L))[:, :, :, None]
    codes = tl.reshape((two >> (byte + shift)) & ((1 << L.low) - 1), (R, G, 8))
    if L.high_runs:
        run: tl.constexpr = 16 * part + 8 * pair_of(OCTET, L)
        codes |= ((bits >> (run + tl.arange(0, 8))[None, None, :]) & 1) << L.low
    elif L.high > 0:
        upper: tl.constexpr = L.step * part // 32 * L.high
        high = (bits[:, :, :, None] >> (byte + upper)) & ((1 << L.high) - 1)
        codes |= tl.reshape(high, (R, G, 8)) << L.low
    return codes
