"""A file's blocks taken apart into the planes that GPU kernels read (kernels/device_layout.py draws them), and back.

Legend: R rows, K blocks of a row, W bytes of a block.

Bytes are copied as they lie in a block, but for two things: q4_k's and q5_k's nibbles are regrouped, so that sixteen
bytes hold the 32 weights of one scale, and scales of six bits are widened to bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from graphcore.quant.bit_packing import pack_runs
from graphcore.quant.bits import runs
from graphcore.quant.formats.q3_k import pack_scales, unpack_scales
from graphcore.quant.k_scales import pack_scales_and_minimums, unpack_scales_and_minimums

Plane = tuple[int, int]  # first byte in a block, and the one behind the last
Change = Callable[[Tensor], Tensor]  # [R, K, bytes in the file] uint8 -> [R, K, bytes here] uint8

# Low codes, high codes, scales, supers: where they lie in a block. None: the format has none.
BLOCK_PLANES: Mapping[str, tuple[Plane | None, ...]] = MappingProxyType(
    {
        "q4_0": ((2, 18), None, (0, 2), None),
        "q4_1": ((4, 20), None, (0, 4), None),
        "q5_0": ((6, 22), (2, 6), (0, 2), None),
        "q5_1": ((8, 24), (4, 8), (0, 4), None),
        "q8_0": ((2, 34), None, (0, 2), None),
        "q2_k": ((16, 80), None, (0, 16), (80, 84)),
        "q3_k": ((32, 96), (0, 32), (96, 108), (108, 110)),
        "q4_k": ((16, 144), None, (4, 16), (0, 4)),
        "q5_k": ((48, 176), (16, 48), (4, 16), (0, 4)),
        "q6_k": ((0, 128), (128, 192), (192, 208), (208, 210)),
        "iq4_nl": ((2, 18), None, (0, 2), None),
        "iq4_xs": ((8, 136), None, (2, 8), (0, 2)),
        "tq2_0": ((0, 64), None, (64, 66), None),
        "mxfp4": ((1, 17), None, (0, 1), None),
        "nvfp4": ((4, 36), None, (0, 4), None),
        "i2_s": ((0, 32), None, None, None),
    }
)


def regroup_nibbles(codes: Tensor) -> Tensor:
    """Return units of 32 consecutive weights, of chunks whose low nibbles are 32 weights and high ones 32 more.

    chunk: bytes 0..15 a, 16..31 b      units: (low a | low b << 4), (high a | high b << 4)
    """
    first, last = codes.reshape(*codes.shape[:-1], -1, 2, 16).unbind(-2)  # [R, K, 4, 16] each
    return torch.stack(((first & 15) | (last << 4), (first >> 4) | (last & 0xF0)), dim=-2).flatten(-3)


def widen_k_scales(packed: Tensor) -> Tensor:
    """Return scale, minimum, scale, minimum, ...: [R, K, 12] -> [R, K, 16]."""
    scales = torch.stack(unpack_scales_and_minimums(packed.reshape(-1, 12)), dim=-1)  # [R * K, 8, 2]
    return scales.view(*packed.shape[:2], 16)


def widen_q3_k_scales(packed: Tensor) -> Tensor:
    """Return int8 scales, 32 taken off: [R, K, 12] -> [R, K, 16]; modulo 256, the bytes are those of int8."""
    return (unpack_scales(packed.reshape(-1, 12)) - 32).view(*packed.shape[:2], 16)


def widen_iq4_xs_scales(packed: Tensor) -> Tensor:
    """Return int8 scales, 32 taken off: [R, K, 6] -> [R, K, 8]."""
    high, low = packed.reshape(-1, 6).tensor_split((2,), dim=1)
    return ((runs(low, bits=4) | runs(high, bits=2) << 4) - 32).view(*packed.shape[:2], 8)


def regroup_back(codes: Tensor) -> Tensor:
    """Undo `regroup_nibbles`."""
    low, high = codes.reshape(*codes.shape[:-1], -1, 2, 16).unbind(-2)  # [R, K, 4, 16] each
    return torch.stack(((low & 15) | (high << 4), (low >> 4) | (high & 0xF0)), dim=-2).flatten(-3)


def narrow_k_scales(wide: Tensor) -> Tensor:
    """Undo `widen_k_scales`."""
    scales, minimums = wide.reshape(-1, 8, 2).unbind(-1)
    return pack_scales_and_minimums(scales, minimums).view(*wide.shape[:2], 12)


def narrow_q3_k_scales(wide: Tensor) -> Tensor:
    """Undo `widen_q3_k_scales`."""
    return pack_scales((wide + 32).reshape(-1, 16)).view(*wide.shape[:2], 12)


def narrow_iq4_xs_scales(wide: Tensor) -> Tensor:
    """Undo `widen_iq4_xs_scales`."""
    scales = wide.reshape(-1, 8) + 32
    return torch.cat((pack_runs(scales >> 4, bits=2), pack_runs(scales & 15, bits=4)), dim=1).view(*wide.shape[:2], 6)


# What is done to low codes and to scales, and what undoes it.
LOW_CHANGES: Mapping[str, tuple[Change, Change]] = MappingProxyType(
    dict.fromkeys(("q4_k", "q5_k"), (regroup_nibbles, regroup_back))
)
SCALE_CHANGES: Mapping[str, tuple[Change, Change]] = MappingProxyType(
    {
        "q3_k": (widen_q3_k_scales, narrow_q3_k_scales),
        "q4_k": (widen_k_scales, narrow_k_scales),
        "q5_k": (widen_k_scales, narrow_k_scales),
        "iq4_xs": (widen_iq4_xs_scales, narrow_iq4_xs_scales),
    }
)


def plane_parts(name: str, blocks: Tensor) -> list[Tensor | None]:
    """Return low codes, high codes, scales and supers of each block: [R, K, W] uint8 -> [R, K, bytes] or None."""
    low, high, scales, supers = (
        None if plane is None else blocks[..., plane[0] : plane[1]] for plane in BLOCK_PLANES[name]
    )
    if low is not None and name in LOW_CHANGES:
        low = LOW_CHANGES[name][0](low)
    if scales is not None and name in SCALE_CHANGES:
        scales = SCALE_CHANGES[name][0](scales)
    return [low, high, scales, supers]


def blocks_of_parts(name: str, parts: Sequence[Tensor]) -> Tensor:
    """Return the file's blocks of what `plane_parts` made of them: [R, K, bytes] uint8 each -> [R, K, W].

    Args:
        parts: of all four planes; those that the format lacks have no bytes.
    """
    low, high, scales, supers = parts
    if name in LOW_CHANGES:
        low = LOW_CHANGES[name][1](low)
    if name in SCALE_CHANGES:
        scales = SCALE_CHANGES[name][1](scales)
    placed = zip(BLOCK_PLANES[name], (low, high, scales, supers), strict=True)
    ordered = sorted(((plane, part) for plane, part in placed if plane is not None), key=lambda one: one[0])
    return torch.cat([part for _, part in ordered], dim=-1)
