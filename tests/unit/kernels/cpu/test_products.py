"""Products of one x with several matrices in one call: the bits of each alone, and of the gate of two products."""

from itertools import product as every_pair

import torch
from support.cases import in_case
from support.packed_matrices import stored_matrix
from torch import Tensor

from graphcore.activations import Activation
from graphcore.kernels.cpu.products import Operand, multiply, multiply_gated
from graphcore.kernels.cpu.token_rows import TokenRows

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def operand(library: str, name: str, rows: int, rounding: str, x: Tensor, bias: Tensor | None = None) -> Operand | None:
    matrix = stored_matrix(name, rows, 256)
    return matrix.packing(library).operand(x, matrix.packed(library), bias, rounding)


def test_matrices_of_several_formats_have_the_bits_of_each_alone(library: str) -> None:
    for dtype, rounding in every_pair(DTYPES, ["float", "wide", "block", "token"]):
        with in_case(dtype, rounding):
            for tokens in (1, 7, 15, 130):
                x = numbers(2, tokens, 256).to(dtype)[:1]
                shapes = (("q4_k", 53), ("q6_k", 16), ("q8_0", 1))
                found = [operand(library, name, rows, rounding, x, numbers(rows, seed=rows)) for name, rows in shapes]
                operands = [one for one in found if one is not None]
                if len(operands) < len(found):  # unpacked, and multiplied by torch
                    assert tokens == 130
                    continue
                for together, one in zip(multiply(x, operands), operands, strict=True):
                    (alone,) = multiply(x, [one])
                    assert (alone.shape, alone.dtype) == ((1, tokens, one.matrix.rows), dtype)
                    assert torch.equal(together, alone), (tokens, one.matrix.rows)


def test_a_gated_product_is_the_gate_of_both_products(library: str) -> None:
    """To the bit in 16 bits; a float32 gate may be contracted into one multiply-add in one of the two."""
    for dtype, activation in every_pair(DTYPES, list(Activation)):
        with in_case(dtype, activation):
            for tokens, rows in ((1, 53), (15, 16), (130, 17)):
                x = numbers(tokens, 256).to(dtype)
                gate = operand(library, "q4_k", rows, "block", x, numbers(rows, seed=3))
                up = operand(library, "q5_0", rows, "block", x, numbers(rows, seed=4))
                assert gate is not None
                assert up is not None
                expected = TokenRows(library).gated(*multiply(x, [gate, up]), activation)
                found = multiply_gated(x, gate, up, activation)
                if dtype is torch.float32:
                    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
                else:
                    assert torch.equal(found, expected), (tokens, rows)
