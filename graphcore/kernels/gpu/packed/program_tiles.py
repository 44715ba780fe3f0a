"""Chooses the tile of a program of the packed products: how many rows, for how many tokens, with how many warps.

The rule follows measurements on an H100 (docs/numbers.md, "On a GPU"): one token in bf16, microseconds of a product.

    format    28672 x 4096    4096 x 14336    GB/s           rows and warps there
    q4_0      32.7            21.8            2018, 1514     4 x 1, 4 x 2
    q4_k      33.6            21.2            2023, 1599     4 x 1, 4 x 2
    q5_k      55.9            31.9            1478, 1293     2 x 1
    q6_k      53.7            30.2            1796, 1595     2 x 1
    q8_0      49.7            27.4            2454, 2281     4 x 1, 4 x 4
    mxfp4     40.7            23.1            1533, 1350     1 x 1
    i2_s      22.4            15.1            1310, 970      4 x 1, 2 x 1

The loops have changed since. q5_k and q6_k took 2 to 7 % longer with four rows then, and half as many instructions now.
"""

from functools import cache
from typing import NamedTuple

import triton
from torch import Tensor

from graphcore.kernels.device_layout import DEVICE_LAYOUTS, DeviceLayout

TOKENS = 2  # largest number of tokens of a program: sums of more do not fit in registers
FEWEST_WARPS = 1536  # about twelve for each of 132 multiprocessors
MOST_WARPS = 4
HIGH_ROWS = 2  # rows that count for warps where there are high codes: more warps were slower
UNITS_OF_WARP = 1024  # units of low codes, in all rows of a program, that one warp takes; longer rows get more warps
THREADS = 32  # threads of a warp


class Tile(NamedTuple):
    """The part of a product that one program computes."""

    tokens: int
    rows: int
    warps: int
    dots: bool = False


DOTTED = Tile(8, 16, 4, dots=True)  # the tile for tensor cores
FEWEST_DOTTED_TOKENS = 3  # from this number on, tensor cores take fewer instructions
DOTTED_UNITS = 4  # units of a warp
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
    units = columns * layout.low // 128 * (HIGH_ROWS if layout.high else most)
    warps = min(MOST_WARPS, triton.next_power_of_2(triton.cdiv(units, UNITS_OF_WARP)))
    together = min(triton.next_power_of_2(tokens), TOKENS)
    per_program = max(1, most // together)  # more sums than that do not fit in registers
    while per_program > 1 and rows // per_program * warps < FEWEST_WARPS:
        per_program //= 2
    return Tile(together, per_program, warps)


def most_rows(layout: DeviceLayout) -> int:
    """Return the rows of a program, at most: fewer where a code takes more instructions and more registers."""
    return 1 if layout.levels else 4


def constants_of(name: str, tile: Tile, columns: int) -> dict[str, object]:
    """Return the constants that a launch is compiled for."""
    layout = DEVICE_LAYOUTS[name]
    units = (DOTTED_UNITS if tile.dots else THREADS) * tile.warps
    return {
        "L": layout,
        "DOTS": tile.dots,
        "N": tile.tokens,
        "R": tile.rows,
        "G": units,
        "IS_EVEN": columns * layout.low // 128 % units == 0,
        "num_warps": tile.warps,
        "enable_fp_fusion": True,
    }
