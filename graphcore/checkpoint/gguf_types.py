"""The tensor types of GGUF files: id, name, elements and bytes of a block.

Blocks run along ne[0], the contiguous dimension, which is the last one in torch order. Source: ggml.c, `type_traits`,
as of ggml 0.25; i2_s: microsoft/BitNet's fork, whose id 36 upstream has given up.

`general.file_type` is no source for any of this: Q4_K_M is a mixture of tensor types, and the fork and upstream use the
same numbers for different mixtures.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType


@dataclass(frozen=True)
class GGMLType:
    """How one type of tensor is stored.

    Attributes:
        id: in the file.
        name: lower case, as `TensorInfo.encoding` has it.
        block_elements: elements per block.
        block_bytes: bytes per block.
        tail_bytes: bytes after the last block; a type that has a tail counts its blocks over the whole tensor, any
            other counts them row by row.
    """

    id: int
    name: str
    block_elements: int
    block_bytes: int
    tail_bytes: int = 0

    def divides(self, shape: Sequence[int]) -> bool:
        """Return whether a tensor of this shape (torch order) is a whole number of blocks."""
        row = prod(shape) if self.tail_bytes else prod(shape[-1:])
        return row % self.block_elements == 0

    def nbytes(self, shape: Sequence[int]) -> int:
        """Return the stored size in bytes of a tensor of this shape (torch order)."""
        assert self.divides(shape), f"{self.name} cannot store shape {tuple(shape)}"
        return prod(shape) // self.block_elements * self.block_bytes + self.tail_bytes


GGML_TYPES: Mapping[str, GGMLType] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            GGMLType(0, "f32", 1, 4),
            GGMLType(1, "f16", 1, 2),
            GGMLType(2, "q4_0", 32, 18),
            GGMLType(3, "q4_1", 32, 20),
            GGMLType(6, "q5_0", 32, 22),
            GGMLType(7, "q5_1", 32, 24),
            GGMLType(8, "q8_0", 32, 34),
            GGMLType(10, "q2_k", 256, 84),
            GGMLType(11, "q3_k", 256, 110),
            GGMLType(12, "q4_k", 256, 144),
            GGMLType(13, "q5_k", 256, 176),
            GGMLType(14, "q6_k", 256, 210),
            GGMLType(20, "iq4_nl", 32, 18),
            GGMLType(23, "iq4_xs", 256, 136),
            GGMLType(24, "i8", 1, 1),
            GGMLType(25, "i16", 1, 2),
            GGMLType(26, "i32", 1, 4),
            GGMLType(27, "i64", 1, 8),
            GGMLType(28, "f64", 1, 8),
            GGMLType(30, "bf16", 1, 2),
            GGMLType(34, "tq1_0", 256, 54),
            GGMLType(35, "tq2_0", 256, 66),
            # Flat groups of 128 two-bit codes, then one f32 scale and 28 unused bytes: ne / 4 + 32 in all.
            GGMLType(36, "i2_s", 128, 32, tail_bytes=32),
            GGMLType(39, "mxfp4", 32, 17),
            GGMLType(40, "nvfp4", 64, 36),
            GGMLType(41, "q1_0", 128, 18),
            GGMLType(42, "q2_0", 64, 18),
        )
    }
)
"""Every type that can be read, by name."""

GGML_TYPES_BY_ID: Mapping[int, GGMLType] = MappingProxyType({kind.id: kind for kind in GGML_TYPES.values()})

UNREAD_TYPE_NAMES: Mapping[int, str] = MappingProxyType(
    {
        4: "q4_2, given up in 2023",
        5: "q4_3, given up in 2023",
        9: "q8_1",
        15: "q8_k",
        16: "iq2_xxs",
        17: "iq2_xs",
        18: "iq3_xxs",
        19: "iq1_s",
        21: "iq3_s",
        22: "iq2_s",
        29: "iq1_m",
        31: "q4_0_4_4, given up for q4_0",
        32: "q4_0_4_8, given up for q4_0",
        33: "q4_0_8_8, given up for q4_0",
        37: "i8_s of BitNet, or iq4_nl_4_8",
        38: "tl1 of BitNet, or iq4_nl_8_8",
    }
)
"""What the ids mean that can not be read, for messages."""

TL2_ID = 39
"""mxfp4, but in files of BitNet's fork tl2: architectures that start with "bitnet"."""
