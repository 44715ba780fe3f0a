"""Products of heads with packed matrices of their own.

Legend: B batch, T tokens, H heads, I input features, O output features of a head.
"""

import torch
from torch import Tensor

from graphcore.kernels.cpu.kernel_packing import KernelPacking
from graphcore.kernels.custom_ops import register_custom_op
from graphcore.kernels.packing import Packing


def packed_heads(x: Tensor, packed: Tensor, packing: Packing, rounding: str) -> Tensor:
    """Return the product of each head: [B, T, H * I] to [B, T, H * O].

    Args:
        packed: [H, nbytes] uint8.
        packing: packing of one head's matrix.
        rounding: rounding of x, as in kernels/cpu/kernel_packing.py.
    """
    if isinstance(packing, KernelPacking):
        return packed_head_products(x, packed, packing, rounding)
    return each_head(x, packed, packing, rounding)


def each_head(x: Tensor, packed: Tensor, packing: Packing, rounding: str) -> Tensor:
    """Multiply the heads one after another, as `packed_heads`."""
    heads = x.chunk(len(packed), dim=-1)
    return torch.cat([packing.linear(one, own, None, rounding) for one, own in zip(heads, packed, strict=True)], dim=-1)


def _each_head_cpu(x: Tensor, packed: Tensor, packing: KernelPacking, rounding: str) -> Tensor:
    return each_head(x, packed, packing, rounding)


packed_head_products = register_custom_op(
    "packed_head_products",
    _each_head_cpu,
    lambda x, packed, packing: x.new_empty((*x.shape[:-1], packed.shape[0] * packing.rows)),
    dispatch_key="CPU",
)
