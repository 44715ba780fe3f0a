"""The layout of a packed matrix in a GPU's memory: rows in groups of sixteen, and planes within a group.

Legend: O rows (output features), I columns (input features).

    group of 16 rows:   low codes | high codes | scales | supers        each plane: row 0's bytes, row 1's, ...
    low codes           8, 4 or 2 bits a weight; 16 bytes are a vector: byte b has weights b, step + b, ..., one in each
                        slice of its bits, the lowest first; if step is over 16, step / 16 vectors share their weights
    high codes          the 2 or 1 highest bits: byte b of 32 has weights b, 32 + b, ..., in slices of its bits; or runs
    scales              one for `group` weights: a float16, a float16 and a minimum, a float32, or one or two bytes
    supers              a float16, or two (of scales and minimums), for 256 weights, if the format's scales are bytes;
                        or a byte for 32 weights: their zero, which is subtracted from their codes

Every plane of a group begins at a multiple of 16 bytes, and the rows of a plane are contiguous: neighbouring threads
read contiguous memory, 16 bytes each. Rows from a multiple of sixteen on are one run of bytes (`offset`). Planes of IQ
formats are made on the device when a matrix streams (kernels/gpu/packed/level_planes.py).

    format    bytes here / in the file, for 256 weights         format    bytes here / in the file
    q4_0      144 / 144                                         q2_k       84 /  84
    q4_1      160 / 160                                         q3_k      114 / 110  scales widened to a byte
    q5_0      176 / 176                                         q4_k      148 / 144  scales and minimums widened
    q5_1      192 / 192                                         q5_k      180 / 176  scales and minimums widened
    q8_0      272 / 272                                         q6_k      210 / 210
    iq4_nl    144 / 144                                         iq4_xs    138 / 136  scales widened to a byte
    mxfp4     136 / 136                                         tq2_0      66 /  66
    nvfp4     144 / 144                                         i2_s       64 /  64  and the tensor's scale
    iq1_s     114 /  50  levels, and a byte for each scale      iq1_m     114 /  56
    iq2_xxs   114 /  66                                         iq2_xs    114 /  74
    iq2_s     114 /  82                                         iq3_xxs   138 /  98
    iq3_s     138 / 110                                         fp8       288 / 288
    affine4   152 / 152                                         affine8   296 / 296
    nf4       160 / 160                                         fp4       160 / 160
    nvfp4_f32 192 / 192
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from graphcore.encodings import (
    E2M1_DOUBLED,
    E4M3_LEVELS,
    FP4_LEVELS,
    IQ4_LEVELS,
    NF4_LEVELS,
    Encoding,
    Place,
    Planes,
)
from graphcore.quant.level_formats import IQ1, IQ2, IQ3_S, IQ3_XXS
from graphcore.quant.registry import FORMATS

TAIL_NBYTES = 16  # bytes after the last group, if the tensor has a float32 scale
SCALE_NBYTES = {
    "half": 2,
    "pair": 4,
    "e8m0": 1,
    "e4m3": 1,
    "signed": 1,
    "bytes": 2,
    "nibbles": 1,
    "half_zero": 2,
    "float_zero": 4,
    "float": 4,
    "whole": 0,
}
TERMS = {  # what is applied to codes besides their scale, if anything
    "pair": "added",
    "bytes": "subtracted",
    "nibbles": "subtracted",
    "half_zero": "zero",
    "float_zero": "zero",
}
LEVELS: Mapping[tuple[float, ...], str] = {  # names of the levels in kernels
    (): "",
    E2M1_DOUBLED: "e2m1",
    IQ4_LEVELS: "iq4",
    IQ1: "iq1",
    IQ2: "iq2",
    IQ3_XXS: "iq3_xxs",
    IQ3_S: "iq3_s",
    NF4_LEVELS: "nf4",
    FP4_LEVELS: "fp4",
    E4M3_LEVELS: "fp8",
}


class DeviceLayout(NamedTuple):
    """The facts that distinguish one format's planes; Triton kernels take them as a constant.

    Attributes:
        low, high: bits of a code in either plane.
        scale: kind of a scale, as in `Planes`.
        scale_nbytes, group: bytes of a scale, and number of weights that share it.
        super_nbytes: bytes of the super scales, or of the zero, for `super_weights` weights.
        zero: code that stands for 0; 0 if blocks have zeros of their own.
        levels: values of the codes: "" for the codes themselves, else a name of LEVELS.
        step, is_descending, high_runs: the same as in `Planes`.
        super_weights: number of weights that share the bytes of a plane of supers.
        term: what is applied besides the scale: a minimum that is "added" or "subtracted", or a "zero", which is
            subtracted from the code before it is scaled; "" for nothing.
    """

    low: int
    high: int
    scale: str
    scale_nbytes: int
    group: int
    super_nbytes: int = 0
    zero: int = 0
    levels: str = ""
    step: int = 16
    is_descending: bool = False
    high_runs: bool = False
    super_weights: int = 256
    term: str = ""


def _layout(one: Encoding, planes: Planes) -> DeviceLayout:
    """Return the layout that kernels are compiled for: the bits of a plane follow from its bytes in a block."""
    low, supers = _nbytes(planes.low) * 8 // one.block_elements, _nbytes(planes.supers)
    return DeviceLayout(
        low,
        one.bits - low,
        planes.scale,
        SCALE_NBYTES[planes.scale],
        planes.group,
        supers,
        one.zero,
        LEVELS[one.levels or one.float_levels],
        planes.step,
        planes.is_descending,
        planes.high_runs,
        one.block_elements if supers else DeviceLayout._field_defaults["super_weights"],
        TERMS.get(planes.scale, ""),
    )


def _nbytes(place: Place | None) -> int:
    return 0 if place is None else place[1] - place[0]


DEVICE_LAYOUTS: Mapping[str, DeviceLayout] = MappingProxyType(
    {name: _layout(one, one.planes) for name, one in FORMATS.items() if one.planes is not None}
)
