"""Writing i2_s, the ternary type of BitNet's GGUF files; quant/formats/i2_s.py reads it and has the picture.

Source: microsoft/BitNet, src/ggml-bitnet-mad.cpp, quantize_i2_s.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

ENCODING = "i2_s"
GROUP = 128  # elements that share 32 bytes
TAIL_NBYTES = 32  # the scale and its padding


def fits_i2_s(shape: Sequence[int]) -> bool:
    """Return whether a tensor of this shape is a whole number of groups."""
    return prod(shape) % GROUP == 0


def i2_s_nbytes(shape: Sequence[int]) -> int:
    """Return the stored size of a tensor of this shape, in bytes."""
    return prod(shape) // 4 + TAIL_NBYTES


def pack_i2_s(codes: Tensor, scale: Tensor) -> Tensor:
    """Return the bytes of a tensor of (codes - 1) * scale.

    Args:
        codes: any shape of a whole number of groups, uint8, 0 to 3.
        scale: one float32.

    Returns:
        [elements / 4 + 32] uint8.
    """
    groups = codes.reshape(-1, 4, 32)  # element 32 * j + l of a group is [j, l]
    packed = groups[:, 0] << 6
    for position in (1, 2, 3):
        packed |= groups[:, position] << (6 - 2 * position)
    return with_i2_s_tail(packed.flatten(), scale)


def with_i2_s_tail(packed: Tensor, scale: Tensor) -> Tensor:
    """Return packed codes [n] uint8 with the tensor's scale, one float32, and its padding after them."""
    tail = torch.zeros(TAIL_NBYTES, dtype=torch.uint8)
    tail[:4] = scale.to(torch.float32).reshape(1).view(torch.uint8)
    return torch.cat((packed, tail))
