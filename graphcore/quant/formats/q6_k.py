"""q6_k: 256 signed six-bit weights in 16 groups of 16, each with an int8 scale.

Legend: N blocks.

    0 low_codes[128]  128 high_codes[64]  192 scales[16], int8  208 d[2]
    low_codes, half h (64 bytes each), byte l: hhhh llll, low = element 128 * h + l, high = element 128 * h + 64 + l
    high_codes, half h (32 bytes each), byte l: 3322 1100, two bits s = element 128 * h + 32 * s + l
    y = (d * scale) * ((high << 4 | low) - 32)
"""

import torch

from graphcore.encodings import Planes
from graphcore.quant.bit_fields import field, fp16, fp16_bytes, pack_planes, planes
from graphcore.quant.format import Format
from graphcore.quant.k_search import as_columns, as_rows, fit_symmetric, refine_symmetric, round_scales


class Q6KFormat(Format):
    """Six bits, symmetric."""

    def dequantize_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Decode: [N, 210] uint8 -> [N, 256] float32."""
        scales = fp16(blocks, 208) * field(blocks, 192, 16).view(torch.int8).to(torch.float32)  # [N, 16]
        codes = planes(field(blocks, 0, 128).view(-1, 2, 64), bits=4).flatten(1)  # [N, 256]
        codes |= planes(field(blocks, 128, 64).view(-1, 2, 32), bits=2).flatten(1) << 4
        signed = codes.to(torch.float32).sub_(32).view(-1, 16, 16)  # [N, g, 16]
        return signed.mul_(scales.unsqueeze(2)).flatten(1)

    def quantize_blocks(self, dense: torch.Tensor) -> torch.Tensor:
        """Encode: [N, 256] float32 -> [N, 210] uint8; scales by search, see k_search."""
        groups = as_columns(dense, num_groups=16)
        scales = round_scales(fit_symmetric(groups, -32, self.stretches).view(-1, 16), -128, 127)  # [N, 16]
        codes = as_rows(refine_symmetric(groups, scales, -32, -128).add_(32), len(dense))  # [N, 256], 0 to 63
        low = pack_planes((codes & 15).view(-1, 2, 2, 64), bits=4).flatten(1)
        high = pack_planes((codes >> 4).view(-1, 2, 4, 32), bits=2).flatten(1)
        return torch.cat((low, high, scales.codes.to(torch.int8).view(torch.uint8), fp16_bytes(scales.unit)), dim=1)


Q6_K = Q6KFormat(
    name="q6_k",
    block_elements=256,
    block_nbytes=210,
    ggml_id=14,
    file_type=18,
    kernel_number=12,
    bits=6,
    zero=32,
    narrower="q8_0",
    planes=Planes(
        low=(0, 128), high=(128, 192), scales=(192, 208), supers=(208, 210), scale="signed", group=16, step=64
    ),
    stretches=(0.0, -0.9, -0.6, -0.3, 0.3, 0.6, 0.9),
)
