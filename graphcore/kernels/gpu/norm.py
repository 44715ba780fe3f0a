"""The residual stream takes a sublayer's answer and is normalised for the next sublayer, in one kernel.

Legend: N tokens, D model dim.

    x += added    or    x += norm(added), sandwiched;    fed = norm(x)

One program holds a whole row, so that nothing is read twice.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_COLUMNS = 1 << 15  # of a row that one program holds; 32 registers of each of 1024 threads

torch.library.define(
    "graphcore::residual_norm",
    "(Tensor(a!) x, Tensor? added, Tensor weight, Tensor? bias, float eps, bool is_rms, ScalarType dtype) -> Tensor",
)


def residual_norm(
    x: Tensor, added: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, is_rms: bool, dtype: torch.dtype
) -> Tensor:
    """Add to the residual stream and return it normalised.

    Args:
        x: [N, D] float32, contiguous; `added` is added in place.
        added: [N, D] any float dtype, or None.
        weight: [D] float32.  bias: [D] float32, of a LayerNorm.
        eps: added to the mean square.
        is_rms: RMSNorm, scaled in float32; else LayerNorm.
        dtype: of the result.

    Returns:
        [N, D] dtype.
    """
    op = torch.ops.graphcore.residual_norm.default
    return op(x, added, weight, bias, eps, is_rms, dtype)  # type: ignore[no-any-return]


@torch.library.register_fake("graphcore::residual_norm")
def _fake(
    x: Tensor, _added: Tensor | None, _weight: Tensor, _bias: Tensor | None, _eps: float, _rms: bool, dtype: torch.dtype
) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


@triton.jit
def _residual_norm(x, added, weight, bias, out, columns, eps, IS_RMS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * columns
    at = tl.arange(0, BLOCK)
    is_there = at < columns
    values = tl.load(x + row + at, mask=is_there, other=0.0)
    if added is not None:
        values += tl.load(added + row + at, mask=is_there, other=0.0).to(tl.float32)
        tl.store(x + row + at, values, mask=is_there)
    if not IS_RMS:
        values = tl.where(is_there, values - tl.sum(values) / columns, 0.0)
    scale = tl.rsqrt(tl.sum(values * values) / columns + eps)
    normed = values * scale * tl.load(weight + at, mask=is_there, other=0.0)
    if bias is not None:
        normed += tl.load(bias + at, mask=is_there, other=0.0)
    tl.store(out + row + at, normed.to(out.dtype.element_ty), mask=is_there)


def launch_residual_norm(
    x: Tensor, added: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, is_rms: bool, dtype: torch.dtype
) -> Tensor:
    """Implement `residual_norm`."""
    rows, columns = x.shape
    assert columns <= MOST_COLUMNS, f"rows of {columns}, a program holds {MOST_COLUMNS}"
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    block = triton.next_power_of_2(columns)
    warps = min(max(block // 512, 1), 16)
    _residual_norm[(rows,)](x, added, weight, bias, out, columns, eps, IS_RMS=is_rms, BLOCK=block, num_warps=warps)
    return out


# Not as decorators: torch's would leave None under the functions' names. Without a GPU the interpreter runs it.
torch.library.impl("graphcore::residual_norm", "CompositeExplicitAutograd", launch_residual_norm)
