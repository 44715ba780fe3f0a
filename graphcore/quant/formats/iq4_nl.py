"""iq4_nl: 32 four-bit codes into a table of uneven levels, and a scale.

Legend: N blocks.

    0 d[2]  2 codes[16]
    codes byte j: hhhh llll, l = element j, h = element j + 16
    y = d * IQ4_LEVELS[q]
"""

import itertools

import torch

from graphcore.encodings import IQ4_LEVELS
from graphcore.quant.bit_packing import extreme, fp16_bytes, inverse, pack_planes, through_fp16
from graphcore.quant.bits import field, fp16, lookup, planes
from graphcore.quant.format import Format
from graphcore.quant.k_search import TINIEST

STRETCHES = (0, -7, -6, -5, -4, -3, -2, -1, 1, 2, 3, 4, 5, 6, 7)  # of the extreme weight's level, as fit_symmetric's


def nearest_codes(steps: torch.Tensor) -> torch.Tensor:
    """Return the codes of the nearest levels, of two the lower: float32 -> uint8, same shape.

    All levels are whole, so the midpoints between them are multiples of a half, and so is the table's grid.
    """
    midpoints = torch.tensor([low + high for low, high in itertools.pairwise(IQ4_LEVELS)], dtype=torch.int32)
    table = torch.bucketize(torch.arange(-256, 257, dtype=torch.int32), midpoints).to(torch.uint8).to(steps.device)
    cells = (steps * 2).ceil_().clamp_(-256, 256).add_(256).to(torch.int32)
    return table.index_select(0, cells.flatten()).view(steps.shape)


def fit_levels(x: torch.Tensor) -> torch.Tensor:
    """Return the scale of each block with the smallest sum of squared errors found: [N, 32] -> [N, 1]."""
    per_value = inverse(extreme(x))
    scale, saved = torch.zeros_like(per_value), torch.full_like(per_value, -1)
    for stretch in (*STRETCHES, None):
        steps = inverse(scale) if stretch is None else (IQ4_LEVELS[0] - stretch) * per_value
        q = lookup(IQ4_LEVELS, nearest_codes(x * steps))
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
        return lookup(IQ4_LEVELS, codes).mul_(fp16(blocks, 0))

    def quantize_blocks(self, dense: torch.Tensor) -> torch.Tensor:
        """Encode: [N, 32] float32 -> [N, 18] uint8; the scale by search."""
        scale = through_fp16(fit_levels(dense))
        codes = nearest_codes(dense * inverse(scale))
        return torch.cat((fp16_bytes(scale), pack_planes(codes.view(-1, 2, 16), bits=4)), dim=1)


IQ4_NL = Iq4NlFormat.of("iq4_nl")
