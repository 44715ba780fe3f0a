"""The tile of a program of the packed products: how many rows, for how many tokens, with how many warps.

The rule follows measurements on an H100 (docs/lab/gpu.md): one token in bf16, microseconds of a product in
a captured sequence of products, with the rule's tile and with the best of twelve tiles.

    format    q, k, v        o              gate and up      down
    q4_0      7.2    7.1     6.0    5.5     25.7    25.7     14.4    14.4
    q4_k      7.7    7.7     6.2    6.0     26.8    26.8     15.5    15.5
    q5_k     10.6    9.7     7.0    7.0     33.7    33.4     19.0    19.0
    q6_k     10.3    9.9     7.8    6.9     38.3    36.4     19.6    19.6
    q8_0     11.2   11.0     8.6    7.7     43.2    42.7     22.2    22.2
    mxfp4     6.1    6.1     4.5    4.5      7.1     6.9      4.6     4.6    (gpt-oss-20b's widths)
    i2_s      4.6    4.3     3.5    3.5     10.9    10.2      5.6     5.1    (BitNet 2B's)
"""

from functools import cache
from typing import NamedTuple

import triton
from torch import Tensor

from graphcore.kernels.gpu.layout import DEVICE_LAYOUTS, DeviceLayout
from graphcore.kernels.gpu.pdl import pdl_options

TOKENS = 2  # largest number of tokens of a program: sums of more do not fit in registers
FEWEST_WARPS = 1024  # about eight for each of 132 multiprocessors
MANY_WARPS = 4096  # from this number on, programs may have twice as many rows if their codes have four bits
FEWEST_OF_PROGRAM, MOST_OF_PROGRAM = 2, 4  # warps; programs of one were slower, but for codes that stand for levels
VECTORS_OF_WARP = 1024  # vectors of low codes, of all rows of a program, for one warp; longer rows get more warps
THREADS = 32  # threads of a warp


class Tile(NamedTuple):
    """The part of a product that one program computes."""

    tokens: int
    rows: int
    warps: int
    dots: bool = False


DOTTED = Tile(8, 16, 4, dots=True)  # the tile for tensor cores
FEWEST_DOTTED_TOKENS = 3  # from this number on, tensor cores take fewer instructions
DOTTED_VECTORS = 4  # vectors of a warp
INTERPRETED = Tile(2, 128, 1)  # Triton's interpreter runs one program after another, so a few large ones are best


def tile_for(name: str, rows: int, x: Tensor) -> Tile:
    """Return the tile for the products of x [N, I] with this many rows of a format."""
    is_interpreted = x.device.type == "cpu"
    if x.element_size() == 2 and len(x) >= FEWEST_DOTTED_TOKENS:
        return DOTTED._replace(rows=INTERPRETED.rows) if is_interpreted else DOTTED
    return INTERPRETED if is_interpreted else tile_of_threads(DEVICE_LAYOUTS[name], rows, x.shape[1], len(x))


@cache
def tile_of_threads(layout: DeviceLayout, rows: int, columns: int, tokens: int) -> Tile:
    """Return the tile without tensor cores: as many rows as leave enough warps for every multiprocessor.

    Warps depend on the columns alone, so that part of a matrix is summed in the order of the whole.
    """
    most = most_rows(layout)
    vectors = columns * layout.low // 128 * most
    warps = min(MOST_OF_PROGRAM, triton.next_power_of_2(triton.cdiv(vectors, VECTORS_OF_WARP)))
    if not layout.levels:
        warps = max(FEWEST_OF_PROGRAM, warps)
    together = min(triton.next_power_of_2(tokens), TOKENS)
    if layout.low == 4 and not layout.high and not layout.levels and rows // (2 * most) * warps >= MANY_WARPS:
        most *= 2
    per_program = max(1, most // together)  # more sums than that do not fit in registers
    while per_program > 1 and rows // per_program * warps < FEWEST_WARPS:
        per_program //= 2
    return Tile(together, per_program, warps)


def most_rows(layout: DeviceLayout) -> int:
    """Return the rows of a program, at most: fewer where a code takes more instructions and more registers.

    Levels of eight bits (fp8) take little more than codes do.
    """
    return 2 if layout.levels and layout.low < 8 else 4


def constants_of(name: str, tile: Tile, columns: int) -> dict[str, object]:
    """Return the constants that a launch is compiled for."""
    layout = DEVICE_LAYOUTS[name]
    vectors = (DOTTED_VECTORS if tile.dots else THREADS) * tile.warps
    return {
        "L": layout,
        "DOTS": tile.dots,
        "N": tile.tokens,
        "R": tile.rows,
        "G": vectors,
        "IS_EVEN": columns * layout.low // 128 % vectors == 0,
        "num_warps": tile.warps,
        "enable_fp_fusion": True,
        **pdl_options(),
    }
