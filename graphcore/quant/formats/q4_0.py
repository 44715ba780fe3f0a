"""q4_0: 32 signed four-bit weights and a scale.

Legend: N blocks.

    0 d[2]  2 codes[16]
    codes byte j: hhhh llll, l = element j, h = element j + 16
    y = d * (q - 8)
"""

import torch

from graphcore.encodings import Planes
from graphcore.quant.bit_fields import extreme, field, fp16, fp16_bytes, inverse, pack_planes, planes
from graphcore.quant.format import Format


class Q40Format(Format):
    """Four bits, symmetric."""

    def dequantize_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Decode: [N, 18] uint8 -> [N, 32] float32."""
        codes = planes(field(blocks, 2, 16), bits=4).flatten(1)  # [N, 32]
        return codes.to(torch.float32).sub_(8).mul_(fp16(blocks, 0))

    def quantize_blocks(self, dense: torch.Tensor) -> torch.Tensor:
        """Encode as libggml does, byte for byte: [N, 32] float32 -> [N, 18] uint8; the extreme weight gets code 0."""
        scale = extreme(dense) / -8  # [N, 1]
        codes = (dense * inverse(scale)).add_(8.5).clamp_(max=15).to(torch.uint8)  # rounds down; [N, 32]
        return torch.cat((fp16_bytes(scale), pack_planes(codes.view(-1, 2, 16), bits=4)), dim=1)


Q4_0 = Q40Format(
    name="q4_0",
    block_elements=32,
    block_nbytes=18,
    ggml_id=2,
    file_type=2,
    kernel_number=3,
    bits=4,
    zero=8,
    planes=Planes(low=(2, 18), scales=(0, 2)),
)
