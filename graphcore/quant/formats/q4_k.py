"""q4_k: 256 four-bit weights in 8 groups of 32, each with a six-bit scale and minimum.

Legend: N blocks.

    0 d[2]  2 dmin[2]  4 scales and minimums[12], see k_scales  16 codes[128]
    codes, chunk c (32 bytes each), byte l: hhhh llll, low = element 64 * c + l, high = element 64 * c + 32 + l
    y = (d * scale) * q - dmin * minimum
"""

import torch

from graphcore.quant.bits import field, fp16, planes
from graphcore.quant.format import Format
from graphcore.quant.k_scales import unpack_scales_and_minimums


class Q4KFormat(Format):
    """Four bits, with an offset per 32 weights."""

    def dequantize_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Decode: [N, 144] uint8 -> [N, 256] float32."""
        scales, minimums = unpack_scales_and_minimums(field(blocks, 4, 12))  # [N, 8] each
        scale = fp16(blocks, 0) * scales.to(torch.float32)
        minimum = fp16(blocks, 2) * minimums.to(torch.float32)
        codes = planes(field(blocks, 16, 128).view(-1, 4, 32), bits=4).view(-1, 8, 32)  # [N, group, 32]
        return codes.to(torch.float32).mul_(scale.unsqueeze(2)).sub_(minimum.unsqueeze(2)).flatten(1)


Q4_K = Q4KFormat("q4_k", block_elements=256, block_nbytes=144)
