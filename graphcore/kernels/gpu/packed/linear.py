"""Products of any number of tokens with a packed matrix: few with the kernels of few_tokens.py, many by unpacking.

Legend: N tokens, O rows (output features), I columns (input features).

For many tokens, a few million weights are unpacked at a time, into memory that is still in the L2 cache when the
library's matrix product reads it.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from graphcore.kernels import limits
from graphcore.kernels.custom_ops import register_implementation
from graphcore.kernels.gpu.device_packing import DevicePacking
from graphcore.kernels.gpu.int8_rows import launch_norm_to_codes
from graphcore.kernels.gpu.matrix import DeviceMatrix
from graphcore.kernels.gpu.packed.few_tokens import launch_packed_product
from graphcore.kernels.gpu.packed.to_dense import launch_unpack, tensor_scale_of
from graphcore.kernels.packing import GROUP_ROWS, empty_product

SLICE_ELEMENTS = 1 << 23  # weights that are unpacked at a time: 16 MiB in bf16
CODE_UNIT = 128  # codes are divided by it before a product: exact, and their sums stay within fp16's range


def launch_packed_linear(
    x: Tensor, packed: Tensor, bias: Tensor | None, packing: DevicePacking, rounds: bool
) -> Tensor:
    """Return x @ W.T (+ bias): [..., I] -> [..., O]; with `rounds`, x is first rounded to int8 codes, row by row."""
    out = empty_product(x, packing)
    rows = x.reshape(-1, packing.columns).contiguous()
    if not len(rows):
        return out
    scale = None
    if rounds:
        rows, scale = launch_norm_to_codes(rows, None, None, 0.0, True, True, x.dtype)
    product = out.view(-1, packing.rows)
    if len(rows) <= limits.MOST_TOKENS:
        matrix = DeviceMatrix(packed, bias, None, packing.format, packing.rows)
        launch_packed_product(_aligned(rows), scale, [matrix], False, "", product, False)
    elif scale is None:
        for begin, end in _slices(packing):
            weight = launch_unpack(packed, packing, x.dtype, begin=begin, end=end)
            _multiply(rows, weight, bias, begin, product[:, begin:end])
    else:
        _multiply_codes(rows, scale, packed, bias, packing, product)
    return out


def _aligned(x: Tensor) -> Tensor:
    """Return x at a multiple of 16 bytes: kernels are compiled once for aligned rows."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _slices(packing: DevicePacking) -> Iterator[tuple[int, int]]:
    """Yield the rows that are unpacked at a time: the first, and the end (exclusive)."""
    step = max(GROUP_ROWS, SLICE_ELEMENTS // packing.columns // GROUP_ROWS * GROUP_ROWS)
    for begin in range(0, packing.rows, step):
        yield begin, min(begin + step, packing.rows)


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, begin: int, out: Tensor) -> None:
    """Write x @ weight.T (+ bias) to `out`, some of a product's columns."""
    if bias is None:
        torch.mm(x, weight.T, out=out)
    else:
        torch.addmm(bias[begin : begin + len(weight)], x, weight.T, out=out)


def _multiply_codes(
    x: Tensor, scale: Tensor, packed: Tensor, bias: Tensor | None, packing: DevicePacking, out: Tensor
) -> None:
    """Multiply codes with weights without their tensor's scale, then scale: the order of nn/linear.py."""
    x = x / CODE_UNIT
    divisor = scale[:, None] / (CODE_UNIT * tensor_scale_of(packed, packing))
    for begin, end in _slices(packing):
        weight = launch_unpack(packed, packing, x.dtype, begin=begin, end=end, is_scaled=False)
        product = (x @ weight.T).float() / divisor
        out[:, begin:end] = product if bias is None else product + bias[begin:end].float()


register_implementation("device_linear", "CUDA", launch_packed_linear)
