"""The tensor types of GGUF files, by the numbers that files have for them.

Blocks run along ne[0], the contiguous dimension, which is the last one in torch order.

`general.file_type` is no source for any of this: Q4_K_M is a mixture of tensor types, and the fork and upstream use the
same numbers for different mixtures.
"""

from collections.abc import Mapping
from types import MappingProxyType

from graphcore.encodings import ENCODINGS, Encoding

GGML_TYPES: Mapping[int, Encoding] = MappingProxyType(
    {one.ggml_id: one for one in sorted(ENCODINGS.values(), key=lambda one: one.ggml_id)}
)
"""Every type that can be read, by its number."""

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
