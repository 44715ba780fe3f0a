"""Upper bounds of the workspace of a pass: activations, scratch of attention, unpacked matrices, and logits.

    workspace   activations of a prefill chunk, and the logits; after the chunk, in place of what its blocks needed, the
                logits of a slice of its tokens, for a prompt's log probabilities
    attention   on a CPU, keys and values that a chunk sees, widened by the C++ kernels, or copied and multiplied into a
                whole matrix of scores by torch; it grows with the context
    sums        on a GPU, partial results of the splits of one layer's attention, until they are combined, of a step or
                a chunk
    unpacked    on a GPU, the largest packed matrix, unpacked, while a prompt is multiplied with it. The head, in parts,
                counts only for more than 8 sequences: it sees one token of each, and up to 8 tokens are multiplied
                packed
    waiting     inputs and residual streams of further chunks in the same pass, which run one by one in each group
    carried     values inside a block of these chunks, where the groups are parts of a layer

Legend: B batch, T tokens of a chunk, D model dim, F hidden features, H heads, K kv heads, E head dim, V vocab.
"""

import torch
from torch import nn

from graphcore.kernels import limits
from graphcore.nn.block import RESIDUAL_DTYPE
from graphcore.nn.decoder import Decoder
from graphcore.nn.latent_attention import HeadLinear
from graphcore.nn.linear import Linear
from graphcore.nn.moe import MoE
from graphcore.nn.spec import AttentionSpec, BlockSpec, ConvSpec, DeltaSpec, ModelSpec, MoESpec

ROPE_BYTES = 4
MIXERS = ("self_attn", "linear_attn", "conv")  # names of the modules in a block that mix tokens
ID_NBYTES = 8
FLOAT32_NBYTES = 4
LOGIT_NBYTES = 3 * FLOAT32_NBYTES  # of each logit of a slice: as projected, as float32 if that differs, and normalised
SLICE_LOGITS = 1 << 25  # most logits that are held at once: 128 MiB of float32
LEAST_SCORED = 32  # tokens of a slice that always fit; half of one is multiplied as a chunk is (DENSE_TOKENS)
PROCESSORS = 160  # multiprocessors of the largest devices


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
    passed = max(rows * block, scored_nbytes(spec.vocab))
    # projected, normalised, the table's rows, their sum, and that sum by layer
    features = 0 if spec.per_layer is None else 5 * spec.per_layer.layers * spec.per_layer.width * FLOAT32_NBYTES
    return rows * (residual + ropes + features) + passed + logits


def scored_tokens(vocab: int, spare_nbytes: int) -> int:
    """Return how many prompt tokens are projected to logits at once, for log probabilities.

    Args:
        spare_nbytes: bytes of the budget that the plan leaves.
    """
    nbytes = min(SLICE_LOGITS * LOGIT_NBYTES, spare_nbytes)
    return max(LEAST_SCORED, nbytes // (max(vocab, 1) * LOGIT_NBYTES))


def scored_nbytes(vocab: int) -> int:
    """Return the bytes of the logits of LEAST_SCORED tokens, which a plan has room for."""
    return LEAST_SCORED * vocab * LOGIT_NBYTES


def _block_nbytes(block: BlockSpec, itemsize: int) -> int:
    """Return the activation bytes per token of attention or MLP, whichever is larger."""
    attention = block.attention
    if isinstance(attention, DeltaSpec):
        attended = _delta_nbytes(attention, itemsize)
    elif isinstance(attention, ConvSpec):  # the projections, in float32 too, inputs and outputs of the convolution
        attended = attention.channels * (4 * itemsize + 6 * FLOAT32_NBYTES)
    else:
        heads = attention.heads + 2 * attention.kv_heads
        attended = 3 * heads * attention.head_dim * itemsize + attention.heads * attention.head_dim * 4
        if attention.latent is not None:  # queries without rotation, in two forms, and the heads' values
            widths = 2 * attention.latent.nope + attention.latent.value_dim
            attended += (attention.heads * widths + attention.latent.query_rank) * 2 * itemsize
    mlp = block.mlp
    fed = mlp.hidden * (3 * itemsize + 4)
    if isinstance(mlp, MoESpec) and mlp.parallel_mlp is not None:
        fed += mlp.parallel_mlp.hidden * (3 * itemsize + 4)
    if isinstance(mlp, MoESpec):  # results of two batches of experts, of both together, and their sum in float32
        fed += block.dim * (3 * mlp.top_k * itemsize + 3 * 4)
    return max(attended, fed) + 2 * block.dim * itemsize


def _delta_nbytes(spec: DeltaSpec, itemsize: int) -> int:
    """Return the activation bytes per token of a delta rule: its inputs, and intermediates in float32.

    For each value head a chunk has queries, keys and decayed keys, values, new values and outputs, and three matrices
    with a row and a column for each of its tokens.
    """
    inputs = spec.channels + 2 * spec.value_heads * spec.value_dim
    of_heads = spec.value_heads * (6 * spec.key_dim + 4 * spec.value_dim + 3 * limits.DELTA_CHUNK)
    return inputs * (2 * itemsize + 2 * FLOAT32_NBYTES) + of_heads * FLOAT32_NBYTES


def attention_nbytes(spec: ModelSpec, context: int, tokens: int, dtype: torch.dtype, threads: int | None) -> int:
    """Return an upper bound of the bytes of attention of a prompt's chunk on a CPU, besides inputs and outputs.

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
        seen += 2 * limits.CHUNK_KEYS  # an aligned first key, and whole blocks
        widened = 2 * one.kv_heads * one.head_dim * seen
        return FLOAT32_NBYTES * (widened + threads * limits.CHUNK_ROWS * (2 * one.head_dim + seen))
    copied = (4 * one.kv_heads + 2 * one.heads) * one.head_dim * seen * dtype.itemsize
    scores = tokens * seen * (one.heads * (2 * FLOAT32_NBYTES + dtype.itemsize) + FLOAT32_NBYTES + 1)
    return copied + scores


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


def waiting_nbytes(spec: ModelSpec, tokens: int) -> int:
    """Return the bytes that chunks keep between two layer groups: ids, residual stream, rope rows and features.

    Args:
        tokens: tokens of all chunks together.
    """
    ropes = sum(rope.width or head_dim for rope, head_dim in spec.ropes)
    features = 0 if spec.per_layer is None else len(spec.blocks) * spec.per_layer.width
    return tokens * (ID_NBYTES + spec.dim * RESIDUAL_DTYPE.itemsize + (ropes + features) * FLOAT32_NBYTES)


def carried_nbytes(decoder: Decoder, dtype: torch.dtype) -> int:
    """Return the most bytes per token that a chunk keeps between two parts of a block, beside the residual stream.

    These are the stream after attention, its norm, the results of all projections before attention or of the largest
    one behind it, and the chosen experts' outputs.
    """
    return max((_carried_nbytes(block, dtype.itemsize) for _, block in decoder.blocks()), default=0)


def _carried_nbytes(block: nn.Module, itemsize: int) -> int:
    mixing, behind, inputs = 0, 0, 0
    for name, module in block.named_modules():
        if not isinstance(module, Linear | HeadLinear):
            continue
        inputs = max(inputs, module.inputs)
        if name.startswith(MIXERS):
            mixing += module.outputs
        else:
            behind = max(behind, module.outputs)
    experts = sum(one.top_k * one.router.inputs for one in block.modules() if isinstance(one, MoE))
    return 2 * inputs * (RESIDUAL_DTYPE.itemsize + itemsize) + (max(mixing, behind) + experts) * itemsize
