"""What a GPU's memory holds besides weights, caches and activations: estimates, stated as formulas, of upper bounds.

    libraries   workspaces of cuBLAS for two streams (the one that computes, the one that captures) and of cuBLASLt, and
                the code of kernels, which the driver loads as it is first used
    graphs      one pool for what flows between kernels, and NODE_NBYTES for each node of each captured program
    sums        of the splits of one layer's attention, until they are added up
    unpacked    the largest packed matrix, unpacked, while a prompt is multiplied with it; the head, in parts, is
                multiplied with each sequence's last token only, which up to 8 of them do packed
    rounding    of torch's allocator: memory is taken in segments

The driver's context is not counted: it is gone before free memory is asked for. A run's own record of free memory
(graphcore/device_memory.py) says what it really came to; docs/numbers.md has what was measured.

Legend: B batch, H heads, K kv heads, E head dim.
"""

from collections.abc import Sequence

import torch

from graphcore.nn.decoder import Decoder
from graphcore.nn.kv_cache import cache_slots
from graphcore.nn.linear import Linear
from graphcore.nn.spec import ModelSpec

WORKSPACES = 3
WORKSPACE_NBYTES = 32 << 20  # on Hopper, 8 MiB before it; aten/src/ATen/cuda/CublasHandlePool.cpp
CODE_NBYTES = 64 << 20
NODE_NBYTES = 64 << 10  # seen by others: 33 MB for 500 nodes; forums.developer.nvidia.com, topic 244901
LAYER_NODES = 16  # kernels of a layer's decode step, and copies where it is cut from the next
STEP_NODES = 64  # embedding, head, sampling, feed
PROGRAMS = 3  # of a decode step for each width: one takes the likeliest token, one samples, and one has logits only
PACKED_TOKENS = 8  # that are multiplied packed
PROCESSORS = 160  # of the largest devices; each holds two programs that split attention
SMALL, SMALL_SEGMENT = 1 << 20, 2 << 20  # c10/cuda/CUDACachingAllocator.cpp: kSmallSize, kSmallBuffer
LARGE, LARGE_SEGMENT, GRAIN = 10 << 20, 20 << 20, 2 << 20  # kMinLargeAlloc, kLargeBuffer, kRoundLarge
LOOSE_SEGMENTS = 2 * LARGE_SEGMENT + 4 * SMALL_SEGMENT  # of activations, inputs and tables
LIBRARIES = WORKSPACES * WORKSPACE_NBYTES + CODE_NBYTES + LOOSE_SEGMENTS  # whatever runs


def overhead_nbytes(spec: ModelSpec, decoder: Decoder, batch: int, is_captured: bool, dtype: torch.dtype) -> int:
    """Return what a GPU's libraries, kernels, captured graphs and attention take, with the largest unpacked matrix.

    Args:
        decoder: its tensors may be meta tensors.
        batch: sequences.
        is_captured: decode steps are CUDA graphs.
        dtype: compute dtype.
    """
    graphs = graphs_nbytes(len(spec.blocks), 1 if batch == 1 else 2) if is_captured else 0
    return LIBRARIES + graphs + split_sums_nbytes(spec, batch) + unpacked_nbytes(decoder, batch, dtype)


def graphs_nbytes(num_layers: int, num_widths: int) -> int:
    """Return what the captured programs take: each width's own, with a pool for all of a small and a large segment."""
    nodes = num_layers * LAYER_NODES + STEP_NODES
    return num_widths * PROGRAMS * nodes * NODE_NBYTES + SMALL_SEGMENT + LARGE_SEGMENT


def split_sums_nbytes(spec: ModelSpec, batch: int) -> int:
    """Return what one layer's attention takes for sums [E] and two numbers of each head and split, in float32.

    Splits times B times K are no more than the programs that a device holds, or one for each of them.
    """
    return max(
        max(2 * PROCESSORS, batch * one.kv_heads) * (one.heads // one.kv_heads) * (one.head_dim + 2) * 4
        for one in (block.attention for block in spec.blocks)
    )


def unpacked_nbytes(decoder: Decoder, batch: int, dtype: torch.dtype) -> int:
    """Return the bytes of the largest packed matrix in the compute dtype; 0 if none is packed."""
    rows_of_parts = decoder.head_rows() if batch > PACKED_TOKENS else []
    heads = (decoder.head.part(rows).lm_head for rows in rows_of_parts)
    inside = (module for module in decoder.layers.modules() if isinstance(module, Linear))
    packed = (linear for linear in (*inside, *heads) if linear.packing is not None)
    return max((linear.outputs * linear.inputs * dtype.itemsize for linear in packed), default=0)


def allocated_cache_nbytes(spec: ModelSpec, batch: int, context: int, dtype: torch.dtype) -> int:
    """Return what keys and values of all layers take as torch's allocator takes them: each a tensor of its own."""
    sizes = [
        batch * cache_slots(one, context) * one.kv_heads * one.head_dim * dtype.itemsize
        for one in (block.attention for block in spec.blocks)
        for _ in ("k", "v")
    ]
    return segments_nbytes(sizes)


def segments_nbytes(sizes: Sequence[int]) -> int:
    """Return the bytes of the segments that tensors of these sizes lie in.

    Source: c10/cuda/CUDACachingAllocator.cpp, get_allocation_size: up to 1 MiB share segments of 2 MiB, up to 10 MiB
    those of 20 MiB, and larger ones have their own.
    """
    small = -(-sum(size for size in sizes if size <= SMALL) // SMALL_SEGMENT) * SMALL_SEGMENT
    large = sum(-(-size // GRAIN) * GRAIN for size in sizes if size >= LARGE)
    between = sorted((-(-size // GRAIN) * GRAIN for size in sizes if SMALL < size < LARGE), reverse=True)
    room: list[int] = []  # left in each segment of 20 MiB
    for size in between:
        fit = next((index for index, left in enumerate(room) if left >= size), None)
        if fit is None:
            room.append(LARGE_SEGMENT - size)
        else:
            room[fit] -= size
    return small + large + len(room) * LARGE_SEGMENT
