"""RMSNorms fused into residual adds, which write x * weight and the sum of squares, and into products, which scale.

Legend: N tokens, D model dim.

    norm(x) @ w.T  =  ((2^-10 x * weight) @ w.T) * 2^10 / sqrt(sum(x^2) / D + eps)

Several programs compute a row, so each adds its squares to the row's sum. Squares are added as integers, in units of
2^-44 and 16: these sums are exact, so the bits do not depend on the order of the programs, on how many rows of a matrix
each computes, or on which kernel wrote the row. Squares under 2^-44 count as zero (an epsilon is 2^-30 or more), those
over 2^52 as 2^52. Rows are scaled by 2^-10, because the residual stream may have values of a million, and packed
products take numbers under 2^31. In fp16 a norm has its own launch, because such rows may exceed the dtype's range.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

UPPER = tl.constexpr(16.0)
UNIT = tl.constexpr(2.0**-44)
UNITS = tl.constexpr(2.0**44)
SHRINK = tl.constexpr(2.0**-10)
GROW = tl.constexpr(2.0**10)
LARGEST = tl.constexpr(2.0**52)
MOST_SUMMED = 1 << 14  # columns of a row: more squares might not fit in 63 bits
LEAST_EPS = 2.0**-30


class FusedNorm(NamedTuple):
    """The buffers that a residual add writes for the norm that follows, which the next products apply.

    Attributes:
        weight: [D] float32, weight of the norm.
        rows: [N, D] float32 or bf16, contiguous: 2^-10 times the sum times the weight.
        squares: [N, 2] int64, contiguous: the sum of squares in units of 16 and of 2^-44; a product adds to it.
    """

    weight: Tensor
    rows: Tensor
    squares: Tensor


@triton.jit
def fixed_squares(values):
    """Return the squares of float32 numbers as int64 in units of 16, and what is left in units of 2^-44."""
    squares = tl.minimum(values * values, LARGEST)
    upper = tl.floor(squares * (1 / UPPER))
    return upper.to(tl.int64), ((squares - upper * UPPER) * UNITS).to(tl.int64)


@triton.jit
def inverse_rms(squares, token, columns, eps):
    """Return 2^10 / sqrt(mean square + eps) of rows of D = `columns`, as `token` is shaped."""
    upper, lower = tl.load(squares + 2 * token).to(tl.float32), tl.load(squares + 2 * token + 1).to(tl.float32)
    return GROW * tl.rsqrt((upper * UPPER + lower * UNIT) / columns + eps)


@triton.jit
def store_for_norm(values, weight, norm_rows, squares, token, rows, is_there, columns):
    """Leave new numbers [N, R] of the stream for the norm that follows, and add their squares to those of the rows.

    Args:
        values: [N, R] float32; token: [N, 1], rows of the stream; rows: [1, R], its columns.
        weight, norm_rows, squares: pointers, as in `FusedNorm`.
        is_there: [N, R]; a token that is not there has no number that is.
    """
    scaled = SHRINK * values * tl.load(weight + rows, mask=rows < columns, other=0.0)
    tl.store(norm_rows + token * columns + rows, scaled.to(norm_rows.dtype.element_ty), mask=is_there)
    upper, lower = fixed_squares(tl.where(is_there, values, 0.0))
    upper, lower = tl.sum(upper, axis=1, keep_dims=True), tl.sum(lower, axis=1, keep_dims=True)
    tl.atomic_add(squares + 2 * token, upper, mask=upper > 0, sem="relaxed")
    tl.atomic_add(squares + 2 * token + 1, lower, mask=lower > 0, sem="relaxed")
