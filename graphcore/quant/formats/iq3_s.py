"""iq3_s: 256 weights of sixteen levels: 64 grid entries of 4 weights, a sign for each weight, and a scale for 32.

Legend: N blocks.

    0 d[2]  2 low_entries[64]  66 high_entries[8]  74 signs[32]  106 scales[4]
    high_entries byte i: bit j is bit 8 of entry 8 * i + j
    signs byte i: bit j is the sign of weight 8 * i + j
    scales byte i: hhhh llll, weights 64 * i (l) and 64 * i + 32 (h)
    y = d * (1 + 2 * scale) * level
"""

import torch
from torch import Tensor

from graphcore.quant.bit_fields import field, fp16, runs
from graphcore.quant.level_formats import IQ3_S as LEVELS
from graphcore.quant.level_formats import LEVEL_PLANES, LevelCodes, LevelFormat, magnitudes


class Iq3SFormat(LevelFormat):
    """Three bits, a scale for 32 weights, all signs."""

    unit = 1
    grid = "IQ3_S"

    def level_codes(self, blocks: Tensor) -> LevelCodes:
        """Look up the level codes, scales and d of file blocks: [N, 110] uint8."""
        high = runs(field(blocks, 66, 8), bits=1).to(torch.int32)
        entries = field(blocks, 2, 64).to(torch.int32) | high << 8
        codes = magnitudes(self.grid, entries) | runs(field(blocks, 74, 32), bits=1) << 3
        return LevelCodes(codes, runs(field(blocks, 106, 4), bits=4), fp16(blocks, 0))


IQ3_S = Iq3SFormat(
    name="iq3_s",
    block_elements=256,
    block_nbytes=110,
    ggml_id=21,
    kernel_number=25,
    bits=4,
    levels=LEVELS,
    planes=LEVEL_PLANES[4],
)
