"""Packed matrices times a few tokens, at memory speed: codes are unpacked in registers.

Legend: N tokens (1 to 8), I input features, O output features.
"""

from collections.abc import Sequence

from torch import Tensor

from graphcore.kernels.gpu.matrix import Matrix


def launch_packed_product(
    x: Tensor,
    x_scale: Tensor | None,
    matrices: Sequence[Matrix],
    divides: bool,
    activation: str,
    out: Tensor,
    adds: bool,
) -> None:
    """Store or add the products of up to MOST_MATRICES matrices of one format; arguments as of gpu/product.py.

    Args:
        x: [N, I] float32, fp16 or bf16, rows contiguous.
        x_scale: [N] float32, where x holds int8 codes as whole numbers: sums are then exact for ternary weights.
        matrices: packed as kernels/device_layout.py, all of one format, all with a bias or none, a scale or none.
        out: [N, sum of rows], the last dimension contiguous; all of it is written.
    """
    raise NotImplementedError


def launch_packed_gated(
    x: Tensor, x_scale: Tensor | None, gate: Matrix, up: Matrix, divides: bool, activation: str, out: Tensor
) -> None:
    """Store act(x @ gate.T) * (x @ up.T): [N, F]; both matrices of one format."""
    raise NotImplementedError
