"""What the kernels of a mixture of experts share: where an expert lies, its activation, its matrices' forms.

Legend: X experts, S places, I input features, O rows of a matrix.
"""

import triton
import triton.language as tl

BLOCK = tl.constexpr(512)  # columns that a program multiplies at once


@triton.jit
def place_of(expert, places):
    """Return where an expert lies, int64; negative: it is nobody, or not there."""
    place = expert.to(tl.int64)
    if places is not None:
        place = tl.load(places + place, mask=place >= 0, other=-1).to(tl.int64)
    return place


@triton.jit
def activated(gate, up, limit, alpha):
    """Return (up + 1) * gate * sigmoid(alpha * gate) of the clamped float32 arguments."""
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    return (up + 1.0) * (gate / (1.0 + tl.exp(-alpha * gate)))


@triton.jit
def dense_sums(x, matrix, rows, is_row, columns, ROWS: tl.constexpr):
    """Return the products of some rows of a dense matrix [O, I] with a vector [I]: [ROWS] float32."""
    starts = rows.to(tl.int64) * columns
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for begin in range(0, columns, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        is_there = at < columns
        fed = tl.load(x + at, mask=is_there, other=0.0).to(tl.float32)
        mask = is_row[:, None] & is_there[None, :]
        total += tl.load(matrix + starts[:, None] + at[None, :], mask=mask, other=0.0).to(tl.float32) * fed[None, :]
    return tl.sum(total, axis=1)
