"""Device functions that read packed matrices (kernels/device_layout.py) inside other kernels.

Legend: O rows, I columns, N tokens, R rows of a program, G units of columns that are read at once.

    weights_at   single weights, bit by bit the format's, at any rows and columns
    dot_rows     the products of some tokens with some rows of the matrix, float32, as fast as it goes

`L` is the format's DeviceLayout. A tensor's own scale (i2_s) is not in the rows: read it with `tensor_scale`.
"""

import triton
import triton.language as tl


@triton.jit
def weights_at(matrix, rows, at, columns, L: tl.constexpr):
    """Return weights, float32, in the shape that `rows` and `at` broadcast to.

    Bit-exact with the format where the launch has enable_fp_fusion=False; without the scale of an i2_s tensor.

    Args:
        matrix: pointer to uint8, at a multiple of 16 bytes.
        rows: int, 0 .. O - 1.  at: int, 0 .. I - 1; they broadcast against each other.
        columns: I.
    """


@triton.jit
def dot_rows(
    x, x_stride, tokens, matrix, first, rows, columns, L: tl.constexpr, N: tl.constexpr, R: tl.constexpr, G: tl.constexpr
):
    """Return the products of all tokens with rows first .. first + R - 1: [N, R] float32; any numbers behind the end.

    Args:
        x: pointer to any float dtype; token t begins at t * x_stride, at a multiple of 16 bytes.
        tokens: how many there are, at most N.
        matrix: pointer to uint8, at a multiple of 16 bytes.
        first: a multiple of R.
        rows: O; what lies behind is not read.
        columns: I.
        N: a power of two.  R: 1, 2, 4, 8 or 16.
        G: units of L.unit columns that are read at once; 32 for each warp of the program.
    """


@triton.jit
def tensor_scale(matrix, rows, columns, L: tl.constexpr):
    """Return the scale of the whole tensor, float32; 1 for formats that have none."""
