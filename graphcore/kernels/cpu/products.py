"""Matrix products that share an input, computed by one call of the C++ kernels (native/product_output.h).

    method      products
    panels      bf16, of weights that are unpacked or dense (native/bf16_pairs.h); many tokens, with AVX512-BF16, or
                with AMX where the processor has it
    a rounding  of the codes of packed matrices with x rounded so (kernel_packing.py)

Legend: T tokens, I columns (input features), O rows (output features) of a matrix.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphcore.activations import Activation
from graphcore.kernels.cpu.library import DTYPE_NUMBERS, ROUNDINGS, Matrix, open_library

PANELS = "panels"
BLOCK_COLUMNS = 32  # columns of a matrix in panels are a multiple (native/codes.h)


class ProductOutput(ctypes.Structure):
    """One output of a call, y = x @ W.T or a gated pair: the C++ struct of native/product_output.h."""

    _fields_ = (
        ("matrix", Matrix),
        ("up", Matrix),
        *((name, ctypes.c_void_p) for name in ("bias", "up_bias", "y")),
        *((name, ctypes.c_int32) for name in ("activation", "unused")),
    )


@dataclass(frozen=True)
class Operand:
    """A weight matrix as the C++ kernels read it, and the kernel that multiplies it.

    Attributes:
        matrix: the kernels' struct.
        weight: tensor that the struct points to.
        bias: [O] any dtype, or None.
        method: `PANELS`, or a rounding of x.
        library: path of the kernels' library.
    """

    matrix: Matrix
    weight: Tensor
    bias: Tensor | None
    method: str
    library: str


def has_panels(library: str) -> bool:
    """Return whether this processor multiplies bf16 in panels: it has AVX512-BF16."""
    return bool(open_library(library).graphcore_has_panels())


def has_amx(library: str) -> bool:
    """Return whether panels are multiplied with AMX, whose sums have other bits than those with AVX512-BF16."""
    return bool(open_library(library).graphcore_has_amx())


def multiply(x: Tensor, operands: Sequence[Operand]) -> list[Tensor]:
    """Return x @ W.T (+ bias) for each matrix; for one method, a token's result does not depend on the batch.

    Args:
        x: [..., I] float32, fp16 or bf16; bf16 for panels.
        operands: matrices of I columns, one method and one library.

    Returns:
        [..., O] of x's dtype each.
    """
    x = x.contiguous()
    results = [x.new_empty((*x.shape[:-1], one.matrix.rows)) for one in operands]
    biases = [_wide(one.bias) for one in operands]
    outputs = [
        ProductOutput(one.matrix, Matrix(), _address(bias), None, y.data_ptr(), 0, 0)
        for one, bias, y in zip(operands, biases, results, strict=True)
    ]
    _run(x, outputs, operands[0])
    return results


def multiply_gated(x: Tensor, gate: Operand, up: Operand, activation: Activation) -> Tensor:
    """Return activation(x @ gate.T) * (x @ up.T), with the biases; products and activation are rounded to x's dtype.

    Args:
        x: [..., I], as in `multiply`.
        gate, up: matrices of one shape, one method and one library.

    Returns:
        [..., O] of x's dtype.
    """
    assert gate.matrix.rows == up.matrix.rows, "a gate is as wide as what it multiplies"
    assert gate.matrix.columns == up.matrix.columns, "both are multiplied with x"
    x = x.contiguous()
    y = x.new_empty((*x.shape[:-1], gate.matrix.rows))
    bias, up_bias = _wide(gate.bias), _wide(up.bias)
    addresses = _address(bias), _address(up_bias), y.data_ptr()
    _run(x, [ProductOutput(gate.matrix, up.matrix, *addresses, int(activation), 0)], gate)
    return y


def _run(x: Tensor, outputs: Sequence[ProductOutput], how: Operand) -> None:
    kernels, columns = open_library(how.library), x.shape[-1]
    assert all(one.matrix.columns == columns for one in outputs), f"x has {columns} columns, and a matrix others"
    threads, inputs = torch.get_num_threads(), (x.data_ptr(), x.numel() // columns, columns)
    array = (ProductOutput * len(outputs))(*outputs)
    if how.method == PANELS:
        kernels.graphcore_panels(threads, has_amx(how.library), *inputs, array, len(outputs))
    else:
        kernels.graphcore_products(threads, *inputs, DTYPE_NUMBERS[x.dtype], ROUNDINGS[how.method], array, len(outputs))


def _wide(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float().contiguous()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
