"""Arithmetic of q4_k's and q5_k's blocks: their six-bit scales in 12 bytes, and the scales' form in a GPU's memory.

Legend: N blocks. Eight sub-blocks j of 32 elements have a 6-bit scale and a 6-bit minimum each.

    byte j     (0..3)   SSss ssss   ss ssss = scale j     SS = top bits of scale j + 4
    byte j + 4 (0..3)   MMmm mmmm   mm mmmm = minimum j   MM = top bits of minimum j + 4
    byte j + 8 (0..3)   mmmm ssss   low four bits of minimum j + 4 and of scale j + 4

A GPU's kernels (kernels/gpu/layout.py) read 16 bytes with the 32 weights of one scale, and byte-wide scales.
Legend there: R rows, K blocks of a row.

Source: ggml/src/ggml-quants.c, get_scale_min_k4.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from graphcore.quant.bit_fields import field, fp16, fp16_bytes
from graphcore.quant.format import Change
from graphcore.quant.k_search import as_columns, as_rows, fit_affine, refine_affine, round_scales


def unpack_scales_and_minimums(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and minimums, 0 to 63: [N, 12] uint8 -> two of [N, 8] uint8."""
    first_scales, first_minimums, low_bits = packed.view(-1, 3, 4).unbind(1)  # [N, 4] each
    last_scales = (low_bits & 15) | (first_scales >> 6 << 4)
    last_minimums = (low_bits >> 4) | (first_minimums >> 6 << 4)
    scales = torch.cat((first_scales & 63, last_scales), dim=1)
    minimums = torch.cat((first_minimums & 63, last_minimums), dim=1)
    return scales, minimums


def pack_scales_and_minimums(scales: torch.Tensor, minimums: torch.Tensor) -> torch.Tensor:
    """Return the 12 bytes: two of [N, 8] uint8, 0 to 63 -> [N, 12] uint8."""
    first_scales, last_scales = scales.chunk(2, dim=1)  # [N, 4] each
    first_minimums, last_minimums = minimums.chunk(2, dim=1)
    low_bits = (last_scales & 15) | (last_minimums & 15) << 4
    return torch.cat((first_scales | last_scales >> 4 << 6, first_minimums | last_minimums >> 4 << 6, low_bits), dim=1)


def affine_weights(blocks: Tensor, codes: Tensor) -> Tensor:
    """Return the weights of q4_k's or q5_k's blocks, (d * scale) * code - dmin * minimum.

    Args:
        blocks: [N, bytes] uint8, which begin with d, dmin, and the 12 bytes of scales and minimums.
        codes: [N, 8, 32] uint8.

    Returns:
        [N, 256] float32.
    """
    scales, minimums = unpack_scales_and_minimums(field(blocks, 4, 12))  # [N, 8] each
    scale = fp16(blocks, 0) * scales.to(torch.float32)
    minimum = fp16(blocks, 2) * minimums.to(torch.float32)
    return codes.to(torch.float32).mul_(scale.unsqueeze(2)).sub_(minimum.unsqueeze(2)).flatten(1)


def quantize_affine(dense: Tensor, top: int, stretches: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """Return the first 16 bytes of q4_k's or q5_k's blocks, and their codes; scales by search, see k_search.

    Args:
        dense: [N, 256] float32.
        top: largest code.
        stretches: the argument of `k_search.fit_affine`.

    Returns:
        [N, 16] uint8 and [N, 256] uint8.
    """
    groups = as_columns(dense, num_groups=8)
    scale, minimum = (found.view(-1, 8) for found in fit_affine(groups, top, stretches))  # [N, 8] each
    scales, minimums = round_scales(scale, 0, 63), round_scales(minimum, 0, 63)
    codes = as_rows(refine_affine(groups, scales, minimums, top, 63), len(dense))
    packed = pack_scales_and_minimums(scales.codes.to(torch.uint8), minimums.codes.to(torch.uint8))
    return torch.cat((fp16_bytes(scales.unit), fp16_bytes(minimums.unit), packed), dim=1), codes


def regroup_nibbles(codes: Tensor) -> Tensor:
    """Return units of 32 consecutive weights, from chunks that have 32 weights in low nibbles and 32 in high ones.

    chunk: bytes 0..15 a, 16..31 b      units: (low a | low b << 4), (high a | high b << 4)
    """
    first, last = codes.reshape(*codes.shape[:-1], -1, 2, 16).unbind(-2)  # [R, K, 4, 16] each
    return torch.stack(((first & 15) | (last << 4), (first >> 4) | (last & 0xF0)), dim=-2).flatten(-3)


def regroup_back(codes: Tensor) -> Tensor:
    """Undo `regroup_nibbles`."""
    low, high = codes.reshape(*codes.shape[:-1], -1, 2, 16).unbind(-2)  # [R, K, 4, 16] each
    return torch.stack(((low & 15) | (high << 4), (low >> 4) | (high & 0xF0)), dim=-2).flatten(-3)


def widen_k_scales(packed: Tensor) -> Tensor:
    """Return scale, minimum, scale, minimum, ...: [R, K, 12] -> [R, K, 16]."""
    scales = torch.stack(unpack_scales_and_minimums(packed.reshape(-1, 12)), dim=-1)  # [R * K, 8, 2]
    return scales.view(*packed.shape[:2], 16)


def narrow_k_scales(wide: Tensor) -> Tensor:
    """Undo `widen_k_scales`."""
    scales, minimums = wide.reshape(-1, 8, 2).unbind(-1)
    return pack_scales_and_minimums(scales, minimums).view(*wide.shape[:2], 12)


def widened_signed(unpack: Callable[[Tensor], Tensor], pack: Callable[[Tensor], Tensor]) -> Change:
    """Return the change from scales stored as 0 to 63 to a GPU's int8 scales, 32 less (as bytes, modulo 256).

    Args:
        unpack: function from a block's bytes to its scales, [N, bytes] uint8 -> [N, scales] uint8.
        pack: inverse of `unpack`.
    """

    def widen(packed: Tensor) -> Tensor:
        return (unpack(packed.reshape(-1, packed.shape[2])) - 32).view(*packed.shape[:2], -1)

    def narrow(wide: Tensor) -> Tensor:
        return pack((wide + 32).reshape(-1, wide.shape[2])).view(*wide.shape[:2], -1)

    return Change(widen, narrow)


REGROUPED = Change(regroup_nibbles, regroup_back)  # for low codes
WIDENED = Change(widen_k_scales, narrow_k_scales)  # for scales
