"""affine4: 32 four-bit weights, a float16 scale and a zero point: AWQ's and GPTQ's weights, in blocks of 32.

Legend: N blocks.

    0 d[2]  2 z[1]  3 codes[16]
    codes byte j: hhhh llll, l = element j, h = element j + 16
    y = (q - z) * d, z from 0 to 16

The folders of these weights are read by checkpoint/quantized/; GGUF files have no such type: q4_1's minimum,
-d * z, is a float16, which has too few bits for it.
"""

import torch

from graphcore.encodings import Planes
from graphcore.quant.bit_fields import field, fp16, planes
from graphcore.quant.format import Format


class Affine4Format(Format):
    """Four bits, with a zero point."""

    def dequantize_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Decode: [N, 19] uint8 -> [N, 32] float32."""
        codes = planes(field(blocks, 3, 16), bits=4).flatten(1)  # [N, 32]
        return codes.to(torch.float32).sub_(field(blocks, 2, 1)).mul_(fp16(blocks, 0))


AFFINE4 = Affine4Format(
    name="affine4",
    block_elements=32,
    block_nbytes=19,
    kernel_number=28,
    bits=4,
    planes=Planes(low=(3, 19), scales=(0, 2), supers=(2, 3), scale="half_zero"),
)
