"""q4_0: 32 signed four-bit weights and a scale.

Legend: N blocks.

    0 d[2]  2 codes[16]
    codes byte j: hhhh llll, l = element j, h = element j + 16
    y = d * (q - 8)
"""

import torch

from graphcore.quant.bits import field, fp16, planes
from graphcore.quant.format import Format


class Q40Format(Format):
    """Four bits, symmetric."""

    def dequantize_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Decode: [N, 18] uint8 -> [N, 32] float32."""
        codes = planes(field(blocks, 2, 16), bits=4).flatten(1)  # [N, 32]
        return codes.to(torch.float32).sub_(8).mul_(fp16(blocks, 0))


Q4_0 = Q40Format("q4_0", block_elements=32, block_nbytes=18)
