"""Unpacking nibbles, bit planes and number fields from blocks of bytes.

Legend: N blocks, W bytes per block. Every function returns new memory and leaves its input alone.

Two ways in which formats lay small codes into bytes:

    planes   byte j holds elements j, j + n, j + 2n, ... : one contiguous run of elements per bit position
    runs     byte j holds consecutive elements k*j, k*j + 1, ..., lowest bits first
"""

from collections.abc import Sequence

import torch

BYTE_BITS = 8


def field(blocks: torch.Tensor, start: int, nbytes: int) -> torch.Tensor:
    """Return bytes [start, start + nbytes) of every block as a contiguous copy.

    A copy, because the vectorised byte operations want contiguous memory, and a wider dtype wants alignment: blocks
    may start at any byte of a file.

    Args:
        blocks: [N, W] uint8.

    Returns:
        [N, nbytes] uint8.
    """
    return blocks[:, start : start + nbytes].clone(memory_format=torch.contiguous_format)


def fp16(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Return the little-endian float16 at byte `start` of every block: [N, W] uint8 -> [N, 1] float32."""
    return field(blocks, start, 2).view(torch.float16).to(torch.float32)


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


def lookup(values: Sequence[int], codes: torch.Tensor) -> torch.Tensor:
    """Return `values[code]` for every code: uint8 -> float32, same shape."""
    table = torch.tensor(values, dtype=torch.float32, device=codes.device)
    return table.index_select(0, codes.flatten().to(torch.int32)).view(codes.shape)
