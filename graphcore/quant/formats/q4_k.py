"""q4_k: 256 four-bit weights in 8 groups of 32, each with a six-bit scale and minimum.

Legend: N blocks.

    0 d[2]  2 dmin[2]  4 scales and minimums[12], see k_scales  16 codes[128]
    codes, chunk c (32 bytes each), byte l: hhhh llll, low = element 64 * c + l, high = element 64 * c + 32 + l
    y = (d * scale) * q - dmin * minimum
"""

import torch

from graphcore.encodings import Planes
from graphcore.quant.bit_fields import field, pack_planes, planes
from graphcore.quant.format import Format
from graphcore.quant.k_scales import REGROUPED, WIDENED, affine_weights, quantize_affine


class Q4KFormat(Format):
    """Four bits, with an offset per 32 weights."""

    low_change, scale_change = REGROUPED, WIDENED

    def dequantize_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Decode: [N, 144] uint8 -> [N, 256] float32."""
        codes = planes(field(blocks, 16, 128).view(-1, 4, 32), bits=4).view(-1, 8, 32)  # [N, group, 32]
        return affine_weights(blocks, codes)

    def quantize_blocks(self, dense: torch.Tensor) -> torch.Tensor:
        """Encode: [N, 256] float32 -> [N, 144] uint8; scales by search, see k_search."""
        head, codes = quantize_affine(dense, 15, self.stretches)
        nibbles = pack_planes(codes.view(-1, 4, 2, 32), bits=4).flatten(1)
        return torch.cat((head, nibbles), dim=1)


Q4_K = Q4KFormat(
    name="q4_k",
    block_elements=256,
    block_nbytes=144,
    ggml_id=12,
    file_type=14,
    kernel_number=10,
    bits=4,
    narrower="q5_0",
    planes=Planes(low=(16, 144), scales=(4, 16), supers=(0, 4), scale="bytes"),
    stretches=(0.0, -1.5, -1.0, -0.6, -0.3, 0.3, 0.6, 0.9, 1.2),
)
