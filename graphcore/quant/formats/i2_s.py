"""i2_s: BitNet's ternary weights, two bits each, with one scale for the whole tensor.

Legend: N groups of 128 elements.

    group 0[32]  group 1[32]  ...  group N-1[32]  scale[4], float32  padding[28], to be ignored
    group byte j: aabb ccdd, a = element j, b = element 32 + j, c = element 64 + j, d = element 96 + j
    y = (q - 1) * scale

Groups run over the flattened tensor and may cross rows. Builds of bitnet.cpp on ARM since November 2025 write another
order (64/16) under the same type id, and nothing in the file tells the two apart: only the 128/32 order is read here.
Source: microsoft/BitNet, src/ggml-bitnet-mad.cpp, quantize_i2_s.
"""

from collections.abc import Sequence
from math import prod

import torch

from graphcore.errors import CheckpointError
from graphcore.quant.bits import field, planes
from graphcore.quant.format import Format
from graphcore.quant.slices import decode_in_slices

TAIL_NBYTES = 32  # the scale and its padding


class I2SFormat(Format):
    """Ternary, 2 bits per weight."""

    def nbytes(self, shape: Sequence[int]) -> int:
        """Return the stored size of a tensor, in bytes: a quarter per element, and the tail.

        Raises:
            CheckpointError: the tensor is not a whole number of groups.
        """
        num_elements = prod(shape)
        if num_elements % self.block_elements:
            raise CheckpointError(
                f"{self.name}: shape {list(shape)} has {num_elements} elements, which is not a multiple of the group "
                f"of {self.block_elements}; the shape must be that of the whole tensor"
            )
        return num_elements // self.block_elements * self.block_nbytes + TAIL_NBYTES

    def split_rows(self, raw: torch.Tensor, shape: Sequence[int]) -> tuple[torch.Tensor, float]:
        """Return the rows, which must be whole groups, and the tensor's scale."""
        self.check_raw(raw, shape)
        scale = raw[-TAIL_NBYTES : -TAIL_NBYTES + 4].clone().view(torch.float32).item()
        return raw[:-TAIL_NBYTES].view(*shape[:-1], -1), scale

    def join_rows(self, rows: torch.Tensor, scale: float) -> torch.Tensor:
        """Return the rows' bytes and the tail."""
        tail = torch.zeros(TAIL_NBYTES, dtype=torch.uint8, device=rows.device)
        tail[:4] = torch.tensor([scale], dtype=torch.float32).view(torch.uint8)
        return torch.cat((rows.flatten(), tail))

    def dequantize_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Decode without the tensor's scale, which lies in no block: [N, 32] uint8 -> [N, 128] float32."""
        codes = planes(blocks, bits=2).flip(1).flatten(1)  # [N, 128]; the highest bits come first
        return codes.to(torch.float32).sub_(1)

    def dequantize(self, raw: torch.Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the dense tensor that `raw` encodes, as `Format.dequantize` does."""
        self.check_raw(raw, shape)
        blocks = raw[:-TAIL_NBYTES].view(-1, self.block_nbytes)  # [N, 32]
        scale = field(raw[-TAIL_NBYTES:].unsqueeze(0), 0, 4).view(torch.float32)  # [1, 1]

        def decode(some: torch.Tensor) -> torch.Tensor:
            return self.dequantize_blocks(some).mul_(scale)

        return decode_in_slices(blocks, decode, self.block_elements, dtype).view(tuple(shape))


I2_S = I2SFormat("i2_s", block_elements=128, block_nbytes=32)
