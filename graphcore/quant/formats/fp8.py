"""fp8: 32 weights of E4M3 and a float32 scale: FP8 checkpoints, whatever number of weights shares a scale.

Legend: N blocks.

    0 d[4]  4 codes[32]
    code: s eeee mmm, an exponent of 0 for subnormals; 0x7f and 0xff are NaN, which checkpoints must not have
    y = code * d

The folders of these weights are read by checkpoint/quantized/; GGUF files have no such type.
"""

import torch

from graphcore.encodings import E4M3_LEVELS, Planes
from graphcore.quant.bit_fields import field, fp32
from graphcore.quant.format import Change, Format


def _flip(codes: torch.Tensor) -> torch.Tensor:
    """Change the highest bit, as a GPU's kernels do when they read codes of eight bits."""
    return codes ^ 0x80


class Fp8Format(Format):
    """Eight-bit floats."""

    low_change = Change(_flip, _flip)

    def dequantize_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Decode: [N, 36] uint8 -> [N, 32] float32."""
        codes = field(blocks, 4, 32).view(torch.float8_e4m3fn)
        return codes.to(torch.float32).mul_(fp32(blocks, 0))


FP8 = Fp8Format(
    name="fp8",
    block_elements=32,
    block_nbytes=36,
    kernel_number=30,
    bits=8,
    float_levels=E4M3_LEVELS,
    planes=Planes(low=(4, 36), scales=(0, 4), scale="float"),
)
