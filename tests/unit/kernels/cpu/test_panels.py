"""Products of many tokens in bf16: bits of unpacked weights, sums against float64, any number of tokens and threads.

Both ways of panels run: with AVX512-BF16, which engines leave unused on a processor with AMX, and with AMX.

Legend: O rows (output features), I columns (input features), T tokens.
"""

from collections.abc import Iterator

import pytest
import torch
from support.cases import in_case
from support.packed_matrices import KERNEL_FORMATS, native_kernels, relative_error, stored_matrix
from torch import Tensor

from graphcore.activations import Activation
from graphcore.device import cpu_flags
from graphcore.kernels.backend import NativeBackend
from graphcore.kernels.cpu.kernel_packing import DENSE_TOKENS
from graphcore.kernels.cpu.products import Operand, has_amx, has_panels, multiply, multiply_gated
from graphcore.kernels.cpu.token_rows import TokenRows
from graphcore.nn.linear import Linear, gated_projection, joint_projections
from graphcore.nn.mlp import MLP
from graphcore.nn.spec import MLPSpec
from graphcore.quant import FORMATS

BF16_ERROR = 4e-3  # relative RMS error of a result that is rounded to bf16


@pytest.fixture(scope="module", params=["avx512_bf16", "amx"])
def kernels(request: pytest.FixtureRequest) -> Iterator[TokenRows]:
    library, uses_amx = native_kernels(), request.param == "amx"
    assert has_panels(library) == ("avx512_bf16" in cpu_flags())
    if not (has_amx(library) if uses_amx else has_panels(library)):
        pytest.skip(f"this processor has no {request.param}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("graphcore.kernels.cpu.products.has_amx", lambda _: uses_amx)
        yield TokenRows(library)


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def operand(kernels: TokenRows, weight: Tensor, bias: Tensor | None = None) -> Operand:
    found = kernels.operand(numbers(DENSE_TOKENS, weight.shape[1]), weight, None, "float", bias)
    assert found is not None
    return found


def test_panels_have_the_bits_of_the_unpacked_matrix(kernels: TokenRows) -> None:
    """Each token of the identity matrix selects a column."""
    for name in KERNEL_FORMATS:
        with in_case(name):
            columns = FORMATS[name].block_elements * max(1, 64 // FORMATS[name].block_elements)
            for rows in (1, 16, 53):
                matrix = stored_matrix(name, rows, columns)
                x = torch.eye(columns, dtype=torch.bfloat16)
                y = matrix.packing(kernels.library).linear(x, matrix.packed(kernels.library), None, "wide")
                assert torch.equal(y, matrix.dense.T.bfloat16()), rows  # a sum that begins with 0 turns -0 into 0


def test_products_of_long_rows_are_float64s(kernels: TokenRows) -> None:
    """Rows of more than one panel's columns; the last panel has one group, and the last group few rows."""
    for name in [*KERNEL_FORMATS, "bf16"]:
        with in_case(name):
            columns = 2048 + 256
            x, bias = numbers(19, columns), numbers(53, seed=2)
            if name == "bf16":
                dense = numbers(53, columns, seed=3)
                (y,) = multiply(x, [operand(kernels, dense, bias)])
            else:
                matrix = stored_matrix(name, 53, columns)
                packed, dense = matrix.packed(kernels.library), matrix.dense
                y = matrix.packing(kernels.library).linear(x, packed, bias, "wide")
            assert relative_error(y, x.double() @ dense.double().T + bias.double()) < BF16_ERROR


def test_a_token_has_the_same_bits_beside_any_others_on_any_number_of_threads(kernels: TokenRows) -> None:
    """The second matrix is SmolLM2's down projection, which a library of torch multiplies in another order for each."""
    before = torch.get_num_threads()
    for rows, columns in ((85, 96), (576, 1536)):
        weight, x = numbers(rows, columns), numbers(131, columns, seed=2)
        (whole,) = multiply(x, [operand(kernels, weight)])
        try:
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                for tokens in (16, 17, 40, 131):
                    (y,) = multiply(x[-tokens:], [operand(kernels, weight)])
                    assert torch.equal(y, whole[-tokens:]), (rows, threads, tokens)
        finally:
            torch.set_num_threads(before)


def test_products_of_torchs_library_and_of_amx_take_turns(kernels: TokenRows) -> None:
    """Each finds the shapes of AMX's registers as it left them."""
    weight, x = numbers(192, 256), numbers(64, 256, seed=2)
    (own,), theirs = multiply(x, [operand(kernels, weight)]), torch.nn.functional.linear(x, weight)
    for _ in range(3):
        assert torch.equal(torch.nn.functional.linear(x, weight), theirs)
        assert torch.equal(multiply(x, [operand(kernels, weight)])[0], own)


def test_several_matrices_of_one_call_have_the_bits_of_each_alone(kernels: TokenRows) -> None:
    x, bias = numbers(24, 64), numbers(20, seed=9)
    all_of_them = [operand(kernels, numbers(rows, 64, seed=rows)) for rows in (1, 33, 96)]
    all_of_them.append(operand(kernels, numbers(20, 64, seed=8), bias))
    for together, one in zip(multiply(x, all_of_them), all_of_them, strict=True):
        assert torch.equal(together, multiply(x, [one])[0])


@pytest.mark.parametrize("activation", list(Activation))
def test_a_gated_product_is_the_gate_of_both_products(kernels: TokenRows, activation: Activation) -> None:
    x = numbers(21, 64)
    for rows in (1, 16, 53):
        gate = operand(kernels, numbers(rows, 64, seed=1), numbers(rows, seed=3))
        up = operand(kernels, numbers(rows, 64, seed=2), numbers(rows, seed=4))
        both = multiply(x, [gate, up])
        assert torch.equal(multiply_gated(x, gate, up, activation), kernels.gated(*both, activation)), rows


def test_what_is_not_multiplied_in_panels_has_no_operand(kernels: TokenRows) -> None:
    x, weight = numbers(DENSE_TOKENS, 64), numbers(8, 64)
    assert kernels.operand(x, weight, None, "float", None) is not None
    assert kernels.operand(x[1:], weight, None, "float", None) is None  # few tokens
    assert kernels.operand(x.float(), weight, None, "float", None) is None
    assert kernels.operand(x, weight.float(), None, "float", None) is None
    assert kernels.operand(x[:, :43].contiguous(), weight[:, :43].contiguous(), None, "float", None) is None
    assert kernels.operand(x, numbers(64, 8).T, None, "float", None) is None
    matrix = stored_matrix("q4_k", 8, 256)
    packing, packed = matrix.packing(kernels.library), matrix.packed(kernels.library)
    wide = numbers(DENSE_TOKENS, 256)
    assert kernels.operand(wide, packed, packing, "wide", None).method == "panels"
    assert kernels.operand(wide, packed, packing, "block", None).method == "block"  # int8 activations
    assert kernels.operand(wide.float(), packed, packing, "wide", None) is None  # unpacked, and multiplied by torch


def linear(rows: int, columns: int, kernels: TokenRows, seed: int) -> Linear:
    made = Linear(columns, rows, bias=False, dtype=torch.bfloat16)
    made.weight = numbers(rows, columns, seed=seed)
    made.backend = NativeBackend(kernels.library)
    return made


def test_modules_multiply_in_panels(kernels: TokenRows) -> None:
    """Dense modules give the kernels' bits, alone, together and gated; an MLP is its three products."""
    x, (first, second) = numbers(2, 20, 64), (linear(40, 64, kernels, seed) for seed in (1, 2))
    alone = [multiply(x, [operand(kernels, one.weight)])[0] for one in (first, second)]
    assert torch.equal(first(x), alone[0])
    together = joint_projections([first, second], x)
    assert together is not None
    assert all(map(torch.equal, together, alone))
    gated = gated_projection(first, second, x, Activation.SILU)
    assert gated is not None
    assert torch.equal(gated, kernels.gated(*alone, Activation.SILU))
    mlp = MLP(MLPSpec(40, "silu"), 64, torch.bfloat16)
    mlp.gate_proj, mlp.up_proj, mlp.backend = first, second, first.backend
    mlp.down_proj.weight = numbers(64, 40, seed=5)
    assert torch.equal(mlp(x), mlp.down_proj(gated))
    assert gated_projection(first, second, x[:1, :8], Activation.SILU) is None
