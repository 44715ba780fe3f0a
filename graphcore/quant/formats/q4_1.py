"""q4_1: 32 four-bit weights, a scale and a minimum.

Legend: N blocks.

    0 d[2]  2 m[2]  4 codes[16]
    codes byte j: hhhh llll, l = element j, h = element j + 16
    y = q * d + m
"""

import torch

from graphcore.encodings import Planes
from graphcore.quant.bit_fields import field, fp16, fp16_bytes, inverse, pack_planes, planes, smallest
from graphcore.quant.format import Format


class Q41Format(Format):
    """Four bits, with an offset."""

    def dequantize_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Decode: [N, 20] uint8 -> [N, 32] float32."""
        codes = planes(field(blocks, 4, 16), bits=4).flatten(1)  # [N, 32]
        return codes.to(torch.float32).mul_(fp16(blocks, 0)).add_(fp16(blocks, 2))

    def quantize_blocks(self, dense: torch.Tensor) -> torch.Tensor:
        """Encode as libggml does, byte for byte: [N, 32] float32 -> [N, 20] uint8."""
        minimum = smallest(dense)
        scale = (dense.amax(1, keepdim=True) - minimum).abs_() / 15  # [N, 1]; not -0
        codes = (dense - minimum).mul_(inverse(scale)).add_(0.5).clamp_(max=15).to(torch.uint8)  # [N, 32]
        return torch.cat((fp16_bytes(scale), fp16_bytes(minimum), pack_planes(codes.view(-1, 2, 16), bits=4)), dim=1)


Q4_1 = Q41Format(
    name="q4_1",
    block_elements=32,
    block_nbytes=20,
    ggml_id=3,
    file_type=3,
    kernel_number=4,
    bits=4,
    planes=Planes(low=(4, 20), scales=(0, 4), scale="pair"),
)
