"""Formulas for upper bounds of the memory that is needed besides weights: caches, workspace, loading, GPU overhead.

    workspace   activations of a prefill chunk, and the logits
    attention   on a CPU, keys and values that a chunk sees, widened by the C++ kernels, or copied and multiplied into a
                whole matrix of scores by torch; it grows with the context
    waiting     what the further chunks keep that run in the same pass, one after another in each group
    making      converting a weight at load: the bytes read for it and intermediate copies. Weights are made one after
                another (weights/resident_weights.py, streaming/host_store.py), so the largest counts

On a GPU also

    libraries   workspaces of cuBLAS for two streams (the one that computes, the one that captures) and of cuBLASLt, and
                the code of kernels, which the driver loads at first use
    graphs      one pool for intermediate tensors, and NODE_NBYTES for each node of each captured program
    sums        partial results of the splits of one layer's attention, until they are combined, of a step or a chunk
    unpacked    the largest packed matrix, unpacked, while a prompt is multiplied with it. The head, in parts, counts
                only for more than 8 sequences: it sees one token of each, and up to 8 tokens are multiplied packed
    rounding    memory is allocated in segments by torch's allocator

The driver's context is not counted, because it is taken before free memory is queried. A run's own record of free
memory (graphcore/gpu_memory.py) tells what was really used; docs/lab/gpu.md has measurements.

Legend: B batch, T tokens of a chunk, D model dim, F hidden features, H heads, K kv heads, E head dim, V vocab.
"""

from collections.abc import Iterator, Sequence
from math import prod

import torch

from graphcore.checkpoint.dense_types import DENSE_DTYPES
from graphcore.kernels import limits
from graphcore.kernels.packing import GROUP_ROWS, Packing
from graphcore.kvcache.sizes import CacheSizes, buffers_nbytes
from graphcore.nn.block import RESIDUAL_DTYPE
from graphcore.nn.decoder import Decoder
from graphcore.nn.linear import Linear
from graphcore.nn.spec import AttentionSpec, BlockSpec, DeltaSpec, ModelSpec, MoESpec
from graphcore.weights.conversion import CONVERSION_NBYTES, first_row
from graphcore.weights.layout import layout_of
from graphcore.weights.loader import PACKED_WEIGHTS, Loader
from graphcore.weights.packed_weights import packing_of

ROPE_BYTES = 4
ID_NBYTES = 8
FLOAT32_NBYTES = 4
# Bytes for each weight that is being packed: in float32, packed, unpacked again, and the temporaries of a search for
# scales.
PACKING_NBYTES = 8 * FLOAT32_NBYTES

WORKSPACES = 3
WORKSPACE_NBYTES = 32 << 20  # on Hopper, 8 MiB before it; aten/src/ATen/cuda/CublasHandlePool.cpp
CODE_NBYTES = 64 << 20
NODE_NBYTES = 64 << 10  # reported: 33 MB for 500 nodes; forums.developer.nvidia.com, topic 244901
LAYER_NODES = 16  # kernels of a layer's decode step, and copies between separately captured layers
DELTA_NODES = 4  # more of a layer with a delta rule and a mixture
STEP_NODES = 64  # embedding, head, sampling, next input
PROGRAMS = 3  # captured decode programs for each width: greedy, sampling, and logits only
PROCESSORS = 160  # multiprocessors of the largest devices
SMALL, SMALL_SEGMENT = 1 << 20, 2 << 20  # c10/cuda/CUDACachingAllocator.cpp: kSmallSize, kSmallBuffer
LARGE, LARGE_SEGMENT, GRAIN = 10 << 20, 20 << 20, 2 << 20  # kMinLargeAlloc, kLargeBuffer, kRoundLarge
LOOSE_SEGMENTS = 2 * LARGE_SEGMENT + 4 * SMALL_SEGMENT  # for activations, inputs and tables
LIBRARIES = WORKSPACES * WORKSPACE_NBYTES + CODE_NBYTES + LOOSE_SEGMENTS  # needed by every run


def overhead_nbytes(spec: ModelSpec, decoder: Decoder, batch: int, is_captured: bool, dtype: torch.dtype) -> int:
    """Return the bytes on a GPU for libraries, kernels, captured graphs, attention and the largest unpacked matrix.

    Args:
        decoder: decoder, possibly on the meta device.
        batch: number of sequences.
        is_captured: True if decode steps are CUDA graphs.
        dtype: compute dtype.
    """
    delta_layers = sum(isinstance(block.attention, DeltaSpec) for block in spec.blocks)
    graphs = graphs_nbytes(len(spec.blocks), delta_layers, 1 if batch == 1 else 2) if is_captured else 0
    return LIBRARIES + graphs + split_sums_nbytes(spec, batch) + unpacked_nbytes(decoder, batch, dtype)


def graphs_nbytes(num_layers: int, delta_layers: int, num_widths: int) -> int:
    """Return the bytes of the captured programs of all widths, and of their shared pool of two segments.

    Args:
        num_layers: number of all layers.  delta_layers: number of those with a delta rule.
    """
    nodes = num_layers * LAYER_NODES + delta_layers * DELTA_NODES + STEP_NODES
    return num_widths * PROGRAMS * nodes * NODE_NBYTES + SMALL_SEGMENT + LARGE_SEGMENT


def split_sums_nbytes(spec: ModelSpec, batch: int) -> int:
    """Return the bytes of one layer's split attention: sums [E] and two numbers per row and split, in float32.

    A decode step has H / K rows for each of its `decode_programs`. A chunk's keys are split only if all programs of one
    sequence run at once; several sequences' chunks may be one call.
    """
    sums = (
        max(
            decode_programs(batch, one.kv_heads) * (one.heads // one.kv_heads),
            batch * PROCESSORS * rows_at_once(one.head_dim),
        )
        * (one.head_dim + 2)
        * FLOAT32_NBYTES
        for one in spec.attentions
    )
    return max(sums, default=0)


def decode_programs(batch: int, kv_heads: int) -> int:
    """Return the most programs of a decode step's attention (kernels/gpu/attention/splits.py)."""
    return max(min(batch, limits.SPLIT_ROUNDS) * limits.SPLIT_PROGRAMS * PROCESSORS, batch * kv_heads)


def rows_at_once(head_dim: int) -> int:
    """Return the most rows that a multiprocessor attends at once in prefill (kernels/gpu/attention/prefill.py)."""
    return limits.PREFILL_ROWS if head_dim <= limits.WIDE_HEAD else limits.WIDE_HEAD_ROWS


def unpacked_nbytes(decoder: Decoder, batch: int, dtype: torch.dtype) -> int:
    """Return the bytes of the largest packed matrix when unpacked to the compute dtype; 0 if none is packed."""
    rows_of_parts = decoder.head_rows() if batch > limits.MOST_TOKENS else []
    heads = (decoder.head.part(rows).lm_head for rows in rows_of_parts)
    inside = (module for module in decoder.layers.modules() if isinstance(module, Linear))
    packed = (linear for linear in (*inside, *heads) if linear.packing is not None)
    return max((linear.outputs * linear.inputs * dtype.itemsize for linear in packed), default=0)


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


def attention_nbytes(spec: ModelSpec, context: int, tokens: int, dtype: torch.dtype, threads: int | None) -> int:
    """Return an upper bound of what attention of a chunk of a prompt takes on a CPU, besides inputs and answers.

    Source: `Seen` and `tile_floats` in kernels/cpu/native/chunk.h; `masked_attend` in kernels/ops/attend.py.

    Args:
        context: tokens that the cache of a sequence has room for.
        tokens: length T of the longest chunk.
        dtype: compute dtype.
        threads: threads of the C++ kernels; None if torch computes attention.
    """
    return max((_attention_nbytes(one, context, tokens, dtype, threads) for one in spec.attentions), default=0)


def _attention_nbytes(one: AttentionSpec, context: int, tokens: int, dtype: torch.dtype, threads: int | None) -> int:
    seen = context if one.window is None else min(context, one.window + tokens)
    if threads is not None:
        widened = 2 * one.kv_heads * one.head_dim * seen
        return FLOAT32_NBYTES * (widened + threads * limits.CHUNK_ROWS * (2 * one.head_dim + seen))
    copied = (4 * one.kv_heads + 2 * one.heads) * one.head_dim * seen * dtype.itemsize
    scores = tokens * seen * (one.heads * (2 * FLOAT32_NBYTES + dtype.itemsize) + FLOAT32_NBYTES + 1)
    return copied + scores


def waiting_nbytes(spec: ModelSpec, tokens: int) -> int:
    """Return the bytes that chunks keep between two layer groups: ids, residual stream, rope rows and features.

    Args:
        tokens: tokens of all chunks together.
    """
    ropes = sum(rope.width or head_dim for rope, head_dim in spec.ropes)
    features = 0 if spec.per_layer is None else len(spec.blocks) * spec.per_layer.width
    return tokens * (ID_NBYTES + spec.dim * RESIDUAL_DTYPE.itemsize + (ropes + features) * FLOAT32_NBYTES)


def workspace_nbytes(spec: ModelSpec, batch: int, tokens: int, dtype: torch.dtype, *, is_eager: bool = False) -> int:
    """Return an upper bound of the bytes of one chunk's activations, of a prompt or a step, and of the logits.

    Args:
        batch: number of sequences, of which a decode step has a token each.
        tokens: length T of the longest chunk of a prompt.
        dtype: compute dtype.
        is_eager: True if the chunk's operations run one by one, each with its own result tensor.
    """
    rows = max(batch, tokens)
    block = max(_block_nbytes(one, dtype.itemsize) for one in spec.blocks)
    residual = 3 * spec.dim * RESIDUAL_DTYPE.itemsize  # before, after attention, after the MLP
    if is_eager:  # four temporaries of a norm, and an activation; malloc keeps what they free
        residual += 4 * spec.dim * RESIDUAL_DTYPE.itemsize
        block += max(one.mlp.hidden for one in spec.blocks) * dtype.itemsize
    ropes = len(spec.ropes) * max((one.head_dim for one in spec.attentions), default=0) * ROPE_BYTES * 2
    logits = 2 * batch * spec.vocab * 4
    # projected, normalised, the table's rows, their sum, and that sum by layer
    features = 0 if spec.per_layer is None else 5 * spec.per_layer.layers * spec.per_layer.width * FLOAT32_NBYTES
    return rows * (residual + block + ropes + features) + logits


def _block_nbytes(block: BlockSpec, itemsize: int) -> int:
    """Return the activation bytes per token of attention or MLP, whichever is larger."""
    attention = block.attention
    if isinstance(attention, DeltaSpec):
        attended = _delta_nbytes(attention, itemsize)
    else:
        heads = attention.heads + 2 * attention.kv_heads
        attended = 3 * heads * attention.head_dim * itemsize + attention.heads * attention.head_dim * 4
    mlp = block.mlp
    fed = mlp.hidden * (3 * itemsize + 4)
    if isinstance(mlp, MoESpec) and mlp.beside is not None:
        fed += mlp.beside.hidden * (3 * itemsize + 4)
    if isinstance(mlp, MoESpec):  # results of two waves, of both together, and their sum in float32
        fed += block.dim * (3 * mlp.top_k * itemsize + 3 * 4)
    return max(attended, fed) + 2 * block.dim * itemsize


def _delta_nbytes(spec: DeltaSpec, itemsize: int) -> int:
    """Return the activation bytes per token of a delta rule: its inputs, and what its chunks make of them in float32.

    For each value head a chunk has queries, keys and decayed keys, values, new values and answers, and three matrices
    of a token's relations to the others.
    """
    inputs = spec.channels + 2 * spec.value_heads * spec.value_dim
    of_heads = spec.value_heads * (6 * spec.key_dim + 4 * spec.value_dim + 3 * limits.DELTA_CHUNK)
    return inputs * (2 * itemsize + 2 * FLOAT32_NBYTES) + of_heads * FLOAT32_NBYTES


def loading_nbytes(loader: Loader, decoder: Decoder, is_on_cpu: bool) -> int:
    """Return the peak bytes of RAM for loading, besides the weights' own memory.

    Args:
        is_on_cpu: True if the device is the CPU, where weights are made in place; else a whole group is made in RAM and
            then copied.
    """
    largest = max((making_nbytes(loader, *weight) for weight in _weights(loader, decoder)), default=0)
    if is_on_cpu:
        return largest
    return largest + max(layout_of(group.named_buffers()).nbytes for _, group in decoder.groups())


def making_nbytes(loader: Loader, weight: str, packing: Packing | None, dtype: torch.dtype) -> int:
    """Return the peak bytes for making one weight, besides the weight's own memory.

    Args:
        packing: packing of the weight; None if it is dense.
        dtype: dtype of the weight's memory.
    """
    source = loader.sources[weight]
    info = loader.checkpoint.tensors[source.name]
    is_dense = info.encoding in DENSE_DTYPES
    is_packed_here = packing is not None and is_dense
    packs = packing_nbytes(prod(info.shape)) if is_packed_here else 0
    can_split = packing is None or packing.can_split
    if can_split and first_row(loader, source, info, None if is_packed_here else packing) is not None:
        rows = min(info.shape[0], max(GROUP_ROWS, CONVERSION_NBYTES * info.shape[0] // info.nbytes))
        stored = rows * info.nbytes // info.shape[0]
        return 2 * stored + packs + (0 if is_dense else 2 * rows * info.shape[1] * FLOAT32_NBYTES)
    num_weights = prod(info.shape)
    spans = loader.checkpoint.spans(source.name)
    read = info.nbytes * (1 if len(spans) < 2 and is_dense else 2)  # the parts, and the tensor made of them
    itemsize = DENSE_DTYPES[info.encoding].itemsize if is_dense else max(dtype.itemsize, FLOAT32_NBYTES)
    stays_packed = packing is not None and not is_packed_here
    copied = info.nbytes if stays_packed else num_weights * itemsize
    folded = copied if source.folds or not is_dense else 0
    is_cast = packing is None and (not is_dense or DENSE_DTYPES[info.encoding] != dtype)
    return read + folded + packs + (num_weights * dtype.itemsize if is_cast else 0)


def packing_nbytes(num_weights: int) -> int:
    """Return the bytes for packing a dense matrix, some rows at a time, besides the dense and the packed matrix."""
    return PACKING_NBYTES * min(num_weights, PACKED_WEIGHTS)


def _weights(loader: Loader, decoder: Decoder) -> Iterator[tuple[str, Packing | None, torch.dtype]]:
    """Yield name, packing and dtype of every weight that has a source."""
    for prefix, group in decoder.groups():
        for name, tensor in group.named_buffers():
            if prefix + name in loader.sources:
                yield prefix + name, packing_of(group, name), tensor.dtype
