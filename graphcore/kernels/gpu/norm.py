"""Residual add and norm in one kernel: adds a sublayer's output to the stream and normalises it for the next one.

Legend: N tokens, D model dim.

    x += added    or, with a post-norm,    x += added / rms(added) * weight_after;        out = norm(x)

or out = 2^-10 x * weight and the squares of x, for products that apply the norm themselves (mean_squares.py).

One program holds a whole row, so that nothing is read twice.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphcore.kernels.custom_ops import register_custom_op
from graphcore.kernels.gpu.dependent_launch import let_next_begin, wait_for_earlier
from graphcore.kernels.gpu.matrix import MOST_COLUMNS
from graphcore.kernels.gpu.mean_squares import MOST_SUMMED, SHRINK, FusedNorm, fixed_squares
from graphcore.kernels.gpu.pdl import pdl_options


@triton.jit
def normed(values, weight, bias, at, columns, eps, IS_RMS: tl.constexpr, WIDE: tl.constexpr, DTYPE: tl.constexpr):
    """Return a normalised row, as DTYPE.

    Args:
        values: [BLOCK] float32, zeros after the row.
        weight, bias: pointers to [D] float32; bias may be None.
        at: [BLOCK] columns.
        WIDE: True to multiply by the weight before rounding to DTYPE.
    """
    is_there = at < columns
    if not IS_RMS:
        values = tl.where(is_there, values - tl.sum(values) / columns, 0.0)
    values *= tl.rsqrt(tl.sum(values * values) / columns + eps)
    scale = tl.load(weight + at, mask=is_there, other=0.0)
    if IS_RMS and not WIDE:
        values = values.to(DTYPE).to(tl.float32) * scale.to(DTYPE).to(tl.float32)
    else:
        values *= scale
    if bias is not None:
        values += tl.load(bias + at, mask=is_there, other=0.0)
    return values.to(DTYPE)


@triton.jit
def _residual_norm(
    x,
    added,
    weight_after,
    weight,
    bias,
    out,
    squares,
    columns,
    eps,
    IS_RMS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    let_next_begin(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    row = tl.program_id(0).to(tl.int64) * columns
    at = tl.arange(0, BLOCK)
    is_there = at < columns
    values = tl.load(x + row + at, mask=is_there, other=0.0).to(tl.float32)
    if added is not None:
        answer = tl.load(added + row + at, mask=is_there, other=0.0).to(tl.float32)
        if weight_after is not None:
            answer = normed(answer, weight_after, None, at, columns, eps, True, True, tl.float32)
        values += answer
        tl.store(x + row + at, values, mask=is_there)
    if squares is not None:
        scaled = SHRINK * values * tl.load(weight + at, mask=is_there, other=0.0)
        tl.store(out + row + at, scaled.to(out.dtype.element_ty), mask=is_there)
        upper, lower = fixed_squares(values)
        tl.store(squares + 2 * tl.program_id(0), tl.sum(upper))
        tl.store(squares + 2 * tl.program_id(0) + 1, tl.sum(lower))
    elif out is not None:
        fed = normed(values, weight, bias, at, columns, eps, IS_RMS, WIDE, out.dtype.element_ty)
        tl.store(out + row + at, fed, mask=is_there)


def launch_residual_norm(
    x: Tensor,
    added: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    is_rms: bool,
    dtype: torch.dtype,
    scale_in_float32: bool = True,
    weight_after: Tensor | None = None,
) -> Tensor:
    """Add to the residual stream, and return its norm.

    Args:
        x: [N, D] float32, contiguous; `added` is added in place. Any float dtype if nothing is added.
        added: [N, D] any float dtype, or None.
        weight: [D] float32.  bias: [D] float32, for a LayerNorm.
        eps: number added to the mean square.
        is_rms: True for RMSNorm, False for LayerNorm.
        dtype: dtype of the result.
        scale_in_float32: True to multiply by the weight before rounding to dtype; False for after, as in nn/norm.py.
        weight_after: [D] float32, weight of an RMSNorm with the same eps, applied to `added` first.

    Returns:
        [N, D] dtype.
    """
    assert added is None or x.dtype is torch.float32, f"the residual stream is float32, not {x.dtype}"
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    _residual_norm[(len(x),)](
        x, added, weight_after, weight, bias, out, None, x.shape[1], eps, IS_RMS=is_rms, WIDE=scale_in_float32,
        **block_of(x),
    )  # fmt: skip
    return out


def launch_prepare_norm(
    x: Tensor, next_norm: FusedNorm, added: Tensor | None = None, weight_after: Tensor | None = None, eps: float = 0.0
) -> None:
    """Add to the residual stream, as `residual_norm` does, and write the inputs of products that apply its norm.

    Args:
        x: [N, D] float32, contiguous.  added, weight_after: as in `residual_norm`.
        next_norm: weight of that norm and buffers for the result, which are overwritten.
        eps: the epsilon of the norm of `added`.
    """
    assert x.dtype is torch.float32, f"the residual stream is float32, not {x.dtype}"
    assert x.shape[1] <= MOST_SUMMED, f"rows of {x.shape[1]}, squares of {MOST_SUMMED} can be summed"
    weight, rows, squares = next_norm
    _residual_norm[(len(x),)](
        x, added, weight_after, weight, None, rows, squares, x.shape[1], eps, IS_RMS=True, WIDE=True, **block_of(x)
    )


def launch_add_normed(x: Tensor, added: Tensor, weight_after: Tensor, eps: float) -> None:
    """Add the RMSNorm of `added` [N, D], times `weight_after` [D], to the residual stream `x` [N, D] float32."""
    assert x.dtype is torch.float32, f"the residual stream is float32, not {x.dtype}"
    _residual_norm[(len(x),)](
        x, added, weight_after, None, None, None, None, x.shape[1], eps, IS_RMS=True, WIDE=True, **block_of(x)
    )


def block_of(x: Tensor) -> dict[str, int | bool]:
    """Return the launch options of a program that holds a whole row of `x` [N, D].

    No multiply-add is fused, so that the stream's bits are the same whether or not its norm is in the same launch.
    """
    columns = x.shape[1]
    assert columns <= MOST_COLUMNS, f"rows of {columns}, a program holds {MOST_COLUMNS}"
    assert x.is_contiguous(), "kernels take x row by row"
    block = triton.next_power_of_2(columns)
    warps = min(max(block // 512, 1), 16)
    return {"BLOCK": block, "num_warps": warps, "enable_fp_fusion": False, **pdl_options()}


residual_norm = register_custom_op(
    "residual_norm", launch_residual_norm, lambda x, dtype: x.new_empty(x.shape, dtype=dtype), mutates_args=["x"]
)
prepare_norm = register_custom_op(
    "prepare_norm", launch_prepare_norm, mutates_args=["x", "next_norm_rows", "next_norm_squares"]
)
add_rms_normed = register_custom_op("add_normed", launch_add_normed, mutates_args=["x"])
