"""Elementwise operations of a decode step that cannot be fused into a product: gates, sums and caps.

    gate    f(a) * b, elementwise            add   a + factor * b
    scale   f(a) * b, one a for each row     cap   factor * tanh(a / factor)

Computed in float32, rounded once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphcore.kernels.custom_ops import register_custom_op
from graphcore.kernels.gpu.epilogue import activated

BLOCK = 1024


def gate_elements(a: Tensor, b: Tensor, activation: str) -> Tensor:
    """Return activation(a) * b, in the wider dtype; `activation` is its kernel_name (graphcore/activations.py)."""
    out = torch.empty(b.shape, dtype=torch.promote_types(a.dtype, b.dtype), device=b.device)
    torch.ops.graphcore.gpu_elementwise.default(out, a, b, "gate", activation, 1.0)
    return out


def scale_rows(a: Tensor, b: Tensor, activation: str) -> Tensor:
    """Return activation(a) * b, with one number a [N, 1] for each row of b [N, I], in b's dtype."""
    out = torch.empty(b.shape, dtype=b.dtype, device=b.device)
    torch.ops.graphcore.gpu_elementwise.default(out, a, b, "scale", activation, 1.0)
    return out


def add_elements(out: Tensor, a: Tensor, b: Tensor, factor: float) -> None:
    """Store a + factor * b in `out`, all of one shape; `out` may be `a`."""
    torch.ops.graphcore.gpu_elementwise.default(out, a, b, "add", "", factor)


def cap_elements(a: Tensor, limit: float) -> Tensor:
    """Return limit * tanh(a / limit), with a's shape and dtype."""
    out = torch.empty(a.shape, dtype=a.dtype, device=a.device)
    torch.ops.graphcore.gpu_elementwise.default(out, a, None, "cap", "", limit)
    return out


@triton.jit
def _elementwise(
    out,
    a,
    b,
    columns,
    a_stride,
    b_stride,
    factor,
    ELEMENTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_there = at < columns
    x = tl.load(a + row * a_stride + (at * 0 if ELEMENTS == "scale" else at), mask=is_there, other=0.0).to(tl.float32)
    if b is not None:
        y = tl.load(b + row * b_stride + at, mask=is_there, other=0.0).to(tl.float32)
        x = activated(x, ACTIVATION) * y if ELEMENTS != "add" else x + factor * y
    else:
        tl.static_assert(ELEMENTS == "cap", "the others have two operands")
        x = factor - 2 * factor / (1 + tl.exp(2 * x / factor))  # tanh(z) = 1 - 2 / (1 + e^2z): both ends are exact
    tl.store(out + row * columns + at, x.to(out.dtype.element_ty), mask=is_there)


def launch_elementwise(out: Tensor, a: Tensor, b: Tensor | None, elements: str, activation: str, factor: float) -> None:
    """Implement `gpu_elementwise`: rows [N, I] whose last stride is 1; `out` is contiguous."""
    assert out.is_contiguous(), "the kernel finds its place by shape alone"
    rows, columns = out.shape
    for operand in (b,) if elements == "scale" else (a, b):
        assert operand is None or (operand.shape == out.shape and operand.stride(1) == 1), "operands have out's shape"
    assert elements != "scale" or a.shape == (rows, 1), "a number for each row"
    _elementwise[(triton.cdiv(columns, BLOCK), rows)](
        out, a, b, columns, a.stride(0), 0 if b is None else b.stride(0), factor,
        ELEMENTS=elements, ACTIVATION=activation, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


register_custom_op("gpu_elementwise", launch_elementwise, mutates_args=["out"])
