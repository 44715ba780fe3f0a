"""How far packed weights are from the dense ones they were made of."""

from collections.abc import Sequence

import torch

from graphcore.quant.format import Format
from graphcore.quant.slices import slices_of_blocks


def packing_error(dense: torch.Tensor, raw: torch.Tensor, packed_as: Format, shape: Sequence[int]) -> float:
    """Return the relative error: root of the summed squared differences over root of the summed squares.

    Args:
        dense: `shape`, any float dtype.
        raw: [nbytes] uint8, what `packed_as.quantize(dense)` gave; unpacked in slices.
        shape: torch order.

    Returns:
        0 for equal tensors, all zeros included; infinite if zeros became anything else.
    """
    packed_as.check_raw(raw, shape)
    blocks, decode = packed_as.decoder(raw)
    weights_of = dense.reshape(-1, packed_as.block_elements)
    difference, size = 0.0, 0.0
    for some in slices_of_blocks(len(blocks), packed_as.block_elements):
        weights = weights_of[some].to(torch.float32)
        difference += decode(blocks[some]).sub_(weights).square_().sum(dtype=torch.float64).item()
        size += weights.square().sum(dtype=torch.float64).item()
    if difference == 0.0:
        return 0.0
    return float("inf") if size == 0.0 else (difference / size) ** 0.5
