"""i2_s: BitNet's ternary weights, two bits each, with one scale for the whole tensor.

Legend: N groups of 128 elements.

    group 0[32]  group 1[32]  ...  group N-1[32]  scale[4], float32  padding[28], to be ignored
    group byte j: aabb ccdd, a = element j, b = element 32 + j, c = element 64 + j, d = element 96 + j
    y = (q - 1) * scale

Groups run over the flattened tensor and may cross rows. Builds of bitnet.cpp on ARM since November 2025 write another
order (64/16) under the same type id, and nothing in the file distinguishes them: only the 128/32 order is read here.
Source: microsoft/BitNet, src/ggml-bitnet-mad.cpp, quantize_i2_s.
"""

from collections.abc import Callable, Sequence
from math import isfinite, prod

import torch

from graphcore.encodings import Encoding, Planes
from graphcore.errors import CheckpointError
from graphcore.quant.bit_fields import field, pack_planes, planes
from graphcore.quant.block_slices import slices_of_blocks
from graphcore.quant.format import Format

SMALLEST_SCALE = 1e-5  # for weights that are rounded, as in BitNet's own code


class I2SFormat(Format):
    """Ternary, 2 bits per weight."""

    def nbytes(self, shape: Sequence[int]) -> int:
        """Return the stored size of a tensor, in bytes: a quarter byte per element, plus the tail.

        Raises:
            CheckpointError: the tensor is not a whole number of groups.
        """
        if not self.divides(shape):
            raise CheckpointError(
                f"{self.name}: shape {list(shape)} has {prod(shape)} elements, which is not a multiple of the group "
                f"of {self.block_elements}; the shape must be that of the whole tensor"
            )
        return Encoding.nbytes(self, shape)

    def split_rows(self, raw: torch.Tensor, shape: Sequence[int]) -> tuple[torch.Tensor, float]:
        """Return the rows, which must be whole groups, and the tensor's scale."""
        self.check_raw(raw, shape)
        scale = raw[-self.tail_nbytes : -self.tail_nbytes + 4].clone().view(torch.float32).item()
        return raw[: -self.tail_nbytes].view(*shape[:-1], -1), scale

    def join_rows(self, rows: torch.Tensor, scale: float) -> torch.Tensor:
        """Return the rows' bytes and the tail."""
        return with_scale_behind(rows.flatten(), torch.tensor([scale], dtype=torch.float32, device="cpu"))

    def dequantize_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Decode without the tensor's scale, which is not in the blocks: [N, 32] uint8 -> [N, 128] float32."""
        codes = planes(blocks, bits=2).flip(1).flatten(1)  # [N, 128]; the highest bits come first
        return codes.to(torch.float32).sub_(1)

    def decoder(self, raw: torch.Tensor) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
        """Return the groups without the tail, and a function that decodes and scales some of them."""
        blocks = raw[: -self.tail_nbytes].view(-1, self.block_nbytes)  # [N, 32]
        scale = field(raw[-self.tail_nbytes :].unsqueeze(0), 0, 4).view(torch.float32)  # [1, 1]

        def decode(some: torch.Tensor) -> torch.Tensor:
            return self.dequantize_blocks(some).mul_(scale)

        return blocks, decode

    def quantize_blocks(self, dense: torch.Tensor) -> torch.Tensor:
        """Encode weights in units of the tensor's scale: [N, 128] float32 -> [N, 32] uint8; halves go to even."""
        codes = dense.round().clamp_(-1, 1).add_(1).to(torch.uint8)  # [N, 128]
        return pack_planes(codes.view(-1, 4, 32).flip(1), bits=2)

    def quantize(self, dense: torch.Tensor) -> torch.Tensor:
        """Return the stored bytes of a dense tensor, as `Format.quantize` does.

        Weights -s, 0 and s are kept exactly. Others are rounded in units of their mean magnitude, which becomes the
        scale: BitNet's rule for weights in training (The Era of 1-bit LLMs, section 2; arXiv 2402.17764).
        """
        assert dense.is_floating_point(), f"weights are floats, got {dense.dtype}"
        raw = torch.zeros(self.nbytes(dense.shape), dtype=torch.uint8, device=dense.device)
        blocks, weights = raw[: -self.tail_nbytes].view(-1, self.block_nbytes), dense.reshape(-1, self.block_elements)
        mean, largest, is_ternary = _magnitudes(weights)
        if not isfinite(largest):
            raise CheckpointError(f"{self.name}: the tensor has infinite or NaN weights, which no format can pack")
        unit = largest if is_ternary else max(mean, SMALLEST_SCALE)
        for some in slices_of_blocks(len(blocks), self.block_elements):
            blocks[some].copy_(self.quantize_blocks(weights[some].to(torch.float32) / (unit or 1.0)))
        scale = torch.tensor([unit], dtype=torch.float32, device="cpu").view(torch.uint8)
        raw[-self.tail_nbytes : -self.tail_nbytes + len(scale)].copy_(scale)
        return raw


def _magnitudes(weights: torch.Tensor) -> tuple[float, float, bool]:
    """Return the mean and the largest magnitude, and whether all nonzero weights have the largest: [N, 128] in."""
    total, num_other = 0.0, 0
    largest = weights.abs().max().item() if weights.numel() else 0.0
    for some in slices_of_blocks(len(weights), weights.shape[1]):
        magnitudes = weights[some].abs()
        total += magnitudes.sum(dtype=torch.float64).item()
        num_other += int(((magnitudes != 0) & (magnitudes != largest)).sum())
    return total / max(1, weights.numel()), largest, num_other == 0


# From microsoft/BitNet's fork of ggml; upstream removed its id 36. One scale and 28 unused bytes follow the codes.
I2_S = I2SFormat(
    name="i2_s",
    block_elements=128,
    block_nbytes=32,
    ggml_id=36,
    kernel_number=20,
    bits=2,
    zero=1,
    tail_nbytes=32,
    is_ternary=True,
    narrower="q4_0",
    planes=Planes(low=(0, 32), scale="whole", group=128, step=32, is_descending=True),
)


def with_scale_behind(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return packed codes [n] uint8 with the tensor's scale, one float32, and its padding after them."""
    tail = torch.zeros(I2_S.tail_nbytes, dtype=torch.uint8, device=packed.device)
    tail[:4] = scale.to(torch.float32).reshape(1).view(torch.uint8)
    return torch.cat((packed, tail))
