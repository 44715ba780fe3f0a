"""q3_k: 256 signed three-bit weights in 16 groups of 16, each with a signed six-bit scale.

Legend: N blocks.

    0 third_bits[32]  32 codes[64]  96 scales[12]  108 d[2]
    third_bits byte l: bit k = element 32 * k + l
    codes, half h (32 bytes each), byte l: 3322 1100, two bits s = element 128 * h + 32 * s + l
    scales byte i (0..7): hhhh llll, low four bits of scale i (l) and of scale i + 8 (h)
    scales byte 8 + i (0..3): ddcc bbaa, top two bits of scales i (a), i + 4 (b), i + 8 (c), i + 12 (d)
    y = (d * (scale - 32)) * ((third_bit << 2 | q) - 4)
"""

import torch

from graphcore.quant.bits import field, fp16, planes
from graphcore.quant.format import Format


def unpack_scales(packed: torch.Tensor) -> torch.Tensor:
    """Return the 16 scales, 0 to 63: [N, 12] uint8 -> [N, 16] uint8."""
    low = planes(packed[:, :8], bits=4).flatten(1)  # [N, 16]
    high = planes(packed[:, 8:], bits=2).flatten(1)  # [N, 16]
    return low | high << 4


class Q3KFormat(Format):
    """Three bits, symmetric."""

    def dequantize_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Decode: [N, 110] uint8 -> [N, 256] float32."""
        scales = fp16(blocks, 108) * unpack_scales(field(blocks, 96, 12)).to(torch.float32).sub_(32)  # [N, 16]
        codes = planes(field(blocks, 32, 64).view(-1, 2, 32), bits=2).flatten(1)  # [N, 256]
        codes |= planes(field(blocks, 0, 32), bits=1).flatten(1) << 2
        signed = codes.to(torch.float32).sub_(4).view(-1, 16, 16)  # [N, g, 16]
        return signed.mul_(scales.unsqueeze(2)).flatten(1)


Q3_K = Q3KFormat("q3_k", block_elements=256, block_nbytes=110)
