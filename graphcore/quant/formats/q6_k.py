"""q6_k: 256 signed six-bit weights in 16 groups of 16, each with an int8 scale.

Legend: N blocks.

    0 low_codes[128]  128 high_codes[64]  192 scales[16], int8  208 d[2]
    low_codes, half h (64 bytes each), byte l: hhhh llll, low = element 128 * h + l, high = element 128 * h + 64 + l
    high_codes, half h (32 bytes each), byte l: 3322 1100, two bits s = element 128 * h + 32 * s + l
    y = (d * scale) * ((high << 4 | low) - 32)
"""

import torch

from graphcore.quant.bits import field, fp16, planes
from graphcore.quant.format import Format


class Q6KFormat(Format):
    """Six bits, symmetric."""

    def dequantize_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Decode: [N, 210] uint8 -> [N, 256] float32."""
        scales = fp16(blocks, 208) * field(blocks, 192, 16).view(torch.int8).to(torch.float32)  # [N, 16]
        codes = planes(field(blocks, 0, 128).view(-1, 2, 64), bits=4).flatten(1)  # [N, 256]
        codes |= planes(field(blocks, 128, 64).view(-1, 2, 32), bits=2).flatten(1) << 4
        signed = codes.to(torch.float32).sub_(32).view(-1, 16, 16)  # [N, g, 16]
        return signed.mul_(scales.unsqueeze(2)).flatten(1)


Q6_K = Q6KFormat("q6_k", block_elements=256, block_nbytes=210)
