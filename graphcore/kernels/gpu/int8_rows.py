"""Quantisation of activations to int8 codes with one scale per token, optionally after a norm, in one kernel.

Legend: N tokens, I columns.

    scale = 127 / max(|x|, 1e-5)      codes = clip(round(x * scale), -128, 127), halves to even

kernels/ops/int8_rows.py has the same in plain torch. Here codes stay in the compute dtype, which holds them exactly.
Products take them like any x, and divide sums by the scale.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphcore.kernels.custom_ops import register_custom_op
from graphcore.kernels.gpu.dependent_launch import let_next_begin, wait_for_earlier
from graphcore.kernels.gpu.norm import block_of, normed
from graphcore.kernels.ops import int8_rows

SMALLEST_PEAK = tl.constexpr(int8_rows.SMALLEST_PEAK)
WHOLE = tl.constexpr(12582912.0)  # 1.5 * 2**23: float32 numbers of this size have no fraction, so adding it rounds


@triton.jit
def _norm_to_codes(
    x, weight, bias, codes, scales, columns, eps, IS_RMS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_begin(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    row = tl.program_id(0).to(tl.int64) * columns
    at = tl.arange(0, BLOCK)
    is_there = at < columns
    values = tl.load(x + row + at, mask=is_there, other=0.0).to(tl.float32)
    if weight is not None:
        values = normed(values, weight, bias, at, columns, eps, IS_RMS, WIDE, codes.dtype.element_ty).to(tl.float32)
    scale = tl.div_rn(1.0, tl.maximum(tl.max(tl.abs(values)), SMALLEST_PEAK)) * 127.0  # as torch divides 127 by it
    rounded = (values * scale + WHOLE) - WHOLE
    rounded = tl.minimum(tl.maximum(rounded, -128.0), 127.0)
    tl.store(codes + row + at, rounded.to(codes.dtype.element_ty), mask=is_there)
    tl.store(scales + tl.program_id(0), scale)


def launch_norm_to_codes(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    is_rms: bool,
    scale_in_float32: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return `x`, normalised if there is a weight, rounded to codes.

    No multiply-add is fused, because x * scale is rounded before it becomes an integer.

    Args:
        x: [N, I] any float dtype, contiguous.
        weight, bias, eps, is_rms, scale_in_float32, dtype: parameters of the norm, as in gpu/norm.py; the norm's result
            has dtype.

    Returns:
        [N, I] dtype, integers from -128 to 127, and [N] float32, the scales that x was multiplied with.
    """
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty(len(x), dtype=torch.float32, device=x.device)
    shape = block_of(x)
    _norm_to_codes[(len(x),)](
        x, weight, bias, codes, scales, x.shape[1], eps, IS_RMS=is_rms, WIDE=scale_in_float32, **shape
    )
    return codes, scales


norm_to_codes = register_custom_op(
    "norm_to_codes",
    launch_norm_to_codes,
    lambda x, dtype: (x.new_empty(x.shape, dtype=dtype), x.new_empty(len(x), dtype=torch.float32)),
)
