"""q5_0: 32 signed five-bit weights and a scale.

Legend: N blocks.

    0 d[2]  2 fifth_bits[4]  6 codes[16]
    fifth_bits byte i: bit k = element 8 * i + k
    codes byte j: hhhh llll, l = element j, h = element j + 16
    y = d * ((fifth_bit << 4 | q) - 16)
"""

import torch

from graphcore.encodings import Planes
from graphcore.quant.bit_fields import extreme, field, fp16, fp16_bytes, inverse, pack_planes, pack_runs, planes, runs
from graphcore.quant.format import Format


class Q50Format(Format):
    """Five bits, symmetric."""

    def dequantize_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Decode: [N, 22] uint8 -> [N, 32] float32."""
        codes = planes(field(blocks, 6, 16), bits=4).flatten(1)  # [N, 32]
        codes |= runs(field(blocks, 2, 4), bits=1) << 4
        return codes.to(torch.float32).sub_(16).mul_(fp16(blocks, 0))

    def quantize_blocks(self, dense: torch.Tensor) -> torch.Tensor:
        """Encode as libggml does, byte for byte: [N, 32] float32 -> [N, 22] uint8; the extreme weight gets code 0."""
        scale = extreme(dense) / -16  # [N, 1]
        codes = (dense * inverse(scale)).add_(16.5).clamp_(max=31).to(torch.uint8)  # rounds down; [N, 32]
        nibbles = pack_planes((codes & 15).view(-1, 2, 16), bits=4)
        return torch.cat((fp16_bytes(scale), pack_runs(codes >> 4, bits=1), nibbles), dim=1)


Q5_0 = Q50Format(
    name="q5_0",
    block_elements=32,
    block_nbytes=22,
    ggml_id=6,
    file_type=8,
    kernel_number=5,
    bits=5,
    zero=16,
    planes=Planes(low=(6, 22), high=(2, 6), scales=(0, 2), high_runs=True),
)
