"""iq4_nl: 32 four-bit codes that index a table of uneven levels, and a scale.

Legend: N blocks.

    0 d[2]  2 codes[16]
    codes byte j: hhhh llll, l = element j, h = element j + 16
    y = d * IQ4_LEVELS[q]
"""

import itertools

import torch

from graphcore.encodings import IQ4_LEVELS, Planes
from graphcore.quant.bit_fields import (
    extreme,
    field,
    fp16,
    fp16_bytes,
    inverse,
    levels_of,
    pack_planes,
    planes,
    through_fp16,
)
from graphcore.quant.format import Format
from graphcore.quant.k_search import TINIEST

STRETCHES = (0, -7, -6, -5, -4, -3, -2, -1, 1, 2, 3, 4, 5, 6, 7)  # for the extreme weight's level, as in fit_symmetric


def nearest_codes(steps: torch.Tensor) -> torch.Tensor:
    """Return the codes of the nearest levels, the lower one of two: float32 -> uint8, same shape.

    All levels are integers, so the midpoints between them are multiples of a half, and the table's grid is, too.
    """
    midpoints = torch.tensor(
        [low + high for low, high in itertools.pairwise(IQ4_LEVELS)], dtype=torch.int32, device="cpu"
    )
    table = (
        torch.bucketize(torch.arange(-256, 257, dtype=torch.int32, device="cpu"), midpoints)
        .to(torch.uint8)
        .to(steps.device)
    )
    cells = (steps * 2).ceil_().clamp_(-256, 256).add_(256).to(torch.int32)
    return table.index_select(0, cells.flatten()).view(steps.shape)


def fit_levels(x: torch.Tensor) -> torch.Tensor:
    """Return the scale of each block with the smallest sum of squared errors found: [N, 32] -> [N, 1]."""
    per_value = inverse(extreme(x))
    scale, saved = torch.zeros_like(per_value), torch.full_like(per_value, -1)
    for stretch in (*STRETCHES, None):
        steps = inverse(scale) if stretch is None else (IQ4_LEVELS[0] - stretch) * per_value
        q = levels_of(IQ4_LEVELS, nearest_codes(x * steps))
        sum_xq, sum_qq = (x * q).sum(1, keepdim=True), (q * q).sum(1, keepdim=True).clamp_(min=TINIEST)
        new = sum_xq / sum_qq
        is_better = new * sum_xq > saved
        saved, scale = torch.where(is_better, new * sum_xq, saved), torch.where(is_better, new, scale)
    return scale


class Iq4NlFormat(Format):
    """Four bits, uneven levels."""

    def dequantize_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Decode: [N, 18] uint8 -> [N, 32] float32."""
        codes = planes(field(blocks, 2, 16), bits=4).flatten(1)  # [N, 32]
        return levels_of(IQ4_LEVELS, codes).mul_(fp16(blocks, 0))

    def quantize_blocks(self, dense: torch.Tensor) -> torch.Tensor:
        """Encode: [N, 32] float32 -> [N, 18] uint8; the scale is found by search."""
        scale = through_fp16(fit_levels(dense))
        codes = nearest_codes(dense * inverse(scale))
        return torch.cat((fp16_bytes(scale), pack_planes(codes.view(-1, 2, 16), bits=4)), dim=1)


IQ4_NL = Iq4NlFormat(
    name="iq4_nl",
    block_elements=32,
    block_nbytes=18,
    ggml_id=20,
    file_type=25,
    kernel_number=13,
    bits=4,
    levels=IQ4_LEVELS,
    planes=Planes(low=(2, 18), scales=(0, 2)),
)
