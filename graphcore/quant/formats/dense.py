"""f32, f16, bf16: ordinary little-endian floats, as formats of one element per block.

Legend: N blocks, which are elements here.
"""

from dataclasses import dataclass

import torch

from graphcore.quant.bits import field
from graphcore.quant.format import Format


@dataclass(frozen=True)
class DenseFormat(Format):
    """Elements stored as they are.

    Attributes:
        stored: the dtype whose bytes the elements are.
    """

    stored: torch.dtype

    def dequantize_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Widen: [N, W] uint8 -> [N, 1] float32."""
        return field(blocks, 0, self.block_nbytes).view(self.stored).to(torch.float32)

    def quantize_blocks(self, dense: torch.Tensor) -> torch.Tensor:
        """Narrow, to the nearest and of two the even: [N, 1] float32 -> [N, W] uint8."""
        return dense.to(self.stored, copy=True).view(torch.uint8)


F32 = DenseFormat("f32", block_elements=1, block_nbytes=4, stored=torch.float32)
F16 = DenseFormat("f16", block_elements=1, block_nbytes=2, stored=torch.float16)
BF16 = DenseFormat("bf16", block_elements=1, block_nbytes=2, stored=torch.bfloat16)
