"""One weight matrix as the product kernels take it: dense or packed, with what is done to its product. And limits.

Legend: N tokens, I input features, O output features.
"""

from typing import NamedTuple

from torch import Tensor

DENSE = "dense"
MOST_MATRICES = 3  # of one launch: q, k and v
MOST_TOKENS = 8  # of one launch
MOST_COLUMNS = 1 << 15  # of a row that a program of the norm holds; 32 registers of each of 1024 threads


class Matrix(NamedTuple):
    """A matrix and its bias.

    Attributes:
        weight: [O, I] contiguous, compute dtype, or packed for a device, [nbytes] uint8.
        bias: [O] any float dtype.
        scale: [1] float32, multiplies or divides the product; None where the weight holds it or has none.
        format: DENSE, or the stored format of what is packed.
        rows: O.
    """

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None
    format: str
    rows: int
