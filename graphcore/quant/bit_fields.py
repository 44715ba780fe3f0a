"""Reads and writes nibbles, bit planes and number fields in blocks of bytes.

Legend: N blocks, W bytes per block. Every function returns new memory and leaves its input alone.

Formats lay small codes into bytes in two ways:

    planes   byte j holds elements j, j + n, j + 2n, ... : one contiguous run of elements per bit position
    runs     byte j holds consecutive elements k*j, k*j + 1, ..., lowest bits first

Packing functions undo the reading ones: `pack_planes(planes(bytes)) == bytes`, and the same for runs.
"""

from collections.abc import Sequence

import torch

BYTE_BITS = 8


def field(blocks: torch.Tensor, start: int, nbytes: int) -> torch.Tensor:
    """Return bytes [start, start + nbytes) of every block as a contiguous copy.

    It is a copy because vectorised byte operations need contiguous memory and a wider dtype needs alignment, while
    blocks may start at any byte of a file.

    Args:
        blocks: [N, W] uint8.

    Returns:
        [N, nbytes] uint8.
    """
    return blocks[:, start : start + nbytes].clone(memory_format=torch.contiguous_format)


def fp16(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Return the little-endian float16 at byte `start` of every block: [N, W] uint8 -> [N, 1] float32."""
    return field(blocks, start, 2).view(torch.float16).to(torch.float32)


def fp32(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Return the little-endian float32 at byte `start` of every block: [N, W] uint8 -> [N, 1] float32."""
    return field(blocks, start, 4).view(torch.float32)


def planes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes of each bit position, lowest first: [..., n] uint8 -> [..., 8 / bits, n] uint8.

    Two planes of four bits are the "nibble halves" of most formats:
    byte: hhhh llll, low nibbles are the first half of the elements, high nibbles the second.
    """
    shifted = torch.stack([codes >> shift for shift in range(0, BYTE_BITS, bits)], dim=-2)
    return shifted.bitwise_and_((1 << bits) - 1)


def runs(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return consecutive codes, lowest bits first: [..., n] uint8 -> [..., n * 8 / bits] uint8."""
    shifts = torch.arange(0, BYTE_BITS, bits, dtype=torch.uint8, device=codes.device)
    shifted = codes.unsqueeze(-1) >> shifts  # [..., n, 8 / bits]
    return shifted.bitwise_and_((1 << bits) - 1).flatten(-2)


def levels_of(values: Sequence[float], codes: torch.Tensor) -> torch.Tensor:
    """Return `values[code]` for every code: uint8 -> float32, same shape."""
    table = torch.tensor(values, dtype=torch.float32, device=codes.device)
    return table.index_select(0, codes.flatten().to(torch.int32)).view(codes.shape)


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
    """Return little-endian float16: [N, n] float32 -> [N, 2 * n] uint8; values too large become infinite."""
    return values.to(torch.float16).contiguous().view(torch.uint8)


def through_fp16(values: torch.Tensor) -> torch.Tensor:
    """Return the values rounded to float16, as float32."""
    return values.to(torch.float16).to(torch.float32)


def inverse(values: torch.Tensor) -> torch.Tensor:
    """Return 1 / value, and 0 where that would be infinite, float32: float16 rounds values that small to zero."""
    found = 1 / values
    return torch.where(found.isinf(), 0, found)


def extreme(values: torch.Tensor) -> torch.Tensor:
    """Return the signed value of largest magnitude of each row, the first if there are several: [N, n] -> [N, 1].

    A row of zeros gives +0, whatever their signs, as in libggml: the sign would show in the bytes.
    """
    return values.gather(1, values.abs().argmax(dim=1, keepdim=True)).add_(0.0)


def smallest(values: torch.Tensor) -> torch.Tensor:
    """Return the smallest value of each row; of zeros with both signs the first, as libggml: [N, n] -> [N, 1]."""
    found = values.amin(1, keepdim=True)
    return (
        torch.where(found == 0, values.gather(1, values.argmin(1, keepdim=True)), found) if not found.all() else found
    )


def round_half_away(values: torch.Tensor) -> torch.Tensor:
    """Return the nearest whole numbers, halves away from zero as C's roundf: float32, same shape."""
    whole = values.trunc()
    return whole + values.sub(whole).abs().ge(0.5).to(values.dtype).copysign_(values)
