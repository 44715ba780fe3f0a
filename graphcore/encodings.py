"""Encodings: how a tensor's bytes are stored. Plain data, without torch.

Each encoding is described in its module in quant/formats/, next to the code that decodes it. Users of the fields:

    block, tail, ggml_id, file_type       checkpoint/, export/     sizes and places in files
    bits, zero, levels, kernel_number     kernels/cpu/native/      generated into encodings.h
                                          (kernels/cpu/native_header.py)
    float_levels                          kernels/, quant/         values of codes that are no integers
    planes                                kernels/, quant/         what a GPU holds (kernels/gpu/layout.py draws it)
    is_ternary, narrower, head            quant/format_choice.py   the format that dense weights are packed as
    stretches                             quant/, kernels/cpu/     searches for scales, in torch and in C++
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

# E2M1 times 2, so that all are integers: sign bit, two exponent bits, a mantissa bit. ggml has +0 for code 8 (OCP: -0).
# Source: OCP Microscaling Formats v1.0, section 5.3.3; ggml/src/ggml-common.h, kvalues_mxfp4.
E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

# Non-linear four-bit levels. Source: ggml/src/ggml-common.h, kvalues_iq4nl.
IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

# Quantiles of a normal distribution, and E2M1 divided by 12 with 1/192 as its subnormal; as float32.
# Source: bitsandbytes, functional.py, get_4bit_type.
NF4_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
FP4_MAGNITUDES = (0.0, 1 / 192, 8 / 12, 1.0, 4 / 12, 6 / 12, 2 / 12, 3 / 12)
FP4_LEVELS = (*FP4_MAGNITUDES, *(-size for size in FP4_MAGNITUDES))

# Sign bit, four exponent bits with a bias of 7, three mantissa bits; no infinities. Source: OCP 8-bit Floating Point
# Specification, table 2; its NaN, 0x7f, would be 480.
E4M3_MAGNITUDES = tuple(
    (8 + code % 8) * 2.0 ** (code // 8 - 10) if code >= 8 else code * 2.0**-9 for code in range(128)
)
E4M3_LEVELS = (*E4M3_MAGNITUDES, *(-size for size in E4M3_MAGNITUDES))

Place = tuple[int, int]  # first byte in a block, and the end (exclusive)


@dataclass(frozen=True)
class Planes:
    """The split of a block's bytes into the planes that GPU kernels read.

    Attributes:
        low, high: places of the codes' low bits, and of their highest one or two; None if there is no such plane.
        scales, supers: places of the scales, and of the super scales (each scales the scales of 256 weights) or zeros.
        scale: kind of a scale:
            half    float16 d                       weight = d * (code - zero)
            pair    float16 d, float16 m            weight = d * code + m
            e8m0    exponent byte e                 weight = 2^(e - 128) * level
            e4m3    byte s, an unsigned E4M3        weight = 0.5 * s * level
            signed  int8 s under a super d          weight = (d * s) * (code - zero)
            bytes   uint8 s, uint8 m under d, dmin  weight = (d * s) * code - dmin * m
            nibbles one byte s | m << 4, the same
            half_zero, float_zero   float16 or float32 d, and a byte z in the supers' plane
                                                    weight = d * (code - z)
            float   float32 d                       weight = d * level
            whole   none: one for the tensor        weight = (code - zero) * scale
        group: number of weights that share a scale.
        step: number of weights between one slice of a byte's bits and the next.
        is_descending: True if the first slice has the highest bits.
        high_runs: True if the high codes of consecutive weights are consecutive bits.
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
        """The places of low codes, high codes, scales and supers."""
        return self.low, self.high, self.scales, self.supers


@dataclass(frozen=True)
class Encoding:
    """The description of one encoding.

    Attributes:
        name: lower-case ggml type name, such as "q4_k", or that of a format of Hugging Face's folders.
        block_elements: number of elements of a block; 1 for dense encodings.
        block_nbytes: number of bytes of a block.
        ggml_id: number of the type in GGUF files; None if they have no such type. Source: ggml.c, `type_traits`, as of
            ggml 0.25.
        file_type: llama.cpp's number for a file of such matrices. Source: gguf.constants.LlamaFileType.
        kernel_number: number of the encoding in the C++ kernels; None if they do not multiply it.
        bits: bits of a code; 0 if there are no codes, or none of whole bits.
        zero: code that stands for 0.
        levels: values of the codes; empty if a code's value is the code minus `zero`, or the block's own zero.
        float_levels: values of codes that are no integers; rounded activations would have no exact sums with them.
        tail_nbytes: bytes after the last block, for a scale of the whole tensor. An encoding with a tail counts its
            blocks over the whole tensor, any other row by row.
        planes: planes of a GPU's kernels; None if they do not multiply it.
        is_ternary: True if weights are -1, 0 and 1 times a scale.
        narrower: encoding of about the same width in blocks of 32, for rows that are no multiple of the block.
        head: encoding that the head is packed as, where matrices are packed as this one.
        stretches: offsets that the search for a group's scale tries (quant/k_search.py); empty if there is no search.
    """

    name: str
    block_elements: int
    block_nbytes: int
    ggml_id: int | None = None
    file_type: int | None = None
    kernel_number: int | None = None
    bits: int = 0
    zero: int = 0
    levels: tuple[int, ...] = ()
    float_levels: tuple[float, ...] = ()
    tail_nbytes: int = 0
    planes: Planes | None = None
    is_ternary: bool = False
    narrower: str | None = None
    head: str = "q6_k"
    stretches: tuple[float, ...] = ()

    @property
    def is_dense(self) -> bool:
        """Whether each element is stored as one plain float."""
        return self.block_elements == 1

    @property
    def has_tensor_scale(self) -> bool:
        """Whether a scale of the whole tensor follows the last row, so that single rows are not complete tensors."""
        return self.tail_nbytes > 0

    def divides(self, shape: Sequence[int]) -> bool:
        """Return whether a tensor of this shape (torch order) is a whole number of blocks."""
        counted = prod(shape) if self.has_tensor_scale else prod(shape[-1:])
        return counted % self.block_elements == 0

    def nbytes(self, shape: Sequence[int]) -> int:
        """Return the stored size in bytes of a tensor of this shape (torch order)."""
        assert self.divides(shape), f"{self.name} cannot store shape {tuple(shape)}"
        return prod(shape) // self.block_elements * self.block_nbytes + self.tail_nbytes


# Encodings that dense weights can be packed as, in the order of messages: the command line names them before torch is
# loaded. A test compares it with the formats that can pack.
PACKABLE = (
    "q4_0",
    "q4_1",
    "q5_0",
    "q5_1",
    "q8_0",
    "q2_k",
    "q3_k",
    "q4_k",
    "q5_k",
    "q6_k",
    "iq4_nl",
    "mxfp4",
    "tq1_0",
    "tq2_0",
    "i2_s",
    "f32",
    "f16",
    "bf16",
)
