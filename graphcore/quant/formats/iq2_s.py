"""iq2_s: 256 weights of six levels: 32 grid entries, a sign for each weight, and a scale for 16 weights.

Legend: N blocks.

    0 d[2]  2 low_entries[32]  34 signs[32]  66 high_entries[8]  74 scales[8]
    high_entries byte i: ddcc bbaa, bits 8 and 9 of entries 4 * i (a) to 4 * i + 3 (d)
    signs byte i: bit j is the sign of weight 8 * i + j
    scales byte i: hhhh llll, weights 32 * i (l) and 32 * i + 16 (h)
    y = d * (0.5 + scale) / 4 * level
"""

import torch
from torch import Tensor

from graphcore.quant.bit_fields import field, fp16, runs
from graphcore.quant.level_formats import IQ2, LEVEL_PLANES, LevelCodes, LevelFormat, magnitudes


class Iq2SFormat(LevelFormat):
    """Two bits, a scale for 16 weights, all signs."""

    unit = 1 / 8
    grid = "IQ2_S"

    def level_codes(self, blocks: Tensor) -> LevelCodes:
        """Look up the level codes, scales and d of file blocks: [N, 82] uint8."""
        high = runs(field(blocks, 66, 8), bits=2).to(torch.int32)
        entries = field(blocks, 2, 32).to(torch.int32) | high << 8
        codes = magnitudes(self.grid, entries) | runs(field(blocks, 34, 32), bits=1) << 2
        return LevelCodes(codes, runs(field(blocks, 74, 8), bits=4), fp16(blocks, 0))


IQ2_S = Iq2SFormat(
    name="iq2_s",
    block_elements=256,
    block_nbytes=82,
    ggml_id=22,
    kernel_number=23,
    bits=3,
    levels=IQ2,
    planes=LEVEL_PLANES[3],
)
