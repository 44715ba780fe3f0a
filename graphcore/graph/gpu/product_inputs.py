"""Inputs of product kernels: a matrix, and rows that are normalised, rounded to int8, or normalised by the product.

Legend: B batch, I input features, D model dim.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from graphcore.graph.gpu.norm_fusion import NormFusion, applied_norm
from graphcore.graph.lowering.operations import NormCall
from graphcore.kernels.gpu.int8_rows import norm_to_codes
from graphcore.kernels.gpu.matrix import DENSE, DeviceMatrix
from graphcore.kernels.gpu.mean_squares import FusedNorm
from graphcore.kernels.gpu.norm import prepare_norm, residual_norm
from graphcore.nn.linear import Linear
from graphcore.nn.norm import LayerNorm, RMSNorm

NO_NORM = (None, None, 0.0, True, True)
Modules = Mapping[str, nn.Module]


class ProductInput(NamedTuple):
    """The rows that a product multiplies.

    Attributes:
        rows: [B, I].
        scale: [B] float32, scales of int8 codes (codes = x * scale); or [B, 2] int64, sums of squares of rows whose
            norm the product applies (kernels/gpu/mean_squares.py); or None.
        eps: epsilon of that norm.
    """

    rows: Tensor
    scale: Tensor | None = None
    eps: float = 0.0


def product_input(
    modules: Modules, x: Tensor, norm: NormCall | None, linear: Linear, fusion: NormFusion | None
) -> ProductInput:
    """Return `x` [B, I] as a projection reads it: normalised if there is a norm, rounded to int8 codes if it uses int8.

    Args:
        modules: modules by their names in the operations.
        fusion: norm fusion of the layer; None if norms are not fused.
    """
    if linear.int8_order is not None:
        if norm is None:
            return ProductInput(*norm_to_codes(x, *NO_NORM, linear.dtype))
        return ProductInput(*norm_to_codes(x, *norm_weights(modules[norm.name]), norm.dtype or linear.dtype))
    if norm is None:
        return ProductInput(x)
    applied = applied_norm(modules, norm, linear)
    if applied is None or x.dtype is not torch.float32:
        return ProductInput(normalised(modules[norm.name], x, norm.dtype or linear.dtype))
    fused = None if fusion is None else fusion.prepared_for(applied, x)
    if fused is None:
        rows, squares = torch.empty_like(x, dtype=linear.dtype), x.new_empty(len(x), 2, dtype=torch.int64)
        fused = FusedNorm(applied.weight, rows, squares)
        prepare_norm(x, fused)
    return ProductInput(fused.rows, fused.squares, applied.eps)


def normalised(
    norm: nn.Module, x: Tensor, dtype: torch.dtype, added: Tensor | None = None, weight_after: Tensor | None = None
) -> Tensor:
    """Return `x` normalised, in `dtype`; `added` is added first, as in kernels/gpu/norm.py."""
    weight, bias, eps, is_rms, wide = norm_weights(norm)
    return residual_norm(x, added, weight, bias, eps, is_rms, dtype, wide, weight_after)


def device_matrix(linear: Linear) -> DeviceMatrix:
    """Return a projection's matrix as the operand of product kernels."""
    name = DENSE if linear.packing is None else linear.packing.format
    return DeviceMatrix(linear.weight, linear.bias, linear.weight_scale, name, linear.outputs)


def norm_weights(norm: nn.Module) -> tuple[Tensor, Tensor | None, float, bool, bool]:
    """Return a norm's weight, bias, eps, whether it is an RMSNorm, and whether it applies the weight in float32."""
    if isinstance(norm, RMSNorm):
        return norm.weight, None, norm.eps, True, norm.scale_in_float32
    assert isinstance(norm, LayerNorm), f"{type(norm).__name__} is no normalisation"
    return norm.weight, norm.bias, norm.eps, False, True
