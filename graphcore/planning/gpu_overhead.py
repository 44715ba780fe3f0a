"""Upper bounds of what a GPU's libraries, captured graphs and allocator take, and of the KV cache in its segments.

    libraries   workspaces of cuBLAS for two streams (the one that computes, the one that captures) and of cuBLASLt, and
                the code of kernels, which the driver loads at first use
    graphs      one pool for intermediate tensors, and NODE_NBYTES for each node of each captured program; chunks of
                prompts that are captured have their activations once more in the pool, and once in the warm-up
    rounding    memory is allocated in segments by torch's allocator

The driver's context is not counted, because it is taken before free memory is queried. A run's own record of free
memory (graphcore/gpu_memory.py) tells what was really used; docs/numbers.md has measurements.
"""

from collections.abc import Sequence

import torch

from graphcore.graph.gpu.chunk_graphs import chunk_sizes
from graphcore.kvcache.sizes import CacheSizes, buffers_nbytes
from graphcore.nn.decoder import Decoder
from graphcore.nn.spec import AttentionSpec, DeltaSpec, ModelSpec
from graphcore.planning.workspace import split_sums_nbytes, unpacked_nbytes, waiting_nbytes, workspace_nbytes

WORKSPACES = 3
WORKSPACE_NBYTES = 32 << 20  # on Hopper, 8 MiB before it; aten/src/ATen/cuda/CublasHandlePool.cpp
CODE_NBYTES = 64 << 20
NODE_NBYTES = 64 << 10  # reported: 33 MB for 500 nodes; forums.developer.nvidia.com, topic 244901
LAYER_NODES = 16  # kernels of a layer's decode step, and copies between separately captured layers
DELTA_NODES = 4  # additional ones of a layer with a delta rule and a mixture of experts
COMPILED_NODES = 28  # additional ones of a layer whose block is compiled: norms, rotations and each product apart
LATENT_NODES = 7  # additional ones of a layer with latent attention and a mixture of experts
STEP_NODES = 64  # embedding, head, sampling, next input
PROGRAMS = 3  # captured decode programs for each width: greedy, sampling, and logits only
SMALL, SMALL_SEGMENT = 1 << 20, 2 << 20  # c10/cuda/CUDACachingAllocator.cpp: kSmallSize, kSmallBuffer
LARGE, LARGE_SEGMENT, GRAIN = 10 << 20, 20 << 20, 2 << 20  # kMinLargeAlloc, kLargeBuffer, kRoundLarge
LOOSE_SEGMENTS = 2 * LARGE_SEGMENT + 4 * SMALL_SEGMENT  # for activations, inputs and tables
LIBRARIES = WORKSPACES * WORKSPACE_NBYTES + CODE_NBYTES + LOOSE_SEGMENTS  # needed by every run


def overhead_nbytes(
    spec: ModelSpec, decoder: Decoder, batch: int, is_captured: bool, dtype: torch.dtype, *, compiles: bool = False
) -> int:
    """Return the bytes on a GPU for libraries, kernels, captured graphs, attention and the largest unpacked matrix.

    Args:
        decoder: decoder, possibly on the meta device.
        batch: number of sequences.
        is_captured: True if decode steps are CUDA graphs.
        dtype: compute dtype.
        compiles: True if blocks of captured steps are compiled.
    """
    graphs = graphs_nbytes(step_nodes(spec, compiles=compiles), 1 if batch == 1 else 2) if is_captured else 0
    return LIBRARIES + graphs + split_sums_nbytes(spec, batch) + unpacked_nbytes(decoder, batch, dtype)


def step_nodes(spec: ModelSpec, *, compiles: bool = False) -> int:
    """Return the most nodes (kernels, copies) of a captured decode step; `compiles` as for `overhead_nbytes`."""
    mixers = [block.attention for block in spec.blocks]
    delta_layers = sum(isinstance(mixer, DeltaSpec) for mixer in mixers)
    latent_layers = sum(isinstance(mixer, AttentionSpec) and mixer.latent is not None for mixer in mixers)
    of_layer = LAYER_NODES + (COMPILED_NODES if compiles else 0)
    return len(mixers) * of_layer + delta_layers * DELTA_NODES + latent_layers * LATENT_NODES + STEP_NODES


def graphs_nbytes(nodes: int, num_widths: int) -> int:
    """Return the bytes of the captured programs of all widths, and of their shared pool of two segments.

    Args:
        nodes: nodes of one program.
    """
    return num_widths * PROGRAMS * nodes * NODE_NBYTES + SMALL_SEGMENT + LARGE_SEGMENT


def chunk_graphs_nbytes(spec: ModelSpec, decoder: Decoder, tokens: int, dtype: torch.dtype) -> int:
    """Return the bytes of the graphs of captured chunks of all sizes, and of their buffers.

    Args:
        decoder, dtype: the same as for `overhead_nbytes`.
        tokens: most tokens of a chunk.
    """
    sizes = chunk_sizes(tokens)
    nodes = len(sizes) * step_nodes(spec, compiles=True)
    activations = workspace_nbytes(spec, 1, tokens, dtype) + split_sums_nbytes(spec, 1)
    activations += unpacked_nbytes(decoder, 1, dtype)
    return nodes * NODE_NBYTES + waiting_nbytes(spec, sum(sizes)) + 2 * activations


def allocated_cache_nbytes(spec: ModelSpec, sizes: CacheSizes) -> int:
    """Return the bytes of the caches of all layers, in segments of torch's allocator; each cache is two tensors."""
    return segments_nbytes(buffers_nbytes(spec, sizes))


def segments_nbytes(sizes: Sequence[int]) -> int:
    """Return the bytes of the segments that torch's allocator takes for tensors of the given sizes.

    Source: c10/cuda/CUDACachingAllocator.cpp, get_allocation_size: tensors of up to 1 MiB share segments of 2 MiB,
    those of less than 10 MiB share segments of 20 MiB, and larger ones have their own.
    """
    small = -(-sum(size for size in sizes if size <= SMALL) // SMALL_SEGMENT) * SMALL_SEGMENT
    large = sum(-(-size // GRAIN) * GRAIN for size in sizes if size >= LARGE)
    between = sorted((-(-size // GRAIN) * GRAIN for size in sizes if SMALL < size < LARGE), reverse=True)
    room: list[int] = []  # bytes left in each segment of 20 MiB
    for size in between:
        fit = next((index for index, left in enumerate(room) if left >= size), None)
        if fit is None:
            room.append(LARGE_SEGMENT - size)
        else:
            room[fit] -= size
    return small + large + len(room) * LARGE_SEGMENT
