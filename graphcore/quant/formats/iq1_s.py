"""iq1_s: 256 weights, -1, 0 or 1 and an eighth more or less: 32 grid entries, a scale and a sign of the eighth for 32.

Legend: N blocks.

    0 d[2]  2 low_entries[32]  34 groups[8][2]
    group: 16 bits, bits 8 to 10 of four entries from the lowest bit on, a scale in three bits, and the eighth's sign
    y = d * (2 * scale + 1) * (weight + eighth)
"""

import torch
from torch import Tensor

from graphcore.quant.bit_fields import field, fp16
from graphcore.quant.level_formats import IQ1, LEVEL_PLANES, LevelCodes, LevelFormat, int16s, magnitudes, shifted


class Iq1SFormat(LevelFormat):
    """One and a half bits, a scale for 32 weights."""

    unit = 1 / 8
    grid = "IQ1_S"

    def level_codes(self, blocks: Tensor) -> LevelCodes:
        """Look up the level codes, scales and d of file blocks: [N, 50] uint8."""
        words = int16s(blocks, 34, 8)
        entries = field(blocks, 2, 32).to(torch.int32) | shifted(words, (0, 3, 6, 9), 7) << 8
        signs = (words >> 15).to(torch.uint8).repeat_interleave(32, dim=1)
        scales = ((words >> 12) & 7).to(torch.uint8)
        return LevelCodes(magnitudes(self.grid, entries) | signs << 2, scales, fp16(blocks, 0))


IQ1_S = Iq1SFormat(
    name="iq1_s",
    block_elements=256,
    block_nbytes=50,
    ggml_id=19,
    kernel_number=26,
    bits=3,
    levels=IQ1,
    planes=LEVEL_PLANES[3],
)
