"""What a step needs besides weights and caches: activations of a prefill chunk, and the logits.

Legend: B batch, T tokens of a chunk, D model dim, F hidden features, H heads, K kv heads, E head dim, V vocab.
"""

import torch

from graphcore.nn.block import RESIDUAL_DTYPE
from graphcore.nn.spec import BlockSpec, ModelSpec, MoESpec

ROPE_BYTES = 4


def workspace_nbytes(spec: ModelSpec, batch: int, tokens: int, dtype: torch.dtype, *, is_eager: bool = False) -> int:
    """Return an upper bound of the bytes that one prefill chunk of all sequences takes at once, and the logits.

    Args:
        tokens: T, of the longest chunk.
        dtype: compute dtype.
        is_eager: whether the chunk's operations run one by one, each with an answer of its own.
    """
    rows = batch * tokens
    block = max(_block_nbytes(one, dtype.itemsize) for one in spec.blocks)
    residual = 3 * spec.dim * RESIDUAL_DTYPE.itemsize  # before, after attention, after the MLP
    if is_eager:  # a norm's four steps and an activation; the C library keeps what they free
        residual += 4 * spec.dim * RESIDUAL_DTYPE.itemsize
        block += max(one.mlp.hidden for one in spec.blocks) * dtype.itemsize
    ropes = len(spec.ropes) * spec.blocks[0].attention.head_dim * ROPE_BYTES * 2
    logits = 2 * batch * spec.vocab * 4
    return rows * (residual + block + ropes) + logits


def _block_nbytes(block: BlockSpec, itemsize: int) -> int:
    """Return the bytes of the larger half of a block, for each token."""
    attention = block.attention
    heads = attention.heads + 2 * attention.kv_heads
    attended = 3 * heads * attention.head_dim * itemsize + attention.heads * attention.head_dim * 4
    mlp = block.mlp
    fed = mlp.hidden * (3 * itemsize + 4)
    if isinstance(mlp, MoESpec):  # answers of two waves and of both together, and their sum in float32
        fed += block.dim * (3 * mlp.top_k * itemsize + 3 * 4)
    return max(attended, fed) + 2 * block.dim * itemsize
