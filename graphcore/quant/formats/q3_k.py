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

from graphcore.encodings import Planes
from graphcore.quant.bit_fields import field, fp16, fp16_bytes, pack_planes, planes
from graphcore.quant.format import Format
from graphcore.quant.k_scales import widened_signed
from graphcore.quant.k_search import as_columns, as_rows, fit_symmetric, refine_symmetric, round_scales


def unpack_scales(packed: torch.Tensor) -> torch.Tensor:
    """Return the 16 scales, 0 to 63: [N, 12] uint8 -> [N, 16] uint8."""
    low = planes(packed[:, :8], bits=4).flatten(1)  # [N, 16]
    high = planes(packed[:, 8:], bits=2).flatten(1)  # [N, 16]
    return low | high << 4


def pack_scales(scales: torch.Tensor) -> torch.Tensor:
    """Return the 12 bytes of 16 scales, 0 to 63: [N, 16] uint8 -> [N, 12] uint8."""
    low = pack_planes((scales & 15).view(-1, 2, 8), bits=4)
    return torch.cat((low, pack_planes((scales >> 4).view(-1, 4, 4), bits=2)), dim=1)


class Q3KFormat(Format):
    """Three bits, symmetric."""

    scale_change = widened_signed(unpack_scales, pack_scales)

    def dequantize_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Decode: [N, 110] uint8 -> [N, 256] float32."""
        scales = fp16(blocks, 108) * unpack_scales(field(blocks, 96, 12)).to(torch.float32).sub_(32)  # [N, 16]
        codes = planes(field(blocks, 32, 64).view(-1, 2, 32), bits=2).flatten(1)  # [N, 256]
        codes |= planes(field(blocks, 0, 32), bits=1).flatten(1) << 2
        signed = codes.to(torch.float32).sub_(4).view(-1, 16, 16)  # [N, g, 16]
        return signed.mul_(scales.unsqueeze(2)).flatten(1)

    def quantize_blocks(self, dense: torch.Tensor) -> torch.Tensor:
        """Encode: [N, 256] float32 -> [N, 110] uint8; scales by search, see k_search."""
        groups = as_columns(dense, num_groups=16)
        scales = round_scales(fit_symmetric(groups, -4, self.stretches).view(-1, 16), -32, 31)  # [N, 16]
        codes = as_rows(refine_symmetric(groups, scales, -4, -32).add_(4), len(dense))  # [N, 256], 0 to 7
        third_bits = pack_planes((codes >> 2).view(-1, 8, 32), bits=1)
        low = pack_planes((codes & 3).view(-1, 2, 4, 32), bits=2).flatten(1)
        packed_scales = pack_scales((scales.codes + 32).to(torch.uint8))
        return torch.cat((third_bits, low, packed_scales, fp16_bytes(scales.unit)), dim=1)


Q3_K = Q3KFormat(
    name="q3_k",
    block_elements=256,
    block_nbytes=110,
    ggml_id=11,
    file_type=11,
    kernel_number=9,
    bits=3,
    zero=4,
    narrower="q4_0",
    planes=Planes(low=(32, 96), high=(0, 32), scales=(96, 108), supers=(108, 110), scale="signed", group=16, step=32),
    stretches=(0.0, -0.9, -0.6, -0.3, 0.3, 0.6, 0.9),
)
