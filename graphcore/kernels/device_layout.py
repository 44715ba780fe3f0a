"""How a packed matrix lies in a GPU's memory: rows in groups of sixteen, within a group planes.

Legend: O rows (output features), I columns (input features).

    group of 16 rows:   low codes | high codes | scales | supers        each plane: row 0's bytes, row 1's, ...
    low codes           8, 4 or 2 bits a weight; 16 bytes are a unit: byte b has weights b, step + b, ..., one in each
                        slice of its bits, the lowest first; where step is over 16, step / 16 units share their weights
    high codes          the 2 or 1 highest bits: byte b of 32 has weights b, 32 + b, ..., in slices of its bits; or runs
    scales              one for `group` weights: a float16, a float16 and a minimum, or one or two bytes
    supers              a float16, or one and its minimum's, for 256 weights, in formats whose scales are bytes

Every plane of a group begins at a multiple of 16 bytes, and rows of a plane are one run: threads that read side by side
read memory in one run, 16 bytes each. Rows that begin at a multiple of sixteen are one run of bytes (`offset`).

    format    bytes here / in the file, for 256 weights         format    bytes here / in the file
    q4_0      144 / 144                                         q2_k       84 /  84
    q4_1      160 / 160                                         q3_k      114 / 110  scales widened to a byte
    q5_0      176 / 176                                         q4_k      148 / 144  scales and minimums widened
    q5_1      192 / 192                                         q5_k      180 / 176  scales and minimums widened
    q8_0      272 / 272                                         q6_k      210 / 210
    iq4_nl    144 / 144                                         iq4_xs    138 / 136  scales widened to a byte
    mxfp4     136 / 136                                         tq2_0      66 /  66
    nvfp4     144 / 144                                         i2_s       64 /  64  and the tensor's scale
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

GROUP_ROWS = 16  # rows that lie together
TAIL_NBYTES = 16  # after i2_s's codes: the tensor's float32 scale
SUPER_WEIGHTS = 256  # weights of a super scale


class DeviceLayout(NamedTuple):
    """What tells one format's planes from another's; Triton kernels take it as a constant.

    Attributes:
        low, high: bits of a code in either plane.
        scale: what one scale is:
            half    float16 d                       weight = d * (code - zero)
            pair    float16 d, float16 m            weight = d * code + m
            e8m0    exponent byte e                 weight = 2^(e - 128) * level
            e4m3    byte s, an unsigned E4M3        weight = 0.5 * s * level
            signed  int8 s under a super d          weight = (d * s) * (code - zero)
            bytes   uint8 s, uint8 m under d, dmin  weight = (d * s) * code - dmin * m
            nibbles one byte s | m << 4, the same
            whole   none: one for the tensor        weight = (code - zero) * scale
        scale_nbytes, group: bytes of a scale, and the weights it is for.
        super_nbytes: of the supers for 256 weights.
        zero: the code of nothing.
        levels: what codes stand for: "" is themselves, else "e2m1" or "iq4" (quant/codebooks.py).
        step: weights between one slice of a byte's bits and the next.
        is_descending: the first slice is that of the highest bits.
        high_runs: high codes of consecutive weights are consecutive bits.
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


DEVICE_LAYOUTS: Mapping[str, DeviceLayout] = MappingProxyType(
    {
        "q4_0": DeviceLayout(4, 0, "half", 2, 32, zero=8),
        "q4_1": DeviceLayout(4, 0, "pair", 4, 32),
        "q5_0": DeviceLayout(4, 1, "half", 2, 32, zero=16, high_runs=True),
        "q5_1": DeviceLayout(4, 1, "pair", 4, 32, high_runs=True),
        "q8_0": DeviceLayout(8, 0, "half", 2, 32, zero=128),
        "q2_k": DeviceLayout(2, 0, "nibbles", 1, 16, 4, step=32),
        "q3_k": DeviceLayout(2, 1, "signed", 1, 16, 2, zero=4, step=32),
        "q4_k": DeviceLayout(4, 0, "bytes", 2, 32, 4),
        "q5_k": DeviceLayout(4, 1, "bytes", 2, 32, 4),
        "q6_k": DeviceLayout(4, 2, "signed", 1, 16, 2, zero=32, step=64),
        "iq4_nl": DeviceLayout(4, 0, "half", 2, 32, levels="iq4"),
        "iq4_xs": DeviceLayout(4, 0, "signed", 1, 32, 2, levels="iq4"),
        "tq2_0": DeviceLayout(2, 0, "half", 2, 256, zero=1, step=32),
        "mxfp4": DeviceLayout(4, 0, "e8m0", 1, 32, levels="e2m1"),
        "nvfp4": DeviceLayout(4, 0, "e4m3", 1, 16, levels="e2m1", step=8),
        "i2_s": DeviceLayout(2, 0, "whole", 0, 128, zero=1, step=32, is_descending=True),
    }
)


@dataclass(frozen=True)
class DeviceForm:
    """How one matrix lies.

    Attributes:
        format: name of a stored format in DEVICE_LAYOUTS.
        columns: a whole number of the format's blocks.
    """

    format: str
    rows: int
    columns: int

    @property
    def layout(self) -> DeviceLayout:
        """The format's."""
        return DEVICE_LAYOUTS[self.format]

    @property
    def planes(self) -> tuple[int, ...]:
        """Bytes of one row in each plane: low codes, high codes, scales, supers."""
        one = self.layout
        return (
            self.columns * one.low // 8,
            self.columns * one.high // 8,
            self.columns // one.group * one.scale_nbytes,
            self.columns // SUPER_WEIGHTS * one.super_nbytes,
        )

    @property
    def nbytes(self) -> int:
        """Size in bytes, rows padded to a multiple of sixteen."""
        tail = TAIL_NBYTES if self.layout.scale == "whole" else 0
        return self.offset(self.padded_rows) + tail

    @property
    def padded_rows(self) -> int:
        """Rows, padded to whole groups."""
        return -(-self.rows // GROUP_ROWS) * GROUP_ROWS

    def offset(self, row: int) -> int:
        """Return where the bytes of a row's group begin."""
        return row // GROUP_ROWS * GROUP_ROWS * sum(self.planes)
