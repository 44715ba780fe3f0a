"""How tensors' bytes are stored: each encoding's facts, once. Everything else that knows an encoding asks here.

Plain data, without torch, so that the command line can name encodings. Who uses which facts:

    block, tail, ggml_id, file_type       checkpoint/, export/     sizes and places in files
    bits, zero, levels, kernel_number     kernels/native/          generated into encodings.h (kernels/native_header.py)
    planes                                kernels/, quant/         what a GPU holds (kernels/device_layout.py draws it)
    is_written, is_ternary, narrower, ... config/, quant/choice    what dense weights can be packed as

What the bytes mean, bit by bit, is drawn and decoded in quant/formats/, a module for each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

# E2M1 times 2, so that all are whole: sign bit, two exponent bits, one mantissa bit. ggml has +0 for code 8 (OCP: -0).
# Source: OCP Microscaling Formats v1.0, section 5.3.3; ggml/src/ggml-common.h, kvalues_mxfp4.
E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

# Non-linear four-bit levels. Source: ggml/src/ggml-common.h, kvalues_iq4nl.
IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

Place = tuple[int, int]  # first byte in a block, and the one behind the last


@dataclass(frozen=True)
class Planes:
    """What of a block goes to which of the planes that GPU kernels read.

    Attributes:
        low, high: place of the codes' low bits, and of their highest one or two; None: there is no such plane.
        scales, supers: place of the scales, and of what the scales of 256 weights are multiplied with.
        scale: what one scale is:
            half    float16 d                       weight = d * (code - zero)
            pair    float16 d, float16 m            weight = d * code + m
            e8m0    exponent byte e                 weight = 2^(e - 128) * level
            e4m3    byte s, an unsigned E4M3        weight = 0.5 * s * level
            signed  int8 s under a super d          weight = (d * s) * (code - zero)
            bytes   uint8 s, uint8 m under d, dmin  weight = (d * s) * code - dmin * m
            nibbles one byte s | m << 4, the same
            whole   none: one for the tensor        weight = (code - zero) * scale
        group: weights that a scale is for.
        step: weights between one slice of a byte's bits and the next.
        is_descending: the first slice is that of the highest bits.
        high_runs: high codes of consecutive weights are consecutive bits.
    """

    low: Place
    high: Place | None = None
    scales: Place | None = None
    supers: Place | None = None
    scale: str = "half"
    group: int = 32
    step: int = 16
    is_descending: bool = False
    high_runs: bool = False

    @property
    def places(self) -> tuple[Place | None, ...]:
        """Low codes, high codes, scales, supers."""
        return self.low, self.high, self.scales, self.supers


@dataclass(frozen=True)
class Encoding:
    """How a tensor's bytes are stored.

    Attributes:
        name: lower-case ggml type name, such as "q4_k".
        block_elements: elements of a block; 1 is dense.
        block_nbytes: bytes of a block.
        ggml_id: number of the type in GGUF files. Source: ggml.c, `type_traits`, as of ggml 0.25.
        file_type: what llama.cpp calls a file of such matrices, for people. Source: gguf.constants.LlamaFileType.
        kernel_number: number by which the C++ kernels know it; None: they do not multiply it.
        bits: bits of a code; 0 where codes are no whole bits or there are none.
        zero: the code of nothing.
        levels: what the codes stand for; empty: themselves, less `zero`.
        tail_nbytes: bytes behind the last block, for a scale of the whole tensor. An encoding that has a tail counts
            its blocks over the whole tensor, any other row by row.
        planes: what a GPU's kernels hold; None: they do not multiply it.
        is_written: dense weights can be packed as this.
        is_ternary: weights are -1, 0 and 1 times a scale.
        narrower: what takes a row that is no multiple of the block: of about the same width, in blocks of 32.
        head: what the head is packed as, where matrices are packed as this.
    """

    name: str
    block_elements: int
    block_nbytes: int
    ggml_id: int
    file_type: int | None = None
    kernel_number: int | None = None
    bits: int = 0
    zero: int = 0
    levels: tuple[int, ...] = ()
    tail_nbytes: int = 0
    planes: Planes | None = None
    is_written: bool = False
    is_ternary: bool = False
    narrower: str | None = None
    head: str = "q6_k"

    @property
    def is_dense(self) -> bool:
        """Whether elements are stored as they are, one by one."""
        return self.block_elements == 1

    @property
    def has_tensor_scale(self) -> bool:
        """Whether a scale of the whole tensor lies behind the last row, so that no rows are a tensor of their own."""
        return self.tail_nbytes > 0

    def divides(self, shape: Sequence[int]) -> bool:
        """Return whether a tensor of this shape (torch order) is a whole number of blocks."""
        counted = prod(shape) if self.has_tensor_scale else prod(shape[-1:])
        return counted % self.block_elements == 0

    def nbytes(self, shape: Sequence[int]) -> int:
        """Return the stored size in bytes of a tensor of this shape (torch order)."""
        assert self.divides(shape), f"{self.name} cannot store shape {tuple(shape)}"
        return prod(shape) // self.block_elements * self.block_nbytes + self.tail_nbytes


# In the order in which messages list what weights can be packed as.
ENCODINGS: Mapping[str, Encoding] = MappingProxyType(
    {
        one.name: one
        for one in (
            Encoding(
                "q4_0", 32, 18, 2, file_type=2, kernel_number=3, bits=4, zero=8, is_written=True,
                planes=Planes(low=(2, 18), scales=(0, 2)),
            ),
            Encoding(
                "q4_1", 32, 20, 3, file_type=3, kernel_number=4, bits=4, is_written=True,
                planes=Planes(low=(4, 20), scales=(0, 4), scale="pair"),
            ),
            Encoding(
                "q5_0", 32, 22, 6, file_type=8, kernel_number=5, bits=5, zero=16, is_written=True,
                planes=Planes(low=(6, 22), high=(2, 6), scales=(0, 2), high_runs=True),
            ),
            Encoding(
                "q5_1", 32, 24, 7, file_type=9, kernel_number=6, bits=5, is_written=True,
                planes=Planes(low=(8, 24), high=(4, 8), scales=(0, 4), scale="pair", high_runs=True),
            ),
            Encoding(
                "q8_0", 32, 34, 8, file_type=7, kernel_number=7, bits=8, zero=128, is_written=True, head="q8_0",
                planes=Planes(low=(2, 34), scales=(0, 2)),
            ),
            Encoding(
                "q2_k", 256, 84, 10, file_type=10, kernel_number=8, bits=2, is_written=True, narrower="q4_0",
                planes=Planes(low=(16, 80), scales=(0, 16), supers=(80, 84), scale="nibbles", group=16, step=32),
            ),
            Encoding(
                "q3_k", 256, 110, 11, file_type=11, kernel_number=9, bits=3, zero=4, is_written=True, narrower="q4_0",
                planes=Planes(
                    low=(32, 96), high=(0, 32), scales=(96, 108), supers=(108, 110), scale="signed", group=16, step=32
                ),
            ),
            Encoding(
                "q4_k", 256, 144, 12, file_type=14, kernel_number=10, bits=4, is_written=True, narrower="q5_0",
                planes=Planes(low=(16, 144), scales=(4, 16), supers=(0, 4), scale="bytes"),
            ),
            Encoding(
                "q5_k", 256, 176, 13, file_type=16, kernel_number=11, bits=5, is_written=True, narrower="q5_1",
                planes=Planes(low=(48, 176), high=(16, 48), scales=(4, 16), supers=(0, 4), scale="bytes"),
            ),
            Encoding(
                "q6_k", 256, 210, 14, file_type=18, kernel_number=12, bits=6, zero=32, is_written=True, narrower="q8_0",
                planes=Planes(
                    low=(0, 128), high=(128, 192), scales=(192, 208), supers=(208, 210), scale="signed", group=16,
                    step=64,
                ),
            ),
            Encoding(
                "iq4_nl", 32, 18, 20, file_type=25, kernel_number=13, bits=4, levels=IQ4_LEVELS, is_written=True,
                planes=Planes(low=(2, 18), scales=(0, 2)),
            ),
            Encoding(
                "iq4_xs", 256, 136, 23, kernel_number=14, bits=4, levels=IQ4_LEVELS,
                planes=Planes(low=(8, 136), scales=(2, 8), supers=(0, 2), scale="signed"),
            ),
            Encoding(
                "mxfp4", 32, 17, 39, file_type=38, kernel_number=16, bits=4, levels=E2M1_DOUBLED, is_written=True,
                head="q8_0", planes=Planes(low=(1, 17), scales=(0, 1), scale="e8m0"),
            ),
            Encoding(
                "nvfp4", 64, 36, 40, kernel_number=17, bits=4, levels=E2M1_DOUBLED,
                planes=Planes(low=(4, 36), scales=(0, 4), scale="e4m3", group=16, step=8),
            ),
            Encoding("q1_0", 128, 18, 41, kernel_number=18, bits=1, levels=(-1, 1)),
            Encoding("q2_0", 64, 18, 42, kernel_number=19, bits=2, zero=1),
            Encoding("tq1_0", 256, 54, 34, file_type=36, is_written=True, is_ternary=True, narrower="q4_0"),
            Encoding(
                "tq2_0", 256, 66, 35, file_type=37, kernel_number=15, bits=2, zero=1, is_written=True, is_ternary=True,
                narrower="q4_0", planes=Planes(low=(0, 64), scales=(64, 66), group=256, step=32),
            ),
            # Of microsoft/BitNet's fork of ggml, whose id 36 upstream has given up: one scale and 28 unused bytes
            # behind the codes.
            Encoding(
                "i2_s", 128, 32, 36, kernel_number=20, bits=2, zero=1, tail_nbytes=32, is_written=True, is_ternary=True,
                narrower="q4_0", planes=Planes(low=(0, 32), scale="whole", group=128, step=32, is_descending=True),
            ),
            Encoding("f32", 1, 4, 0, file_type=0, kernel_number=0, is_written=True, head="f32"),
            Encoding("f16", 1, 2, 1, file_type=1, kernel_number=1, is_written=True, head="f16"),
            Encoding("bf16", 1, 2, 30, file_type=32, kernel_number=2, is_written=True, head="bf16"),
            Encoding("i8", 1, 1, 24),
            Encoding("i16", 1, 2, 25),
            Encoding("i32", 1, 4, 26),
            Encoding("i64", 1, 8, 27),
            Encoding("f64", 1, 8, 28),
        )
    }
)  # fmt: skip

MXFP4 = ENCODINGS["mxfp4"]  # what pairs of blocks and scales are shown as (checkpoint/mxfp4_pairs.py)
I2_S = ENCODINGS["i2_s"]  # what all ternary weights under one scale are shown as (checkpoint/bitnet_packing.py)


def has_tensor_scale(encoding: str) -> bool:
    """Return whether a stored tensor has one scale behind its last row; of any encoding's name."""
    return encoding in ENCODINGS and ENCODINGS[encoding].has_tensor_scale
