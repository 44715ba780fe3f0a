"""f32, f16, bf16: ordinary little-endian floats, as formats of one element per block.

Legend: N blocks, which are elements here.
"""

import torch

from graphcore.quant.bit_fields import field
from graphcore.quant.format import Format

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


class DenseFormat(Format):
    """Elements stored as plain floats."""

    @property
    def stored(self) -> torch.dtype:
        """The dtype of the stored elements."""
        return DTYPES[self.name]

    def dequantize_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Widen: [N, W] uint8 -> [N, 1] float32."""
        return field(blocks, 0, self.block_nbytes).view(self.stored).to(torch.float32)

    def quantize_blocks(self, dense: torch.Tensor) -> torch.Tensor:
        """Narrow, to the nearest value, halves to even: [N, 1] float32 -> [N, W] uint8."""
        return dense.to(self.stored, copy=True).view(torch.uint8)


F32 = DenseFormat(
    name="f32",
    block_elements=1,
    block_nbytes=4,
    ggml_id=0,
    file_type=0,
    kernel_number=0,
    head="f32",
)
F16 = DenseFormat(
    name="f16",
    block_elements=1,
    block_nbytes=2,
    ggml_id=1,
    file_type=1,
    kernel_number=1,
    head="f16",
)
BF16 = DenseFormat(
    name="bf16",
    block_elements=1,
    block_nbytes=2,
    ggml_id=30,
    file_type=32,
    kernel_number=2,
    head="bf16",
)
