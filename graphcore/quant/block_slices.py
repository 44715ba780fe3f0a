"""Decodes or encodes a large tensor slice by slice, so that temporaries stay in cache and memory stays bounded.

Legend: N blocks, W bytes per block, E elements per block. This module does not interpret the bytes.
"""

from collections.abc import Callable, Iterator

import torch

# 128 KiB of float32 stay in a core's cache, and are the most that torch runs on one thread (its grain size). Longer
# slices are two to four times faster on two idle cores. But where other processes use the cores, the barrier at the end
# of each of these short operations made them 10 to 100 times slower in measurements.
SLICE_ELEMENTS = 1 << 15
ENCODED_SLICE_ELEMENTS = 1 << 17  # a search is hundreds of short operations, whose fixed costs call for longer slices


def decode_in_slices(
    blocks: torch.Tensor,
    decode: Callable[[torch.Tensor], torch.Tensor],
    block_elements: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return `decode(blocks)` cast to `dtype`, computed over slices of whole blocks.

    Args:
        blocks: [N, W] uint8.
        decode: function from some of the blocks, [n, W] uint8, to their weights, [n, E] float32.
        block_elements: E.
        dtype: dtype of the result; the cast happens slice by slice.

    Returns:
        [N, E] `dtype`, on the device of `blocks`.
    """
    assert dtype.is_floating_point, f"weights are floats, asked for {dtype}"
    dense = torch.empty(blocks.shape[0], block_elements, dtype=dtype, device=blocks.device)
    for some in slices_of_blocks(blocks.shape[0], block_elements, SLICE_ELEMENTS):
        dense[some].copy_(decode(blocks[some]))
    return dense


def slices_of_blocks(
    num_blocks: int, block_elements: int, slice_elements: int = ENCODED_SLICE_ELEMENTS
) -> Iterator[slice]:
    """Return slices that cover the blocks, each of about `slice_elements` elements."""
    step = max(1, slice_elements // block_elements)
    return (slice(start, start + step) for start in range(0, num_blocks, step))
