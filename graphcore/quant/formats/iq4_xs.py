"""iq4_xs: 256 four-bit codes into a table of uneven levels, in 8 groups of 32 with a signed six-bit scale each.

Legend: N blocks; R rows, K blocks of a row.

    0 d[2]  2 high_scales[2]  4 low_scales[4]  8 codes[128]
    low_scales byte i: hhhh llll, low four bits of scale 2 * i (l) and of scale 2 * i + 1 (h)
    high_scales byte i: ddcc bbaa, top two bits of scales 4 * i (a) to 4 * i + 3 (d)
    codes, group b (16 bytes each), byte l: hhhh llll, low = element 32 * b + l, high = element 32 * b + 16 + l
    y = (d * (scale - 32)) * IQ4_LEVELS[q]
"""

import torch

from graphcore.encodings import IQ4_LEVELS
from graphcore.quant.bit_packing import pack_runs
from graphcore.quant.bits import field, fp16, lookup, planes, runs
from graphcore.quant.format import Change, Format


def widen_scales(packed: torch.Tensor) -> torch.Tensor:
    """Return a GPU's int8 scales, 32 taken off: [R, K, 6] -> [R, K, 8]."""
    high, low = packed.reshape(-1, 6).tensor_split((2,), dim=1)
    return ((runs(low, bits=4) | runs(high, bits=2) << 4) - 32).view(*packed.shape[:2], 8)


def narrow_scales(wide: torch.Tensor) -> torch.Tensor:
    """Undo `widen_scales`."""
    scales = wide.reshape(-1, 8) + 32
    return torch.cat((pack_runs(scales >> 4, bits=2), pack_runs(scales & 15, bits=4)), dim=1).view(*wide.shape[:2], 6)


class Iq4XsFormat(Format):
    """Four bits, uneven levels, a scale per 32 weights."""

    scale_change = Change(widen_scales, narrow_scales)

    def dequantize_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Decode: [N, 136] uint8 -> [N, 256] float32."""
        packed_scales = runs(field(blocks, 4, 4), bits=4) | runs(field(blocks, 2, 2), bits=2) << 4  # [N, 8]
        scales = fp16(blocks, 0) * packed_scales.to(torch.float32).sub_(32)  # [N, 8]
        codes = planes(field(blocks, 8, 128).view(-1, 8, 16), bits=4).view(-1, 8, 32)  # [N, group, 32]
        return lookup(IQ4_LEVELS, codes).mul_(scales.unsqueeze(2)).flatten(1)


IQ4_XS = Iq4XsFormat.of("iq4_xs")
