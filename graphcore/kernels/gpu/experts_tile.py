"""Tiles of an expert's matrix, unpacked for tensor cores.

Legend: O rows, I columns, R rows of a tile, K its columns.

Formats whose bytes hold weight j and weight j + 16 of 32 (mxfp4, q4_0, ...) are read a word of eight codes at a time;
others weight by weight (unpacking.py).
"""

import triton
import triton.language as tl

from graphcore.kernels.gpu.unpacking import level_of, plane_rows, scale_and_minimum, weights_at

TWO_TO_127 = tl.constexpr(float(2**127))


@triton.jit
def tile_at(matrix, rows, begin, columns, L: tl.constexpr, K: tl.constexpr):
    """Return weights of columns begin .. begin + K - 1, float32; any numbers behind the last column.

    Args:
        matrix: pointer to uint8.
        rows: [R], 0 .. O - 1.
        begin: a multiple of K.  K: a multiple of 32.

    Returns:
        [R, K] float32, without the scale of an i2_s tensor.
    """
    if L.low == 4 and L.high == 0 and L.step == 16 and L.group == 32:
        tile = _halves_at(matrix, rows, begin, columns, L, K)
    else:
        at = tl.minimum(begin + tl.arange(0, K), columns - 1)
        tile = weights_at(matrix, rows[:, None], at[None, :], columns, L)
    return tile


@triton.jit
def _halves_at(matrix, rows, begin, columns, L: tl.constexpr, K: tl.constexpr):
    units: tl.constexpr = K // 32
    R: tl.constexpr = rows.shape[0]
    levels: tl.constexpr = L.levels  # as in packed_dot.py
    unit = tl.minimum(begin // 32 + tl.arange(0, units), columns // 32 - 1)
    low = plane_rows(matrix, rows, columns, 0, L)[:, None, None]
    codes = tl.load(low + (unit * 16)[None, :, None] + tl.arange(0, 16)[None, None, :]).to(tl.int32)  # [R, units, 16]
    both = tl.join(codes & 15, codes >> 4)  # [R, units, 16, 2]
    if L.levels == "e2m1":  # doubled; a zero may be negative here, which no product notices
        value = ((both & 7) << 22 | (both & 8) << 28).to(tl.float32, bitcast=True) * TWO_TO_127
    elif L.levels != "":
        value = level_of(both, levels)
    else:
        value = (both - L.zero).to(tl.float32)
    scales = plane_rows(matrix, rows, columns, 2, L)[:, None] + (unit * L.scale_nbytes)[None, :]
    supers = plane_rows(matrix, rows, columns, 3, L)[:, None]
    scale, minimum = scale_and_minimum(scales, supers, (unit // 8)[None, :], L)
    value *= scale[:, :, None, None]
    if L.scale == "pair":
        value += minimum[:, :, None, None]
    elif L.scale == "bytes":
        value -= minimum[:, :, None, None]
    return tl.reshape(tl.permute(value, (0, 1, 3, 2)), (R, K))
