"""iq1_m: 256 weights, -1, 0 or 1 and an eighth more or less: 32 grid entries with a sign of the eighth, a scale for 16.

Legend: N blocks.

    0 low_entries[32]  32 high_entries[16]  48 scales[4][2]
    high_entries byte i: sbbb saaa, bits 8 to 10 of entries 2 * i (a) and 2 * i + 1 (b), signs (s) of their eighths
    scales, 16 bits: four scales of three bits from the lowest bit on, and four bits of d, the lowest first
    y = d * (2 * scale + 1) * (weight + eighth)
"""

import torch
from torch import Tensor

from graphcore.quant.bit_fields import field, runs
from graphcore.quant.level_formats import IQ1, LEVEL_PLANES, LevelCodes, LevelFormat, int16s, magnitudes, shifted


class Iq1MFormat(LevelFormat):
    """One and three quarters of a bit, a scale for 16 weights."""

    unit = 1 / 8
    grid = "IQ1_S"

    def level_codes(self, blocks: Tensor) -> LevelCodes:
        """Look up the level codes, scales and d of file blocks: [N, 56] uint8."""
        high = runs(field(blocks, 32, 16), bits=4)  # [N, 32]
        entries = field(blocks, 0, 32).to(torch.int32) | (high & 7).to(torch.int32) << 8
        signs = (high >> 3).repeat_interleave(8, dim=1)
        words = int16s(blocks, 48, 4)
        scales = shifted(words, (0, 3, 6, 9), 7).to(torch.uint8)
        quarters = (words >> 12) << torch.arange(0, 16, 4, dtype=torch.int32, device=words.device)
        unit = quarters.sum(1, keepdim=True, dtype=torch.int32).to(torch.int16).view(torch.float16).to(torch.float32)
        return LevelCodes(magnitudes(self.grid, entries) | signs << 2, scales, unit)


IQ1_M = Iq1MFormat(
    name="iq1_m",
    block_elements=256,
    block_nbytes=56,
    ggml_id=29,
    kernel_number=27,
    bits=3,
    levels=IQ1,
    planes=LEVEL_PLANES[3],
)
