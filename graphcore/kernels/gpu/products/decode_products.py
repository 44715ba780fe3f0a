"""Products of a few tokens with the weight matrices of a decode step: one launch for all matrices of one input.

Legend: N tokens (1 to 8), I input features, O output features, F hidden features.

    product   y = [x @ q.T, x @ k.T, x @ v.T]          gated_product   h = act(x @ gate.T) * (x @ up.T)
    add_product   stream += x @ o.T

Sums are float32. Dense matrices run dense.py, packed ones packed/few_tokens.py. Matrices of one input may have several
formats; then there is one launch for each run of equal formats. If x holds int8 codes (integers in the compute dtype),
`x_scale` has the scales that x was multiplied with. If x has rows whose norm is not applied yet (mean_squares.py),
`x_scale` has their squares.
"""

from collections.abc import Sequence
from itertools import groupby

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphcore.kernels import limits
from graphcore.kernels.custom_ops import register_custom_op
from graphcore.kernels.gpu.epilogue import activated
from graphcore.kernels.gpu.matrix import DENSE, DeviceMatrix
from graphcore.kernels.gpu.mean_squares import FusedNorm
from graphcore.kernels.gpu.packed.few_tokens import launch_packed_gated, launch_packed_product
from graphcore.kernels.gpu.products.dense import launch_dense_gated, launch_dense_product

BLOCK = 256  # hidden features of a program that applies the gate


def launch_product(
    x: Tensor,
    x_scale: Tensor | None,
    matrices: Sequence[DeviceMatrix],
    dtype: torch.dtype,
    divides: bool = False,
    activation: str = "",
    eps: float = 0.0,
    factor: float = 1.0,
) -> Tensor:
    """Return the products with all matrices, side by side.

    Args:
        x: [N, I] compute dtype, N from 1 to 8.
        x_scale: [N] float32, if x holds codes; [N, 2] int64 squares, if a norm is not applied yet.
        matrices: matrices of I input features each.
        dtype: dtype of the result.
        divides: True if the matrices' scales divide.
        activation: kernel_name of the result's activation (graphcore/activations.py); empty for none.
        eps: epsilon of that norm.
        factor: factor of the result.

    Returns:
        [N, sum of the matrices' rows] dtype.
    """
    out = _empty_product(x, matrices, dtype)
    _launch(x, x_scale, matrices, divides, activation, out, False, eps, factor=factor)
    return out


def _empty_product(x: Tensor, matrices: Sequence[DeviceMatrix], dtype: torch.dtype) -> Tensor:
    return x.new_empty((len(x), sum(matrix.rows for matrix in matrices)), dtype=dtype)


def launch_add_product(
    stream: Tensor,
    x: Tensor,
    x_scale: Tensor | None,
    matrix: DeviceMatrix,
    divides: bool = False,
    eps: float = 0.0,
    next_norm: FusedNorm | None = None,
    factor: float = 1.0,
) -> None:
    """Add factor * x @ matrix.T (+ factor * bias) to `stream` [N, O] float32; other arguments as in `product`.

    Args:
        next_norm: buffers that the sum is also written to, for the next norm; their squares must be zero.
    """
    assert stream.dtype is torch.float32, f"the residual stream is float32, not {stream.dtype}"
    _launch(x, x_scale, [matrix], divides, "", stream, True, eps, next_norm, factor)


def launch_gated(
    x: Tensor,
    x_scale: Tensor | None,
    gate: DeviceMatrix,
    up: DeviceMatrix,
    dtype: torch.dtype,
    divides: bool,
    activation: str,
    eps: float = 0.0,
) -> Tensor:
    """Return act(x @ gate.T) * (x @ up.T): [N, F] dtype; other arguments as in `product`.

    Matrices that do not fit into one launch first store their products in float32.
    """
    out = _empty_product(x, [gate], dtype)
    if len(launches([gate, up])) == 1:
        launch = launch_dense_gated if gate.format == DENSE else launch_packed_gated
        launch(x, x_scale, gate, up, divides, activation, out, eps)
        return out
    both = _empty_product(x, [gate, up], torch.float32)
    _launch(x, x_scale, [gate, up], divides, "", both, False, eps)
    launch_gate(both, activation, out)
    return out


def _launch(
    x: Tensor,
    x_scale: Tensor | None,
    matrices: Sequence[DeviceMatrix],
    divides: bool,
    activation: str,
    out: Tensor,
    adds: bool,
    eps: float,
    next_norm: FusedNorm | None = None,
    factor: float = 1.0,
) -> None:
    assert len(x) <= limits.MOST_TOKENS, f"{len(x)} tokens, these kernels are for up to {limits.MOST_TOKENS}"
    assert x.is_contiguous(), "kernels take x row by row"
    begin = 0
    for run in launches(matrices):
        end = begin + sum(matrix.rows for matrix in run)
        launch = launch_dense_product if run[0].format == DENSE else launch_packed_product
        launch(x, x_scale, run, divides, activation, out[:, begin:end], adds, eps, next_norm, factor)
        begin = end


def launches(matrices: Sequence[DeviceMatrix]) -> list[list[DeviceMatrix]]:
    """Return the matrices in runs of one launch each: one format, biases for all or none, scales for all or none."""

    def kind(matrix: DeviceMatrix) -> tuple[str, bool, bool]:
        return matrix.format, matrix.bias is None, matrix.scale is None

    return [list(run) for _, run in groupby(matrices, kind)]


@triton.jit
def _gate(both, out, hidden, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_there = at < hidden
    gate = tl.load(both + token * 2 * hidden + at, mask=is_there)
    up = tl.load(both + token * 2 * hidden + hidden + at, mask=is_there)
    values = activated(gate, ACTIVATION) * up
    tl.store(out + token * hidden + at, values.to(out.dtype.element_ty), mask=is_there)


def launch_gate(both: Tensor, activation: str, out: Tensor) -> None:
    """Store act(gate) * up for gate and up from separate launches, because their matrices do not fit into one.

    Args:
        both: [N, 2 F] float32, gate before up.
        activation: kernel_name of the activation, as in epilogue.py.
        out: [N, F] contiguous.
    """
    assert both.dtype is torch.float32, "products that are not rounded yet"
    tokens, hidden = out.shape
    _gate[(triton.cdiv(hidden, BLOCK), tokens)](
        both, out, hidden, ACTIVATION=activation, BLOCK=BLOCK, num_warps=2, enable_fp_fusion=True
    )


product = register_custom_op("gpu_product", launch_product, _empty_product)
add_product = register_custom_op(
    "gpu_add_product", launch_add_product, mutates_args=["stream", "next_norm_rows", "next_norm_squares"]
)
gated_product = register_custom_op("gpu_gated", launch_gated, lambda x, gate, dtype: _empty_product(x, [gate], dtype))
