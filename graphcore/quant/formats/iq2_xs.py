"""iq2_xs: 256 weights of six levels: 32 grid entries with their signs, and a scale for 16 weights.

Legend: N blocks.

    0 d[2]  2 entries[32][2]  66 scales[8]
    entry: 16 bits for 8 weights, the lower nine a grid entry, the others seven signs
    scales byte i: hhhh llll, weights 32 * i (l) and 32 * i + 16 (h)
    y = d * (0.5 + scale) / 4 * level
"""

from torch import Tensor

from graphcore.quant.bit_fields import field, fp16, runs
from graphcore.quant.level_formats import IQ2, LEVEL_PLANES, LevelCodes, LevelFormat, even_signs, int16s, magnitudes


class Iq2XsFormat(LevelFormat):
    """Two bits, a scale for 16 weights."""

    unit = 1 / 8
    grid = "IQ2_XS"

    def level_codes(self, blocks: Tensor) -> LevelCodes:
        """Look up the level codes, scales and d of file blocks: [N, 74] uint8."""
        words = int16s(blocks, 2, 32)
        codes = magnitudes(self.grid, words & 511) | even_signs(words >> 9) << 2
        return LevelCodes(codes, runs(field(blocks, 66, 8), bits=4), fp16(blocks, 0))


IQ2_XS = Iq2XsFormat(
    name="iq2_xs",
    block_elements=256,
    block_nbytes=74,
    ggml_id=17,
    kernel_number=22,
    bits=3,
    levels=IQ2,
    planes=LEVEL_PLANES[3],
)
