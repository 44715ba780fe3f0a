"""affine8: 32 eight-bit weights, a float32 scale and a zero point: integer weights whose scales are no float16.

Legend: N blocks.

    0 d[4]  4 z[1]  5 codes[32]
    y = (q - z) * d, q and z from 0 to 255

The folders of these weights are read by checkpoint/quantized/; GGUF files have no such type.
"""

import torch

from graphcore.encodings import Planes
from graphcore.quant.bit_fields import field, fp32
from graphcore.quant.format import Change, Format


def _flip(codes: torch.Tensor) -> torch.Tensor:
    """Return codes from 0 as int8 bytes, which a GPU's kernels read, and the reverse."""
    return codes ^ 0x80


class Affine8Format(Format):
    """Eight bits, with a zero point."""

    low_change = Change(_flip, _flip)

    def dequantize_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Decode: [N, 37] uint8 -> [N, 32] float32."""
        codes = field(blocks, 5, 32).to(torch.float32)
        return codes.sub_(field(blocks, 4, 1)).mul_(fp32(blocks, 0))


AFFINE8 = Affine8Format(
    name="affine8",
    block_elements=32,
    block_nbytes=37,
    kernel_number=29,
    bits=8,
    planes=Planes(low=(5, 37), scales=(0, 4), supers=(4, 5), scale="float_zero"),
)
