"""nvfp4_f32: 32 four-bit floats (E2M1) in two groups of 16, each with a float32 scale: NVFP4 with a global scale.

Legend: N blocks.

    0 d[4], d[4]  8 codes[16]
    codes byte j: hhhh llll, l = element j under the first d, h = element j + 16 under the second
    y = d * 2 * e2m1(code): d is half of a group's scale times the global one

The folders of these weights are read by checkpoint/quantized/. A GGUF file's nvfp4 has no global scale, and its
groups' E4M3 scales cannot hold the product.
"""

import torch

from graphcore.encodings import E2M1_DOUBLED, Planes
from graphcore.quant.bit_fields import field, levels_of, planes
from graphcore.quant.format import Format


class Nvfp4F32Format(Format):
    """Four-bit floats, a float32 scale for 16 weights."""

    def dequantize_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Decode: [N, 24] uint8 -> [N, 32] float32."""
        scales = field(blocks, 0, 8).view(torch.float32)  # [N, 2]
        codes = planes(field(blocks, 8, 16), bits=4)  # [N, 2, 16]
        return levels_of(E2M1_DOUBLED, codes).mul_(scales.unsqueeze(2)).flatten(1)


NVFP4_F32 = Nvfp4F32Format(
    name="nvfp4_f32",
    block_elements=32,
    block_nbytes=24,
    kernel_number=33,
    bits=4,
    levels=E2M1_DOUBLED,
    planes=Planes(low=(8, 24), scales=(0, 8), scale="float", group=16),
)
