"""q5_1: 32 five-bit weights, a scale and a minimum.

Legend: N blocks.

    0 d[2]  2 m[2]  4 fifth_bits[4]  8 codes[16]
    fifth_bits byte i: bit k = element 8 * i + k
    codes byte j: hhhh llll, l = element j, h = element j + 16
    y = (fifth_bit << 4 | q) * d + m
"""

import torch

from graphcore.encodings import Planes
from graphcore.quant.bit_fields import field, fp16, fp16_bytes, inverse, pack_planes, pack_runs, planes, runs, smallest
from graphcore.quant.format import Format


class Q51Format(Format):
    """Five bits, with an offset."""

    def dequantize_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Decode: [N, 24] uint8 -> [N, 32] float32."""
        codes = planes(field(blocks, 8, 16), bits=4).flatten(1)  # [N, 32]
        codes |= runs(field(blocks, 4, 4), bits=1) << 4
        return codes.to(torch.float32).mul_(fp16(blocks, 0)).add_(fp16(blocks, 2))

    def quantize_blocks(self, dense: torch.Tensor) -> torch.Tensor:
        """Encode as libggml does, byte for byte: [N, 32] float32 -> [N, 24] uint8."""
        minimum = smallest(dense)
        scale = (dense.amax(1, keepdim=True) - minimum).abs_() / 31  # [N, 1]; not -0
        codes = (dense - minimum).mul_(inverse(scale)).add_(0.5).clamp_(max=31).to(torch.uint8)  # [N, 32]
        nibbles = pack_planes((codes & 15).view(-1, 2, 16), bits=4)
        return torch.cat((fp16_bytes(scale), fp16_bytes(minimum), pack_runs(codes >> 4, bits=1), nibbles), dim=1)


Q5_1 = Q51Format(
    name="q5_1",
    block_elements=32,
    block_nbytes=24,
    ggml_id=7,
    file_type=9,
    kernel_number=6,
    bits=5,
    planes=Planes(low=(8, 24), high=(4, 8), scales=(0, 4), scale="pair", high_runs=True),
)
