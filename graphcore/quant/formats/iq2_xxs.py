"""iq2_xxs: 256 weights of six levels in 8 groups of 32: four grid entries, four times seven signs, and a scale each.

Legend: N blocks.

    0 d[2]  2 groups[8][8]
    group: entries[4], one byte for 8 weights each; then 32 bits: signs of 8 weights in 7 bits, four times from the
    lowest bit on, and a scale in the highest four bits
    y = d * (0.5 + scale) / 4 * level
"""

import torch
from torch import Tensor

from graphcore.quant.bit_fields import fp16
from graphcore.quant.level_formats import (
    IQ2,
    LEVEL_PLANES,
    LevelCodes,
    LevelFormat,
    even_signs,
    int32s,
    magnitudes,
    shifted,
)


class Iq2XxsFormat(LevelFormat):
    """Two bits, a scale for 32 weights."""

    unit = 1 / 8
    grid = "IQ2_XXS"

    def level_codes(self, blocks: Tensor) -> LevelCodes:
        """Look up the level codes, scales and d of file blocks: [N, 66] uint8."""
        words = int32s(blocks, 2, 16).view(-1, 8, 2)
        entries = shifted(words[..., 0], (0, 8, 16, 24), 255)  # [N, 32]
        signs = even_signs(shifted(words[..., 1], (0, 7, 14, 21), 127))
        scales = (words[..., 1] >> 28).to(torch.uint8)
        return LevelCodes(magnitudes(self.grid, entries) | signs << 2, scales, fp16(blocks, 0))


IQ2_XXS = Iq2XxsFormat(
    name="iq2_xxs",
    block_elements=256,
    block_nbytes=66,
    ggml_id=16,
    kernel_number=21,
    bits=3,
    levels=IQ2,
    planes=LEVEL_PLANES[3],
)
