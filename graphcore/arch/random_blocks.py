"""Weights of a large model in seconds: blocks picked at random, with repetition, from a few that were drawn.

    random:         every weight is drawn                                   8 billion take minutes
    random:FORMAT   POOL blocks of FORMAT are drawn; a tensor picks its own from them     at the speed of memory

What a format does with its bits is as in a true model, and no two rows of a matrix are alike; that blocks occur many
times changes no speed, because no kernel looks at the values of weights.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from graphcore.quant import FORMATS

STANDARD_DEVIATION = 0.02  # of every matrix, as models are initialised
TERNARY_SCALE = STANDARD_DEVIATION * 1.5**0.5  # -1, 0 and 1 in equal numbers have a variance of 2/3
POOL = 4096  # blocks that are drawn for each encoding
DENSE = 256  # weights of a block of a dense encoding


def draw_pool(encoding: str, seed: int) -> Tensor:
    """Return blocks of normally distributed weights; of ternary codes where the tensor has the scale: [POOL, W] uint8.

    Raises:
        UnsupportedError: weights cannot be packed as this format.
    """
    generator = torch.Generator().manual_seed(seed)
    one = FORMATS[encoding]
    if one.has_tensor_scale:
        return ternary_bytes(POOL * one.block_nbytes, generator).view(POOL, one.block_nbytes)
    elements = DENSE if one.is_dense else one.block_elements
    weights = torch.empty(POOL, elements).normal_(0.0, STANDARD_DEVIATION, generator=generator)
    return one.quantize(weights).view(POOL, -1)


def pick_blocks(pool: Tensor, encoding: str, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return a tensor's stored bytes, made of the pool's blocks: [nbytes] uint8."""
    one = FORMATS[encoding]
    nbytes = one.nbytes(shape) - one.tail_nbytes
    count = -(-nbytes // pool.shape[1])
    places = torch.randint(len(pool), (count,), generator=generator, dtype=torch.int32)
    picked = pool.index_select(0, places).view(-1)[:nbytes]
    return one.join_rows(picked, TERNARY_SCALE)


def ternary_bytes(nbytes: int, generator: torch.Generator) -> Tensor:
    """Return bytes of four codes of 0, 1 or 2 each: [nbytes] uint8; there are 81 to draw from."""
    code = torch.arange(3, dtype=torch.uint8)
    bytes_of_codes = torch.cartesian_prod(code << 6, code << 4, code << 2, code).sum(1, dtype=torch.uint8)  # [81]
    return bytes_of_codes[torch.randint(0, 81, (nbytes,), generator=generator)]
