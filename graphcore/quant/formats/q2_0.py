"""q2_0: 64 two-bit weights and a scale; four consecutive weights to a byte, unlike tq2_0.

Legend: N blocks.

    0 d[2]  2 codes[16]
    codes byte i: 3322 1100, two bits k = element 4 * i + k
    y = (q - 1) * d
"""

import torch

from graphcore.quant.bit_fields import field, fp16, runs
from graphcore.quant.format import Format


class Q20Format(Format):
    """Two bits: -1, 0, +1, +2 times the scale."""

    def dequantize_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Decode: [N, 18] uint8 -> [N, 64] float32."""
        codes = runs(field(blocks, 2, 16), bits=2)  # [N, 64]
        return codes.to(torch.float32).sub_(1).mul_(fp16(blocks, 0))


Q2_0 = Q20Format(
    name="q2_0",
    block_elements=64,
    block_nbytes=18,
    ggml_id=42,
    kernel_number=19,
    bits=2,
    zero=1,
)
