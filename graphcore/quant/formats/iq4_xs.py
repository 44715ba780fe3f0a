"""iq4_xs: 256 four-bit codes that index a table of uneven levels, in 8 groups of 32 with a signed six-bit scale each.

Legend: N blocks.

    0 d[2]  2 high_scales[2]  4 low_scales[4]  8 codes[128]
    low_scales byte i: hhhh llll, low four bits of scale 2 * i (l) and of scale 2 * i + 1 (h)
    high_scales byte i: ddcc bbaa, top two bits of scales 4 * i (a) to 4 * i + 3 (d)
    codes, group b (16 bytes each), byte l: hhhh llll, low = element 32 * b + l, high = element 32 * b + 16 + l
    y = (d * (scale - 32)) * IQ4_LEVELS[q]
"""

import torch

from graphcore.encodings import IQ4_LEVELS, Planes
from graphcore.quant.bit_fields import field, fp16, levels_of, pack_runs, planes, runs
from graphcore.quant.format import Format
from graphcore.quant.k_scales import widened_signed


def unpack_scales_of_runs(packed: torch.Tensor) -> torch.Tensor:
    """Return the 8 scales, 0 to 63: [N, 6] uint8 -> [N, 8] uint8."""
    return runs(packed[:, 2:], bits=4) | runs(packed[:, :2], bits=2) << 4


def pack_scales_in_runs(scales: torch.Tensor) -> torch.Tensor:
    """Return the 6 bytes of 8 scales: the inverse of `unpack_scales_of_runs`."""
    return torch.cat((pack_runs(scales >> 4, bits=2), pack_runs(scales & 15, bits=4)), dim=1)


class Iq4XsFormat(Format):
    """Four bits, uneven levels, a scale per 32 weights."""

    scale_change = widened_signed(unpack_scales_of_runs, pack_scales_in_runs)

    def dequantize_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Decode: [N, 136] uint8 -> [N, 256] float32."""
        scales = fp16(blocks, 0) * unpack_scales_of_runs(field(blocks, 2, 6)).to(torch.float32).sub_(32)  # [N, 8]
        codes = planes(field(blocks, 8, 128).view(-1, 8, 16), bits=4).view(-1, 8, 32)  # [N, group, 32]
        return levels_of(IQ4_LEVELS, codes).mul_(scales.unsqueeze(2)).flatten(1)


IQ4_XS = Iq4XsFormat(
    name="iq4_xs",
    block_elements=256,
    block_nbytes=136,
    ggml_id=23,
    kernel_number=14,
    bits=4,
    levels=IQ4_LEVELS,
    planes=Planes(low=(8, 136), scales=(2, 8), supers=(0, 2), scale="signed"),
)
