"""Dense matrices times a few tokens, at memory speed."""

from collections.abc import Sequence

from torch import Tensor

from graphcore.kernels.gpu.matrix import Matrix


def launch_dense_product(
    x: Tensor,
    x_scale: Tensor | None,
    matrices: Sequence[Matrix],
    divides: bool,
    activation: str,
    out: Tensor,
    adds: bool,
) -> None:
    """Store or add the products of up to MOST_MATRICES matrices."""
    raise NotImplementedError


def launch_dense_gated(
    x: Tensor, x_scale: Tensor | None, gate: Matrix, up: Matrix, divides: bool, activation: str, out: Tensor
) -> None:
    """Store act(x @ gate.T) * (x @ up.T)."""
    raise NotImplementedError
