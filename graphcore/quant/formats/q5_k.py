"""q5_k: 256 five-bit weights in 8 groups of 32, each with a six-bit scale and minimum.

Legend: N blocks.

    0 d[2]  2 dmin[2]  4 scales and minimums[12], see k_scales  16 fifth_bits[32]  48 codes[128]
    fifth_bits byte l: bit k = element 32 * k + l
    codes, chunk c (32 bytes each), byte l: hhhh llll, low = element 64 * c + l, high = element 64 * c + 32 + l
    y = (d * scale) * (fifth_bit << 4 | q) - dmin * minimum
"""

import torch

from graphcore.encodings import Planes
from graphcore.quant.bit_fields import field, pack_planes, planes
from graphcore.quant.format import Format
from graphcore.quant.k_scales import REGROUPED, WIDENED, affine_weights, quantize_affine


class Q5KFormat(Format):
    """Five bits, with an offset per 32 weights."""

    low_change, scale_change = REGROUPED, WIDENED

    def dequantize_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Decode: [N, 176] uint8 -> [N, 256] float32."""
        codes = planes(field(blocks, 48, 128).view(-1, 4, 32), bits=4).view(-1, 8, 32)  # [N, group, 32]
        codes |= planes(field(blocks, 16, 32), bits=1) << 4
        return affine_weights(blocks, codes)

    def quantize_blocks(self, dense: torch.Tensor) -> torch.Tensor:
        """Encode: [N, 256] float32 -> [N, 176] uint8; scales by search, see k_search."""
        head, codes = quantize_affine(dense, 31, self.stretches)
        fifth_bits = pack_planes((codes >> 4).view(-1, 8, 32), bits=1)
        nibbles = pack_planes((codes & 15).view(-1, 4, 2, 32), bits=4).flatten(1)
        return torch.cat((head, fifth_bits, nibbles), dim=1)


Q5_K = Q5KFormat(
    name="q5_k",
    block_elements=256,
    block_nbytes=176,
    ggml_id=13,
    file_type=16,
    kernel_number=11,
    bits=5,
    narrower="q5_1",
    planes=Planes(low=(48, 176), high=(16, 48), scales=(4, 16), supers=(0, 4), scale="bytes"),
    stretches=(0.0, -0.9, -0.6, -0.3, 0.3, 0.6, 0.9, 1.2),
)
