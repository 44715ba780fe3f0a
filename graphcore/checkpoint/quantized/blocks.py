"""Blocks of 32 columns from codes, zero points and scales.

Legend: O rows (output features), I columns (input features), G groups of I / G columns, B bits of a code.

    codes    uint8 [O, I B / 8], unsigned; of two codes in a byte, the even column is in the low nibble
    zeros    uint8 [O, G], codes that stand for 0
    scales   [O, G]
"""

import torch
from torch import Tensor

from graphcore.quant.format import Format
from graphcore.quant.formats.affine4 import AFFINE4
from graphcore.quant.formats.affine8 import AFFINE8
from graphcore.quant.formats.q4_0 import Q4_0
from graphcore.quant.formats.q8_0 import Q8_0

ROWS_AT_ONCE = 64  # rows whose codes are unpacked together, to sort their columns
BLOCK = 32  # columns of a block of all formats here


def integer_format(bits: int, scale_encoding: str, is_symmetric: bool) -> Format:
    """Return the format that holds integer weights with these scales exactly.

    float32 scales fit in affine8 alone, so weights of four bits take eight then.

    Args:
        bits: 4 or 8.
        scale_encoding: dtype of the scales: f16, bf16 or f32.
    """
    if scale_encoding == "f32":
        return AFFINE8
    if is_symmetric:
        return Q4_0 if bits == 4 else Q8_0
    return AFFINE4 if bits == 4 else AFFINE8


def integer_blocks(one: Format, bits: int, codes: Tensor, zeros: Tensor | None, scales: Tensor) -> Tensor:
    """Return integer weights as blocks of a format of `integer_format`: [O, I / 32, W] uint8.

    Args:
        zeros: None for the middle of the codes.
        scales: dtype of the format's scales.
    """
    rows, num_blocks = len(codes), codes.shape[1] * 8 // bits // BLOCK
    own = codes.view(rows, num_blocks, -1)
    if one is AFFINE8 and bits == 4:
        own = torch.stack([own & 15, own >> 4], dim=-1).flatten(2)
    elif one is Q8_0:
        own = own ^ 0x80
    elif bits == 4:
        own = split_nibbles(own)
    parts = [per_block(scales, num_blocks).view(torch.uint8)]
    if one in (AFFINE4, AFFINE8):
        middle = torch.full((rows, 1), 1 << (bits - 1), dtype=torch.uint8, device="cpu") if zeros is None else zeros
        parts.append(per_block(middle, num_blocks))
    return torch.cat([*parts, own], dim=2)


def float_blocks(codes: Tensor, scales: Tensor) -> Tensor:
    """Return blocks that begin with a float32 scale: [O, K, n] uint8 and [O, K] float32 to [O, K, 4 + n]."""
    return torch.cat([scales.contiguous().unsqueeze(2).view(torch.uint8), codes], dim=2)


def per_block(values: Tensor, num_blocks: int) -> Tensor:
    """Return the value of each block's group: [O, G] to [O, K, 1]."""
    return values.repeat_interleave(num_blocks // values.shape[1], dim=1).unsqueeze(2)


def split_nibbles(pairs: Tensor) -> Tensor:
    """Reorder nibbles within blocks: byte b of columns 2b, 2b + 1 to byte j of columns j, j + 16: [..., 16] uint8."""
    first, second = pairs[..., : BLOCK // 4], pairs[..., BLOCK // 4 :]
    out = torch.empty_like(pairs)
    out[..., 0::2] = (first & 15) | second << 4
    out[..., 1::2] = first >> 4 | second & 0xF0
    return out


def nibbles(packed: Tensor) -> Tensor:
    """Return the codes of four bits in bytes, the lower one first: [..., n] uint8 to [..., 2 n]."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def joined_nibbles(codes: Tensor) -> Tensor:
    """Return codes of four bits in bytes, the lower one first: [..., 2 n] uint8 to [..., n]."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def with_columns(packed: Tensor, bits: int, order: Tensor) -> Tensor:
    """Return codes, [O, I B / 8] uint8, with their columns in an order, int32 [I]."""
    if bits == 8:
        return packed.index_select(1, order)
    out = torch.empty_like(packed)
    for rows, place in zip(torch.split(packed, ROWS_AT_ONCE), torch.split(out, ROWS_AT_ONCE), strict=True):
        place.copy_(joined_nibbles(nibbles(rows).index_select(1, order)))
    return out
