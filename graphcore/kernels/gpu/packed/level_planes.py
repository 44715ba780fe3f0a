"""Planes of the formats of levels (IQ1 to IQ3), made on the device from a file's blocks, which crossed the link.

Legend: N blocks of 256 weights; B blocks of a program.

    block in the file:  numbers of grid entries, signs, scales, d          50 to 110 bytes
    its planes:         low codes | high codes | scales | supers           114 or 138 bytes (kernels/gpu/layout.py)

The result has the bits of `DevicePacking.pack`: integers are moved, none is computed with. A program writes words of
four bytes, each from the grid entries of its weights; neighbouring threads read one entry together. The fields of a
block are described in each format's module (quant/formats/).
"""

import triton
import triton.language as tl
from torch import Tensor

from graphcore.kernels.custom_ops import register_implementation
from graphcore.kernels.gpu.device_packing import DevicePacking
from graphcore.kernels.packing import GROUP_ROWS

BLOCKS = 32  # of a program: four words of low codes for each thread
WARPS = 4
INTERPRETED_BLOCKS = 4096  # Triton's interpreter runs one program after another, so a few large ones are best
ROWS = tl.constexpr(GROUP_ROWS)
EVEN = ("iq2_xxs", "iq2_xs", "iq3_xxs")  # formats with seven signs for eight weights: the eighth makes them even


@triton.jit(do_not_specialize=["num_blocks", "padded_blocks", "row_blocks"])  # one compilation for each format
def _write_planes(
    file, grid, out, num_blocks, padded_blocks, row_blocks,
    F: tl.constexpr, W: tl.constexpr, L: tl.constexpr, IS_EVEN: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Write the planes of B blocks of the format F, of W bytes each; blocks of padding rows become zeros."""
    low_nbytes: tl.constexpr = 32 * L.low  # of a block
    high_nbytes: tl.constexpr = 32 * L.high
    scale_nbytes: tl.constexpr = 256 // L.group
    index = tl.program_id(0) * B + tl.arange(0, B)
    is_there, is_block = index < padded_blocks, (index < num_blocks)[:, None]
    block = (file + tl.minimum(index, num_blocks - 1).to(tl.int64) * W)[:, None]
    group_blocks = row_blocks * ROWS
    place = index % group_blocks
    plane = out + (index // group_blocks).to(tl.int64) * (group_blocks * (low_nbytes + high_nbytes + scale_nbytes + 2))
    words = _low_words(block, grid, F, L, IS_EVEN)
    _store_words(plane + place * low_nbytes, words, is_there, is_block)
    plane += group_blocks * low_nbytes
    if L.high > 0:
        _store_words(plane + place * high_nbytes, _high_words(block, F, IS_EVEN), is_there, is_block)
        plane += group_blocks * high_nbytes
    _store_words(plane + place * scale_nbytes, _scale_words(block, F, scale_nbytes), is_there, is_block)
    supers = (plane + group_blocks * scale_nbytes + place * 2).to(tl.pointer_type(tl.uint16))
    tl.store(supers[:, None], tl.where(is_block, _unit(block, F), 0).to(tl.uint16), mask=is_there[:, None])


@triton.jit
def _store_words(to, words, is_there, is_block):
    """Store words, [B, n] int32, from the addresses `to`, [B], on: zeros for blocks that the file does not have."""
    places = to.to(tl.pointer_type(tl.int32))[:, None] + tl.arange(0, words.shape[1])[None, :]
    tl.store(places, tl.where(is_block, words, 0), mask=is_there[:, None])


@triton.jit
def _low_words(block, grid, F: tl.constexpr, L: tl.constexpr, IS_EVEN: tl.constexpr):
    """Return the words of the low plane: [B, 16] int32 of two bits each, or [B, 32] of four, with their signs."""
    word = tl.arange(0, 8 * L.low)[None, :]
    words = tl.zeros([block.shape[0], 8 * L.low], tl.int32)
    if L.low == 2:
        for part in tl.static_range(4):  # a byte's four weights are 32 apart
            entry = word // 8 * 16 + part * 4 + word % 8 // 2
            numbers = tl.load(grid + _entry(block, entry, F)) >> (word % 2 * 8)
            words |= _spread(numbers, 2) << (2 * part)
    else:
        for half in tl.static_range(2):  # a byte's two weights are 16 apart
            entry = word // 4 * 8 + half * 4 + word % 4
            signs = _eight_signs(block, entry // 2, F, IS_EVEN) >> (entry % 2 * 4)
            codes = _spread(tl.load(grid + _entry(block, entry, F)), 3) | _spread(signs, 1) << 3
            words |= codes << (4 * half)
    return words


@triton.jit
def _high_words(block, F: tl.constexpr, IS_EVEN: tl.constexpr):
    """Return the words of the high plane, [B, 8] int32: a byte has the signs of eight weights that are 32 apart."""
    word = tl.arange(0, 8)[None, :]
    words = tl.zeros([block.shape[0], 8], tl.int32)
    for part in tl.static_range(8):
        signs = _eight_signs(block, part * 4 + word // 2, F, IS_EVEN) >> (word % 2 * 4)
        words |= _spread(signs, 1) << part
    return words


@triton.jit
def _scale_words(block, F: tl.constexpr, NBYTES: tl.constexpr):
    """Return the words of the plane of scales, [B, NBYTES / 4] int32: bytes of 2 * scale + 1."""
    first = tl.arange(0, NBYTES // 4)[None, :] * 4
    words = tl.zeros([block.shape[0], NBYTES // 4], tl.int32)
    for byte in tl.static_range(4):
        words |= (_scale(block, first + byte, F) << 1 | 1) << (8 * byte)
    return words


@triton.jit
def _spread(fields, BITS: tl.constexpr):
    """Return the lowest four fields of BITS bits in the lowest bits of four bytes; all int32."""
    mask: tl.constexpr = (1 << BITS) - 1
    up: tl.constexpr = 8 - BITS
    low = fields & mask | (fields & mask << BITS) << up
    return low | (fields & mask << 2 * BITS) << 2 * up | (fields & mask << 3 * BITS) << 3 * up


@triton.jit
def _byte(block, at):
    """Return the byte of blocks at an offset, int32."""
    return tl.load(block + at).to(tl.int32)


@triton.jit
def _half(block, at):
    """Return the two bytes of blocks at an even offset, int32; blocks begin at even addresses."""
    return tl.load((block + at).to(tl.pointer_type(tl.uint16))).to(tl.int32)


@triton.jit
def _word(block, at):
    """Return the four bytes of blocks at an even offset, int32."""
    return _half(block, at) | _half(block, at + 2) << 16


@triton.jit
def _entry(block, entry, F: tl.constexpr):
    """Return the numbers of grid entries: 0 .. 31 of eight weights each, for iq3 0 .. 63 of four; int32."""
    if F == "iq2_xxs":
        number = _byte(block, 2 + entry // 4 * 8 + entry % 4)
    elif F == "iq2_xs":
        number = _half(block, 2 + entry * 2) & 511
    elif F == "iq2_s":
        number = _byte(block, 2 + entry) | (_byte(block, 66 + entry // 4) >> (entry % 4 * 2) & 3) << 8
    elif F == "iq3_xxs":
        number = _byte(block, 2 + entry)
    elif F == "iq3_s":
        number = _byte(block, 2 + entry) | (_byte(block, 66 + entry // 8) >> (entry % 8) & 1) << 8
    elif F == "iq1_s":
        number = _byte(block, 2 + entry) | (_half(block, 34 + entry // 4 * 2) >> (entry % 4 * 3) & 7) << 8
    else:
        tl.static_assert(F == "iq1_m")
        number = _byte(block, entry) | (_byte(block, 32 + entry // 2) >> (entry % 2 * 4) & 7) << 8
    return number


@triton.jit
def _eight_signs(block, number, F: tl.constexpr, IS_EVEN: tl.constexpr):
    """Return eight weights' signs in the lowest eight bits, int32; weights from 8 * number on."""
    if F == "iq2_xxs":
        signs = _word(block, 6 + number // 4 * 8) >> (number % 4 * 7)
    elif F == "iq2_xs":
        signs = _half(block, 2 + number * 2) >> 9
    elif F == "iq2_s":
        signs = _byte(block, 34 + number)
    elif F == "iq3_xxs":
        signs = _word(block, 66 + number // 4 * 4) >> (number % 4 * 7)
    elif F == "iq3_s":
        signs = _byte(block, 74 + number)
    elif F == "iq1_s":
        signs = (_half(block, 34 + number // 4 * 2) >> 15) * 255
    else:
        tl.static_assert(F == "iq1_m")
        signs = (_byte(block, 32 + number // 2) >> (number % 2 * 4 + 3) & 1) * 255
    if IS_EVEN:
        signs &= 127
        folded = signs ^ signs >> 4
        folded ^= folded >> 2
        signs |= ((folded ^ folded >> 1) & 1) << 7
    return signs


@triton.jit
def _scale(block, scale, F: tl.constexpr):
    """Return stored scales, int32; 0 .. 15 of 16 weights each, for iq3 0 .. 7 of 32."""
    if F == "iq2_xxs":
        found = _word(block, 6 + scale // 2 * 8) >> 28 & 15
    elif F == "iq2_xs":
        found = _byte(block, 66 + scale // 2) >> (scale % 2 * 4) & 15
    elif F == "iq2_s":
        found = _byte(block, 74 + scale // 2) >> (scale % 2 * 4) & 15
    elif F == "iq3_xxs":
        found = _word(block, 66 + scale * 4) >> 28 & 15
    elif F == "iq3_s":
        found = _byte(block, 106 + scale // 2) >> (scale % 2 * 4) & 15
    elif F == "iq1_s":
        found = _half(block, 34 + scale // 2 * 2) >> 12 & 7
    else:
        tl.static_assert(F == "iq1_m")
        found = _half(block, 48 + scale // 4 * 2) >> (scale % 4 * 3) & 7
    return found


@triton.jit
def _unit(block, F: tl.constexpr):
    """Return the bits of d, a float16: [B, 1] int32."""
    if F == "iq1_m":
        bits = _half(block, 48) >> 12 | _half(block, 50) >> 12 << 4
        bits |= _half(block, 52) >> 12 << 8 | _half(block, 54) >> 12 << 12
    else:
        bits = _half(block, 0)
    return bits


def launch_write_planes(arrived: Tensor, grid: Tensor, out: Tensor, packing: DevicePacking) -> None:
    """Write a matrix's planes from the file's bytes; arguments as for `write_planes` (device_packing.py)."""
    one = packing.on_link
    row_blocks = packing.columns // 256
    block_nbytes = one.nbytes // (packing.rows * row_blocks)
    padded = packing.padded_rows * row_blocks
    blocks = BLOCKS if out.device.type != "cpu" else min(INTERPRETED_BLOCKS, triton.next_power_of_2(padded))
    _write_planes[(triton.cdiv(padded, blocks),)](
        arrived, grid, out, packing.rows * row_blocks, padded, row_blocks,
        F=packing.format, W=block_nbytes, L=packing.layout, IS_EVEN=packing.format in EVEN, B=blocks,
        num_warps=WARPS,
    )  # fmt: skip


register_implementation("write_planes", "CUDA", launch_write_planes)
