"""Chooses the tile of a program of the packed products: how many rows, for how many tokens, with how many warps.

The table counts sm_90 machine code; nothing in it is measured on hardware: one token in bf16, R rows, 16 bytes of low
codes per load. 132 multiprocessors with four schedulers at 1.7 GHz issue 2.9e13 thread instructions per second; the
last column is the share of 4.8 TB/s that this allows, if nothing waits.

    format    R    registers    instructions for a weight    share of memory's rate
    q4_0      8    128          3.5                          97 %
    q4_k      8    128          3.8                          91 %
    q4_k      4     72          4.4                          79 %
    q5_k      4    168          7.4                          57 %
    q6_k      4    128          7.6                          65 %
    q8_0      8     96          4.7                          100 %
    mxfp4     8    162          5.2                          62 %
    i2_s      8    168          2.9                          52 %
    q4_k      16   96           7.7 for eight tokens         45 %
"""

from functools import cache
from typing import NamedTuple

import triton
from torch import Tensor

from graphcore.kernels.device_layout import DEVICE_LAYOUTS, DeviceLayout

TOKENS = 2  # largest number of tokens of a program: sums of more do not fit in registers
FEWEST_WARPS = 2112  # sixteen for each multiprocessor of an H200, which has 132
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
    return INTERPRETED if is_interpreted else cheapest_tile(DEVICE_LAYOUTS[name], rows, x.shape[1], len(x))


@cache
def cheapest_tile(layout: DeviceLayout, rows: int, columns: int, tokens: int) -> Tile:
    """Return the tile that should take the fewest instructions while every multiprocessor has enough warps.

    A weight takes about three instructions, and a share of the preparation of x, which is done once for all rows of a
    program. Warps depend on the columns alone, so that part of a matrix is summed in the order of the whole.
    """
    warps = warps_of(layout, columns)
    most = 4 if layout.high or tokens > 1 else 8  # rows whose codes and sums fit in registers

    def cost(per_program: int) -> float:
        return (3 + 4 / per_program) * max(1.0, FEWEST_WARPS * per_program / (rows * warps))

    per_program = min((count for count in (8, 4, 2, 1) if count <= most), key=cost)
    return Tile(min(triton.next_power_of_2(tokens), TOKENS), per_program, warps)


def warps_of(layout: DeviceLayout, columns: int) -> int:
    """Return the number of warps that share a row's units with few idle threads."""
    units = columns * layout.low // 128
    read = {warps: triton.cdiv(units, THREADS * warps) * warps for warps in (4, 2, 1)}
    return next(warps for warps, count in read.items() if count <= 1.1 * min(read.values()))


def constants_of(name: str, tile: Tile) -> dict[str, object]:
    """Return the constants that a launch is compiled for."""
    return {
        "L": DEVICE_LAYOUTS[name],
        "DOTS": tile.dots,
        "N": tile.tokens,
        "R": tile.rows,
        "G": (DOTTED_UNITS if tile.dots else THREADS) * tile.warps,
        "num_warps": tile.warps,
        "enable_fp_fusion": True,
    }
