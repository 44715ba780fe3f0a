"""iq4_xs: 256 four-bit codes into a table of uneven levels, in 8 groups of 32 with a signed six-bit scale each.

Legend: N blocks.

    0 d[2]  2 high_scales[2]  4 low_scales[4]  8 codes[128]
    low_scales byte i: hhhh llll, low four bits of scale 2 * i (l) and of scale 2 * i + 1 (h)
    high_scales byte i: ddcc bbaa, top two bits of scales 4 * i (a) to 4 * i + 3 (d)
    codes, group b (16 bytes each), byte l: hhhh llll, low = element 32 * b + l, high = element 32 * b + 16 + l
    y = (d * (scale - 32)) * IQ4_LEVELS[q]
"""

import torch

from graphcore.encodings import IQ4_LEVELS
from graphcore.quant.bits import field, fp16, lookup, planes, runs
from graphcore.quant.format import Format


class Iq4XsFormat(Format):
    """Four bits, uneven levels, a scale per 32 weights."""

    def dequantize_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Decode: [N, 136] uint8 -> [N, 256] float32."""
        packed_scales = runs(field(blocks, 4, 4), bits=4) | runs(field(blocks, 2, 2), bits=2) << 4  # [N, 8]
        scales = fp16(blocks, 0) * packed_scales.to(torch.float32).sub_(32)  # [N, 8]
        codes = planes(field(blocks, 8, 128).view(-1, 8, 16), bits=4).view(-1, 8, 32)  # [N, group, 32]
        return lookup(IQ4_LEVELS, codes).mul_(scales.unsqueeze(2)).flatten(1)


IQ4_XS = Iq4XsFormat.of("iq4_xs")
