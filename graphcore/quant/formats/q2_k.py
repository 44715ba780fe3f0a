"""q2_k: 256 two-bit weights in 16 groups of 16, each with a four-bit scale and minimum.

Legend: N blocks.

    0 scales[16]  16 codes[64]  80 d[2]  82 dmin[2]
    scales byte g: mmmm ssss, for group g = element / 16
    codes, half h (32 bytes each), byte l: 3322 1100, two bits s = element 128 * h + 32 * s + l
    y = (d * s) * q - dmin * m
"""

import torch

from graphcore.encodings import Planes
from graphcore.quant.bit_fields import field, fp16, fp16_bytes, pack_planes, planes
from graphcore.quant.format import Format
from graphcore.quant.k_search import as_columns, as_rows, fit_affine, refine_affine, round_scales


class Q2KFormat(Format):
    """Two bits, with an offset per 16 weights."""

    def dequantize_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Decode: [N, 84] uint8 -> [N, 256] float32."""
        packed_scales = field(blocks, 0, 16)  # [N, 16]
        scales = fp16(blocks, 80) * (packed_scales & 15).to(torch.float32)  # [N, 16]
        minimums = fp16(blocks, 82) * (packed_scales >> 4).to(torch.float32)  # [N, 16]
        codes = planes(field(blocks, 16, 64).view(-1, 2, 32), bits=2).view(-1, 16, 16)  # [N, g, 16]
        weights = codes.to(torch.float32).mul_(scales.unsqueeze(2)).sub_(minimums.unsqueeze(2))
        return weights.flatten(1)

    def quantize_blocks(self, dense: torch.Tensor) -> torch.Tensor:
        """Encode: [N, 256] float32 -> [N, 84] uint8; scales by search, see k_search."""
        groups = as_columns(dense, num_groups=16)
        scale, minimum = (found.view(-1, 16) for found in fit_affine(groups, 3, self.stretches))  # [N, 16] each
        scales, minimums = round_scales(scale, 0, 15), round_scales(minimum, 0, 15)
        found = refine_affine(groups, scales, minimums, 3, 15)
        codes = as_rows(found, len(dense))  # [N, 256]
        packed_scales = scales.codes.to(torch.uint8) | minimums.codes.to(torch.uint8) << 4
        planes_of_halves = pack_planes(codes.view(-1, 2, 4, 32), bits=2).flatten(1)
        return torch.cat((packed_scales, planes_of_halves, fp16_bytes(scales.unit), fp16_bytes(minimums.unit)), dim=1)


Q2_K = Q2KFormat(
    name="q2_k",
    block_elements=256,
    block_nbytes=84,
    ggml_id=10,
    file_type=10,
    kernel_number=8,
    bits=2,
    narrower="q4_0",
    planes=Planes(low=(16, 80), scales=(0, 16), supers=(80, 84), scale="nibbles", group=16, step=32),
    stretches=(0.0, -0.5, -0.3, -0.1, 0.1, 0.3, 0.5, 0.7, 0.9, 1.2),
)
