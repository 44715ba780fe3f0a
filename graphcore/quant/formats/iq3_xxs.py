"""iq3_xxs: 256 weights of sixteen levels: 64 grid entries of 4 weights, and signs and a scale for 32 weights.

Legend: N blocks.

    0 d[2]  2 entries[64]  66 groups[8][4]
    group: signs of 8 weights in 7 bits, four times from the lowest bit on, and a scale in the highest four bits
    y = d * (0.5 + scale) / 2 * level
"""

import torch
from torch import Tensor

from graphcore.quant.bit_fields import field, fp16
from graphcore.quant.level_formats import (
    IQ3_XXS as LEVELS,
)
from graphcore.quant.level_formats import (
    LEVEL_PLANES,
    LevelCodes,
    LevelFormat,
    even_signs,
    int32s,
    magnitudes,
    shifted,
)


class Iq3XxsFormat(LevelFormat):
    """Three bits, a scale for 32 weights."""

    unit = 1 / 4
    grid = "IQ3_XXS"

    def level_codes(self, blocks: Tensor) -> LevelCodes:
        """Look up the level codes, scales and d of file blocks: [N, 98] uint8."""
        words = int32s(blocks, 66, 8)
        signs = even_signs(shifted(words, (0, 7, 14, 21), 127))
        codes = magnitudes(self.grid, field(blocks, 2, 64)) | signs << 3
        return LevelCodes(codes, (words >> 28).to(torch.uint8), fp16(blocks, 0))


IQ3_XXS = Iq3XxsFormat(
    name="iq3_xxs",
    block_elements=256,
    block_nbytes=98,
    ggml_id=18,
    kernel_number=24,
    bits=4,
    levels=LEVELS,
    planes=LEVEL_PLANES[4],
)
