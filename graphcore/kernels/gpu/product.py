"""Products of a few tokens with weight matrices, as a decode step needs them: one launch for all of one input.

Legend: N tokens (1 to 8), I input features, O output features, F hidden features.

    product   y = [x @ q.T, x @ k.T, x @ v.T]          gated   h = act(x @ gate.T) * (x @ up.T)
    add_product   stream += x @ o.T

Sums are float32. Dense matrices run dense_gemv.py, packed ones packed_gemv.py; matrices of one input may have several
formats, then there is one launch for each run of equal ones. Where x holds int8 codes (whole numbers in the compute
dtype), `x_scale` is what they were multiplied with.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from graphcore.kernels.gpu.dense_gemv import launch_dense_product
from graphcore.kernels.gpu.matrix import DENSE, Matrix

MOST_TOKENS = 8
_OPERANDS = (
    "Tensor x, Tensor? x_scale, Tensor[] weights, Tensor?[] biases, Tensor?[] scales, str[] formats, int[] rows,"
    " bool divides, str activation"
)

torch.library.define("graphcore::gpu_product", f"({_OPERANDS}, ScalarType dtype) -> Tensor")
torch.library.define("graphcore::gpu_add_product", f"(Tensor(a!) stream, {_OPERANDS}) -> ()")
torch.library.define("graphcore::gpu_gated", f"({_OPERANDS}, ScalarType dtype) -> Tensor")


def product(
    x: Tensor,
    x_scale: Tensor | None,
    matrices: Sequence[Matrix],
    dtype: torch.dtype,
    divides: bool = False,
    activation: str = "",
) -> Tensor:
    """Return the products with all matrices, side by side.

    Args:
        x: [N, I] compute dtype, N from 1 to 8.
        x_scale: [N] float32, where x holds codes.
        matrices: of I input features each.
        dtype: of the result.
        divides: matrices' scales divide.
        activation: of the result, by the name that config.json uses; empty for none.

    Returns:
        [N, sum of the matrices' rows] dtype.
    """
    op = torch.ops.graphcore.gpu_product.default
    return op(x, x_scale, *_operands(matrices), divides, activation, dtype)  # type: ignore[no-any-return]


def add_product(stream: Tensor, x: Tensor, x_scale: Tensor | None, matrix: Matrix, divides: bool = False) -> None:
    """Add x @ matrix.T (+ bias) to `stream` [N, O] float32; arguments as of `product`."""
    op = torch.ops.graphcore.gpu_add_product.default
    op(stream, x, x_scale, *_operands([matrix]), divides, "")


def gated(
    x: Tensor,
    x_scale: Tensor | None,
    gate: Matrix,
    up: Matrix,
    dtype: torch.dtype,
    divides: bool,
    activation: str,
) -> Tensor:
    """Return act(x @ gate.T) * (x @ up.T): [N, F] dtype; arguments as of `product`."""
    op = torch.ops.graphcore.gpu_gated.default
    return op(x, x_scale, *_operands([gate, up]), divides, activation, dtype)  # type: ignore[no-any-return]


def _operands(matrices: Sequence[Matrix]) -> tuple[list[object], ...]:
    return tuple(list(column) for column in zip(*matrices, strict=True))


def _product(
    x: Tensor,
    x_scale: Tensor | None,
    weights: list[Tensor],
    biases: list[Tensor | None],
    scales: list[Tensor | None],
    formats: list[str],
    rows: list[int],
    divides: bool,
    activation: str,
    dtype: torch.dtype,
) -> Tensor:
    out = torch.empty(len(x), sum(rows), dtype=dtype, device=x.device)
    matrices = list(map(Matrix, weights, biases, scales, formats, rows))
    begin = 0
    for run in _launches(matrices):
        width = sum(matrix.rows for matrix in run)
        launch = launch_dense_product if run[0].format == DENSE else launch_packed_product
        launch(x, x_scale, run, divides, activation, out[:, begin : begin + width], False)
        begin += width
    return out
