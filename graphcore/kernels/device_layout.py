"""How a packed matrix lies in a GPU's memory: rows in groups of sixteen, within a group planes.

Legend: O rows (output features), I columns (input features).

    group of 16 rows:   low codes | high codes | scales | supers        each plane: row 0's bytes, row 1's, ...
    low codes           8, 4, 2 or 1 bits a weight, in order, lowest bits first: a 32-bit word has whole runs of weights
    high codes          the 2 or 1 highest bits of each code, the same way
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
    q2_0       72 /  72
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
        group: weights of a scale.
        zero: the code of nothing.
        levels: what codes stand for: "" is themselves, else "e2m1" or "iq4" (quant/codebooks.py).
        unit: consecutive weights that a thread multiplies at once: 16 bytes of low codes, 32 where they have 8 bits.
    """

    low: int
    high: int
    scale: str
    group: int
    zero: int
    levels: str
    unit: int


DEVICE_LAYOUTS: Mapping[str, DeviceLayout] = MappingProxyType(
    {
        "q4_0": DeviceLayout(4, 0, "half", 32, 8, "", 32),
        "q4_1": DeviceLayout(4, 0, "pair", 32, 0, "", 32),
        "q5_0": DeviceLayout(4, 1, "half", 32, 16, "", 32),
        "q5_1": DeviceLayout(4, 1, "pair", 32, 0, "", 32),
        "q8_0": DeviceLayout(8, 0, "half", 32, 128, "", 32),
        "q2_k": DeviceLayout(2, 0, "nibbles", 16, 0, "", 64),
        "q3_k": DeviceLayout(2, 1, "signed", 16, 4, "", 64),
        "q4_k": DeviceLayout(4, 0, "bytes", 32, 0, "", 32),
        "q5_k": DeviceLayout(4, 1, "bytes", 32, 0, "", 32),
        "q6_k": DeviceLayout(4, 2, "signed", 16, 32, "", 32),
        "iq4_nl": DeviceLayout(4, 0, "half", 32, 0, "iq4", 32),
        "iq4_xs": DeviceLayout(4, 0, "signed", 32, 0, "iq4", 32),
        "tq2_0": DeviceLayout(2, 0, "half", 256, 1, "", 64),
        "mxfp4": DeviceLayout(4, 0, "e8m0", 32, 0, "e2m1", 32),
        "nvfp4": DeviceLayout(4, 0, "e4m3", 16, 0, "e2m1", 32),
        "q2_0": DeviceLayout(2, 0, "half", 64, 1, "", 64),
        "i2_s": DeviceLayout(2, 0, "whole", 128, 1, "", 64),
    }
)
SCALE_NBYTES = {"half": 2, "pair": 4, "e8m0": 1, "e4m3": 1, "signed": 1, "bytes": 2, "nibbles": 1, "whole": 0}
SUPER_NBYTES = {"signed": 2, "bytes": 4, "nibbles": 4}  # of 256 weights, by the kind of their scales


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
        low, high, scale, group, _, _, _ = self.layout
        supers = self.columns // SUPER_WEIGHTS * SUPER_NBYTES.get(scale, 0)
        return self.columns * low // 8, self.columns * high // 8, self.columns // group * SCALE_NBYTES[scale], supers

    @property
    def nbytes(self) -> int:
        """Size in bytes, rows padded to a multiple of sixteen."""
        tail = TAIL_NBYTES if self.layout.scale == "whole" else 0
        return self.offset(-(-self.rows // GROUP_ROWS) * GROUP_ROWS) + tail

    def offset(self, row: int) -> int:
        """Return where the bytes of a row's group begin."""
        return row // GROUP_ROWS * GROUP_ROWS * sum(self.planes)
