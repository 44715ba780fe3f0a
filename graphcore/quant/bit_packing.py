"""Laying codes and scales into the bytes of blocks: the reverse of `bits`.

Legend: N blocks. Every function returns new memory. `pack_planes(planes(bytes)) == bytes`, and so for runs.
"""

import torch

from graphcore.quant.bits import BYTE_BITS


def pack_planes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return bytes whose bit positions, lowest first, are the planes: [..., 8 / bits, n] uint8 -> [..., n] uint8."""
    packed = codes.select(-2, 0).clone()
    for plane in range(1, BYTE_BITS // bits):
        packed |= codes.select(-2, plane) << (plane * bits)
    return packed


def pack_runs(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return bytes of consecutive codes, lowest bits first: [..., n * 8 / bits] uint8 -> [..., n] uint8."""
    by_byte = codes.view(*codes.shape[:-1], -1, BYTE_BITS // bits)
    return pack_planes(by_byte.transpose(-1, -2), bits)


def fp16_bytes(values: torch.Tensor) -> torch.Tensor:
    """Return little-endian float16: [N, n] float32 -> [N, 2 * n] uint8; what is too large becomes infinite."""
    return values.to(torch.float16).contiguous().view(torch.uint8)


def through_fp16(values: torch.Tensor) -> torch.Tensor:
    """Return the values as a reader of float16 will see them, float32."""
    return values.to(torch.float16).to(torch.float32)


def inverse(values: torch.Tensor) -> torch.Tensor:
    """Return 1 / value, and 0 where that would be infinite, float32: such small values are zero in any float16."""
    found = 1 / values
    return torch.where(found.isinf(), 0, found)


def extreme(values: torch.Tensor) -> torch.Tensor:
    """Return the value of largest magnitude of each row with its sign, the first of several: [N, n] -> [N, 1].

    A row of zeros gives +0, whatever their signs, as in libggml, whose bytes show it.
    """
    return values.gather(1, values.abs().argmax(dim=1, keepdim=True)).add_(0.0)


def round_half_away(values: torch.Tensor) -> torch.Tensor:
    """Return the nearest whole numbers, halves away from zero as C's roundf: float32, same shape."""
    whole = values.trunc()
    return whole + values.sub(whole).abs().ge(0.5).to(values.dtype).copysign_(values)
