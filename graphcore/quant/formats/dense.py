"""f32, f16, bf16: ordinary little-endian floats, as formats of one element per block.

Legend: N blocks, which are elements here.
"""

import torch

from graphcore.checkpoint.dense_types import DENSE_DTYPES
from graphcore.quant.bits import field
from graphcore.quant.format import Format


class DenseFormat(Format):
    """Elements stored as they are."""

    @property
    def stored(self) -> torch.dtype:
        """Dtype whose bytes the elements are."""
        return DENSE_DTYPES[self.name]

    def dequantize_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Widen: [N, W] uint8 -> [N, 1] float32."""
        return field(blocks, 0, self.block_nbytes).view(self.stored).to(torch.float32)

    def quantize_blocks(self, dense: torch.Tensor) -> torch.Tensor:
        """Narrow, to the nearest and of two the even: [N, 1] float32 -> [N, W] uint8."""
        return dense.to(self.stored, copy=True).view(torch.uint8)


F32, F16, BF16 = DenseFormat.of("f32"), DenseFormat.of("f16"), DenseFormat.of("bf16")
