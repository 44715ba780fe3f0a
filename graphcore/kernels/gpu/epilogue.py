"""The epilogue of a product, applied to its sums before they are stored: scales, bias, activation.

Legend: N tokens and R rows of a program, O output features.

y = sums / x_scale * scale + bias    or, of transformers' BitLinear,    y = sums / (x_scale * scale) + bias

For rows whose norm is not applied yet (mean_squares.py), y = sums / rms * scale + bias. A product that is added to the
residual stream may also write the inputs of the next norm.
"""

import triton
import triton.language as tl

from graphcore.kernels.gpu.mean_squares import inverse_rms, store_for_norm

SQRT_HALF = tl.constexpr(0.7071067811865476)
SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)


@triton.jit
def scaled_and_biased(sums, token, rows, is_row, x_scale, scale, bias, DIVIDES: tl.constexpr, columns=1, eps=0.0):
    """Return the sums, [N, R] float32, scaled and biased.

    Args:
        token: [N, 1] rows of x.
        rows: [1, R] rows of the matrix; is_row: [1, R] True for rows that exist.
        x_scale: pointer to [N] float32, the scales that x was multiplied with to become codes; or to [N, 2] int64, the
            squares of rows whose norm is not applied yet (mean_squares.py); or None.
        scale: pointer to [1] float32, or None.
        bias: pointer to [O], or None.
        DIVIDES: True if `scale` divides the product.
        columns, eps: D, and the norm's epsilon, where x_scale has squares.
    """
    if x_scale is not None and x_scale.dtype.element_ty == tl.int64:
        sums *= inverse_rms(x_scale, token, columns, eps)
    elif x_scale is not None:
        divisor = tl.load(x_scale + token)
        if scale is not None:
            if DIVIDES:
                divisor *= tl.load(scale)
        sums = sums / divisor
    if scale is not None:
        if x_scale is None or x_scale.dtype.element_ty == tl.int64 or not DIVIDES:
            sums = sums / tl.load(scale) if DIVIDES else sums * tl.load(scale)
    if bias is not None:
        sums += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)
    return sums


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """Return the activation of x, float32; ACTIVATION is a kernel_name of graphcore/activations.py."""
    if ACTIVATION == "silu":
        x = x / (1 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1 + tl.erf(x * SQRT_HALF))
    elif ACTIVATION == "gelu_tanh":
        inner = SQRT_2_OVER_PI * (x + 0.044715 * x * x * x)
        x = x / (1 + tl.exp(-2 * inner))  # 0.5 (1 + tanh(z)) = sigmoid(2 z)
    elif ACTIVATION == "relu":
        x = tl.maximum(x, 0.0)
    elif ACTIVATION == "relu2":
        x = tl.maximum(x, 0.0)
        x = x * x
    elif ACTIVATION == "sigmoid":
        x = 1 / (1 + tl.exp(-x))
    else:
        tl.static_assert(ACTIVATION == "", "no such activation")
    return x


@triton.jit
def store_products(
    out, values, first, start, tokens, rows, out_stride, ADDS: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    weight=None, norm_rows=None, squares=None, FACTOR: tl.constexpr = 1.0,
):  # fmt: skip
    """Store or add values [N, R] of tokens from `first` and rows from `start` of a matrix; none past either's end.

    Args:
        FACTOR: factor of the values.
        weight, norm_rows, squares: pointers, as in `mean_squares.FusedNorm`, for a sum that a norm follows; or None.
    """
    token = first + tl.arange(0, N)[:, None]
    row = start + tl.arange(0, R)[None, :]
    is_there = (token < tokens) & (row < rows)
    place = out + token * out_stride + row
    if FACTOR != 1.0:
        values *= FACTOR
    if ADDS:
        values += tl.load(place, mask=is_there, other=0.0)
    tl.store(place, values.to(out.dtype.element_ty), mask=is_there)
    if norm_rows is not None:
        store_for_norm(values, weight, norm_rows, squares, token, row, is_there, rows)
