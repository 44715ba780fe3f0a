"""iq4_nl: 32 four-bit codes into a table of uneven levels, and a scale.

Legend: N blocks.

    0 d[2]  2 codes[16]
    codes byte j: hhhh llll, l = element j, h = element j + 16
    y = d * IQ4_LEVELS[q]
"""

import torch

from graphcore.quant.bits import field, fp16, lookup, planes
from graphcore.quant.codebooks import IQ4_LEVELS
from graphcore.quant.format import Format


class Iq4NlFormat(Format):
    """Four bits, uneven levels."""

    def dequantize_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Decode: [N, 18] uint8 -> [N, 32] float32."""
        codes = planes(field(blocks, 2, 16), bits=4).flatten(1)  # [N, 32]
        return lookup(IQ4_LEVELS, codes).mul_(fp16(blocks, 0))


IQ4_NL = Iq4NlFormat("iq4_nl", block_elements=32, block_nbytes=18)
