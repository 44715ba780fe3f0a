"""q8_0: 32 signed bytes and a scale.

Legend: N blocks.

    0 d[2]  2 codes[32], int8
    y = d * q
"""

import torch

from graphcore.encodings import Planes
from graphcore.quant.bit_fields import field, fp16, fp16_bytes, inverse, round_half_away
from graphcore.quant.format import Format


class Q80Format(Format):
    """Eight bits, symmetric."""

    def dequantize_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Decode: [N, 34] uint8 -> [N, 32] float32."""
        codes = field(blocks, 2, 32).view(torch.int8)  # [N, 32]
        return codes.to(torch.float32).mul_(fp16(blocks, 0))

    def quantize_blocks(self, dense: torch.Tensor) -> torch.Tensor:
        """Encode as libggml does, byte for byte: [N, 32] float32 -> [N, 34] uint8."""
        scale = dense.abs().amax(1, keepdim=True) / 127  # [N, 1]
        codes = round_half_away(dense * inverse(scale)).to(torch.int8)  # [N, 32]
        return torch.cat((fp16_bytes(scale), codes.view(torch.uint8)), dim=1)


Q8_0 = Q80Format(
    name="q8_0",
    block_elements=32,
    block_nbytes=34,
    ggml_id=8,
    file_type=7,
    kernel_number=7,
    bits=8,
    zero=128,
    head="q8_0",
    planes=Planes(low=(2, 34), scales=(0, 2)),
)
