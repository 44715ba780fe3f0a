"""Device functions that read packed matrices (kernels/gpu/layout.py) inside other kernels.

Legend: O rows, I columns.

    weights_at     single weights, bit-exact with the format, at any rows and columns
    plane_rows     the addresses of a plane's rows, for kernels that read them in their own way; `rows_from` of a
                   program's rows

`L` is the format's DeviceLayout. A tensor's own scale (i2_s) is not in the rows; `tensor_scale` reads it.
"""

import triton
import triton.language as tl

from graphcore.encodings import FP4_LEVELS, IQ4_LEVELS, NF4_LEVELS
from graphcore.kernels import packing

GROUP_ROWS = tl.constexpr(packing.GROUP_ROWS)


def _word(levels: tuple[int, ...]) -> tl.constexpr:
    """Return four levels as the bytes of a word: level q of all of them is byte q % 4 of word q / 4."""
    return tl.constexpr(int.from_bytes(bytes(level & 255 for level in levels), "little", signed=True))


IQ4_0, IQ4_1, IQ4_2, IQ4_3 = (_word(IQ4_LEVELS[start : start + 4]) for start in (0, 4, 8, 12))
NF4, FP4 = tl.constexpr(NF4_LEVELS), tl.constexpr(FP4_LEVELS[:8])


@triton.jit
def row_nbytes(columns, PLANE: tl.constexpr, L: tl.constexpr):
    """Return the bytes of a row in one plane (0 low codes, 1 high, 2 scales, 3 supers), or in all planes for 4.

    The terms show the compiler which power of two a row is a multiple of: only then does it read 16 bytes at once.
    """
    low = columns // (128 // L.low) * 16
    high = columns // 32 * (4 * L.high) if L.high_runs else columns // 256 * (32 * L.high)
    scales, supers = columns // L.group * L.scale_nbytes, columns // L.super_weights * L.super_nbytes
    if PLANE == 0:
        nbytes = low
    elif PLANE == 1:
        nbytes = high
    elif PLANE == 2:
        nbytes = scales
    elif PLANE == 3:
        nbytes = supers
    else:
        nbytes = low + high + scales + supers
    return nbytes


@triton.jit
def plane_rows(matrix, rows, columns, PLANE: tl.constexpr, L: tl.constexpr):
    """Return pointers to uint8, at the beginnings of a plane's rows."""
    before = columns * 0
    for plane in tl.static_range(PLANE):
        before += row_nbytes(columns, plane, L)
    group = (rows // GROUP_ROWS).to(tl.int64) * row_nbytes(columns, 4, L)
    return matrix + (group + before) * GROUP_ROWS + rows % GROUP_ROWS * row_nbytes(columns, PLANE, L)


@triton.jit
def rows_from(matrix, first, rows, columns, PLANE: tl.constexpr, L: tl.constexpr, R: tl.constexpr):
    """Return pointers to uint8, at the beginnings of rows first .. first + R - 1 in a plane; those past the end: some.

    Args:
        first: a multiple of R. Up to sixteen rows then lie in one group, which has memory for sixteen, and one address
            serves all of them.
    """
    if R > GROUP_ROWS:
        at = plane_rows(matrix, tl.minimum(first + tl.arange(0, R), rows - 1), columns, PLANE, L)
    else:
        at = plane_rows(matrix, first, columns, PLANE, L) + tl.arange(0, R) * row_nbytes(columns, PLANE, L)
    return at


@triton.jit
def tensor_scale(matrix, rows, columns, L: tl.constexpr):
    """Return the scale of the whole tensor, float32; 1 for formats that have none."""
    scale = 1.0
    if L.scale == "whole":
        end = tl.cdiv(rows, GROUP_ROWS).to(tl.int64) * row_nbytes(columns, 4, L) * GROUP_ROWS
        scale = tl.load((matrix + end).to(tl.pointer_type(tl.float32)))
    return scale


@triton.jit
def half_power(exponent):
    """Return 2^(exponent - 128), subnormals included: int32 0 .. 255 -> float32."""
    bits = tl.where(exponent < 2, 0x200000 << exponent, (exponent - 1) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def half_e4m3(byte):
    """Return half of an unsigned E4M3: int32 -> float32; bit 7 is ignored, and 0x7f gives 0."""
    as_half = ((byte & 0x7F) << 7).to(tl.int16).to(tl.float16, bitcast=True)  # the value times 2^-8
    return tl.where(byte == 0x7F, 0.0, as_half.to(tl.float32) * 128)


@triton.jit
def grid_level(code, LEVELS: tl.constexpr):
    """Return the level of a code of `quant.level_formats`, times the unit of its formats: int32 -> float32, exact."""
    if LEVELS == "iq1":
        value = ((code & 3) - 1).to(tl.float32) + tl.where(code & 4 != 0, -0.125, 0.125)
    elif LEVELS == "iq2":
        size = tl.where(code & 2 != 0, 5.375, tl.where(code & 1 != 0, 3.125, 1.0))
        value = tl.where(code & 4 != 0, -size, size)
    else:
        size = (code & 7).to(tl.float32) * 2 + 1
        if LEVELS == "iq3_xxs":
            size = tl.where(code & 7 == 7, 15.5, size)
        value = tl.where(code & 8 != 0, -size, size)
    return value


@triton.jit
def one_of_eight(code, LEVELS: tl.constexpr, FIRST: tl.constexpr):
    """Return LEVELS[FIRST + code % 8]: int32 -> float32, in seven selections."""
    is_odd, has_two, has_four = code & 1 != 0, code & 2 != 0, code & 4 != 0
    first = tl.where(is_odd, LEVELS[FIRST + 1], LEVELS[FIRST])
    second = tl.where(is_odd, LEVELS[FIRST + 3], LEVELS[FIRST + 2])
    third = tl.where(is_odd, LEVELS[FIRST + 5], LEVELS[FIRST + 4])
    fourth = tl.where(is_odd, LEVELS[FIRST + 7], LEVELS[FIRST + 6])
    return tl.where(has_four, tl.where(has_two, fourth, third), tl.where(has_two, second, first))


@triton.jit
def float_level(code, LEVELS: tl.constexpr):
    """Return the level of a code of `Encoding.float_levels`: int32 -> float32, exact."""
    if LEVELS == "fp8":  # as float16 the value times 2^-8, subnormals included
        bits = ((code & 0x7F) << 7) | ((code & 0x80) << 8)
        value = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256
    elif LEVELS == "fp4":
        size = one_of_eight(code, FP4, 0)
        value = tl.where(code & 8 != 0, size * -1.0, size)  # -size is 0 - size, which has no negative zero
    else:
        value = tl.where(code & 8 != 0, one_of_eight(code, NF4, 8), one_of_eight(code, NF4, 0))
    return value


@triton.jit
def level_of(code, LEVELS: tl.constexpr):
    """Return the level of a code, times the unit of its format (iq1, iq2, iq3): int32 -> float32."""
    if LEVELS == "iq1" or LEVELS == "iq2" or LEVELS == "iq3_xxs" or LEVELS == "iq3_s":
        return grid_level(code, LEVELS)
    if LEVELS == "fp8" or LEVELS == "fp4" or LEVELS == "nf4":
        return float_level(code, LEVELS)
    if LEVELS == "e2m1":  # doubled: 0, 1, 2, 3, 4, 6, 8, 12
        bits = ((code & 7) << 22).to(tl.float32, bitcast=True)  # the value times 2^-127
        size = bits * 1.7014118346046923e38  # 2^127
        return tl.where(code > 8, -size, size)
    low = tl.where(code & 4 != 0, IQ4_1, IQ4_0)
    high = tl.where(code & 4 != 0, IQ4_3, IQ4_2)
    word = tl.where(code & 8 != 0, high, low)
    return ((word << (24 - (code & 3) * 8)) >> 24).to(tl.float32)


@triton.jit
def code_at(matrix, rows, at, columns, L: tl.constexpr):
    """Return single codes, int32."""
    slices: tl.constexpr = 8 // L.low
    sharing: tl.constexpr = L.step // 16 if L.step > 16 else 1  # number of vectors whose weights alternate
    chunk, within = at // (16 * slices * sharing), at % (16 * slices * sharing)
    if L.low == 8:
        byte, shift = at, 0
    elif L.step < 16:
        byte = chunk * 16 + within // (slices * L.step) * L.step + within % L.step
        shift = within // L.step % slices * L.low
    else:
        byte = chunk * (16 * sharing) + within % L.step
        shift = within // L.step * L.low
    if L.is_descending:
        shift = 8 - L.low - shift
    code = tl.load(plane_rows(matrix, rows, columns, 0, L) + byte).to(tl.int32)
    code = (code >> shift) & ((1 << L.low) - 1)
    if L.low == 8:
        code ^= 128  # stored as int8
    if L.high > 0:
        span: tl.constexpr = 256 // L.high  # number of weights in 32 bytes
        if L.high_runs:
            byte, shift = at // 8, at % 8
        else:
            byte, shift = at // span * 32 + at % 32, at % span // 32 * L.high
        high = tl.load(plane_rows(matrix, rows, columns, 1, L) + byte).to(tl.int32)
        code |= ((high >> shift) & ((1 << L.high) - 1)) << L.low
    return code


@triton.jit
def weights_at(matrix, rows, at, columns, L: tl.constexpr):
    """Return weights, float32, in the shape that `rows` and `at` broadcast to.

    They are bit-exact with the format if the launch has enable_fp_fusion=False; without the scale of an i2_s tensor.

    Args:
        matrix: pointer to uint8, at a multiple of 16 bytes.
        rows: int, 0 .. O - 1.  at: int, 0 .. I - 1; they broadcast against each other.
        columns: I.
    """
    code = code_at(matrix, rows, at, columns, L)
    levels: tl.constexpr = L.levels  # as in multiply_add.py
    value = level_of(code, levels) if L.levels != "" else (code - L.zero).to(tl.float32)
    if L.scale != "whole":
        scales = plane_rows(matrix, rows, columns, 2, L) + at // L.group * L.scale_nbytes
        scale, term = scale_and_term(scales, plane_rows(matrix, rows, columns, 3, L), at // L.super_weights, L)
        value = scaled_weights(value, scale, term, L)
    return value


@triton.jit
def scaled_weights(value, scale, term, L: tl.constexpr):
    """Return weights from codes minus the format's zero, or levels, all float32; rounded as in the format."""
    if L.term == "zero":
        value -= term  # exact, so that a weight is rounded once
    value *= scale
    if L.term == "added":
        value += term
    elif L.term == "subtracted":
        value -= term
    return value


@triton.jit
def half_of(word, HIGH: tl.constexpr):
    """Return the lower or the upper float16 of words: int32 -> float32."""
    return (word >> (16 * HIGH)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def scale_and_term(scales, supers, block, L: tl.constexpr):
    """Return the factor of a group's codes, and its `DeviceLayout.term`, 0.0 for none; float32.

    Args:
        scales: pointers to uint8, at the groups' scales.
        supers: pointers to uint8, at the rows of the plane.  block: index of the group's `super_weights` weights.
    """
    term = 0.0
    if L.term == "zero":
        term = tl.load(supers + block).to(tl.float32)
    elif L.super_nbytes == 4:
        both = tl.load((supers + block * 4).to(tl.pointer_type(tl.int32)))
        unit = half_of(both, 0)
    elif L.super_nbytes > 0:
        unit = tl.load((supers + block * L.super_nbytes).to(tl.pointer_type(tl.float16))).to(tl.float32)
    if L.scale == "half" or L.scale == "half_zero":
        scale = tl.load(scales.to(tl.pointer_type(tl.float16))).to(tl.float32)
    elif L.scale == "float" or L.scale == "float_zero":
        scale = tl.load(scales.to(tl.pointer_type(tl.float32)))
    elif L.scale == "pair":
        halves = tl.load(scales.to(tl.pointer_type(tl.int32)))
        scale, term = half_of(halves, 0), half_of(halves, 1)
    elif L.scale == "e8m0":
        scale = half_power(tl.load(scales).to(tl.int32))
    elif L.scale == "e4m3":
        scale = half_e4m3(tl.load(scales).to(tl.int32))
    elif L.scale == "signed":
        scale = unit * tl.load(scales).to(tl.int8, bitcast=True).to(tl.float32)
    else:
        if L.scale == "bytes":
            steps = tl.load(scales.to(tl.pointer_type(tl.int16))).to(tl.int32)
            offsets = (steps >> 8) & 255
            steps &= 255
        else:
            steps = tl.load(scales).to(tl.int32)
            offsets = steps >> 4
            steps &= 15
        scale = unit * steps.to(tl.float32)
        term = half_of(both, 1) * offsets.to(tl.float32)
    return scale, term
