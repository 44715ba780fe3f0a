"""q1_0: 128 signs and a scale.

Legend: N blocks.

    0 d[2]  2 signs[16]
    signs byte i: bit k = element 8 * i + k
    y = d where the bit is set, else -d
"""

import torch

from graphcore.quant.bit_fields import field, fp16, runs
from graphcore.quant.format import Format


class Q10Format(Format):
    """One bit."""

    def dequantize_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Decode: [N, 18] uint8 -> [N, 128] float32."""
        signs = runs(field(blocks, 2, 16), bits=1).to(torch.float32).mul_(2).sub_(1)  # [N, 128], -1 or +1
        return signs.mul_(fp16(blocks, 0))


Q1_0 = Q10Format(
    name="q1_0",
    block_elements=128,
    block_nbytes=18,
    ggml_id=41,
    kernel_number=18,
    bits=1,
    levels=(-1, 1),
)
