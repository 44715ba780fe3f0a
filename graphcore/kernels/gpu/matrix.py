"""One weight matrix as the product kernels take it, dense or packed, with its bias and scale; and the kernels' limits.

Legend: N tokens, I input features, O output features.
"""

from typing import NamedTuple

from torch import Tensor

DENSE = "dense"
MOST_MATRICES = 3  # matrices of one launch: q, k and v
MOST_COLUMNS = 1 << 15  # columns of a row that a program of the norm holds; 32 registers of each of 1024 threads


class DeviceMatrix(NamedTuple):
    """A matrix with its bias and scale.

    Attributes:
        weight: [O, I] contiguous, compute dtype, or packed for a device, [nbytes] uint8.
        bias: [O] any float dtype.
        scale: [1] float32, multiplies or divides the product; None if the weight is scaled already.
        format: DENSE, or the stored format of a packed matrix.
        rows: number of rows, O.
    """

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None
    format: str
    rows: int
