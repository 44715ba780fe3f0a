"""nf4: 32 four-bit codes of 16 levels, the quantiles of a normal distribution, and a float32 scale: bitsandbytes' NF4.

Legend: N blocks.

    0 d[4]  4 codes[16]
    codes byte j: hhhh llll, l = element j, h = element j + 16
    y = level[code] * d, levels in encodings.py

The folders of these weights are read by checkpoint/quantized/; GGUF files have no such type.
"""

import torch

from graphcore.encodings import NF4_LEVELS, Planes
from graphcore.quant.bit_fields import field, fp32, levels_of, planes
from graphcore.quant.format import Format


class FloatLevelsFormat(Format):
    """Four-bit codes of float levels, with a float32 scale."""

    def dequantize_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Decode: [N, 20] uint8 -> [N, 32] float32."""
        codes = planes(field(blocks, 4, 16), bits=4).flatten(1)  # [N, 32]
        return levels_of(self.float_levels, codes).mul_(fp32(blocks, 0))


NF4 = FloatLevelsFormat(
    name="nf4",
    block_elements=32,
    block_nbytes=20,
    kernel_number=31,
    bits=4,
    float_levels=NF4_LEVELS,
    planes=Planes(low=(4, 20), scales=(0, 4), scale="float"),
)
