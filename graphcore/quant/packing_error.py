"""Measures how far packed weights are from the dense ones they were made of."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graphcore.quant.block_slices import slices_of_blocks
from graphcore.quant.format import Format


@dataclass(frozen=True)
class SquaredError:
    """Sums over some of a tensor's weights; the sums of parts add up to those of the whole.

    Attributes:
        difference: sum of the squared differences.
        size: sum of the squared weights.
    """

    difference: float = 0.0
    size: float = 0.0

    def __add__(self, other: "SquaredError") -> "SquaredError":
        return SquaredError(self.difference + other.difference, self.size + other.size)

    @property
    def relative(self) -> float:
        """The root of the summed squared differences over the root of the summed squares.

        It is 0 for equal tensors, all zeros included, and infinite if zeros became anything else.
        """
        if self.difference == 0.0:
            return 0.0
        return float("inf") if self.size == 0.0 else (self.difference / self.size) ** 0.5


def packing_error(dense: torch.Tensor, raw: torch.Tensor, packed_as: Format, shape: Sequence[int]) -> SquaredError:
    """Return the error of a tensor, or of some of its rows.

    Args:
        dense: `shape`, any float dtype.
        raw: [nbytes] uint8, the result of `packed_as.quantize(dense)`; unpacked in slices.
        shape: torch order.
    """
    packed_as.check_raw(raw, shape)
    blocks, decode = packed_as.decoder(raw)
    weights_of = dense.reshape(-1, packed_as.block_elements)
    difference, size = 0.0, 0.0
    for some in slices_of_blocks(len(blocks), packed_as.block_elements):
        weights = weights_of[some].to(torch.float32)
        difference += decode(blocks[some]).sub_(weights).square_().sum(dtype=torch.float64).item()
        size += weights.square().sum(dtype=torch.float64).item()
    return SquaredError(difference, size)
