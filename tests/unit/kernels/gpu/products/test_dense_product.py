"""Products of dense matrices with a few tokens, against float64."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from graphcore.activations import Activation
from graphcore.kernels.gpu.matrix import DENSE, DeviceMatrix
from graphcore.kernels.gpu.products import dense
from graphcore.kernels.gpu.products.decode_products import add_product, gated_product, launch_gate, launches, product
from graphcore.kernels.gpu.products.dense import launch_dense_product
from graphcore.kernels.ops.gating import FUNCTIONS

pytestmark = pytest.mark.thorough

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPSILON = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # relative to results of order one


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def matrix(rows: int, columns: int, dtype: torch.dtype, seed: int, has_bias: bool = True) -> DeviceMatrix:
    weight = (random(rows, columns, seed=seed) / columns**0.5).to(dtype)
    return DeviceMatrix(weight, random(rows, dtype=dtype, seed=seed + 1) if has_bias else None, None, DENSE, rows)


def expected_of(x: Tensor, matrices: Sequence[DeviceMatrix]) -> Tensor:
    parts = [x.double() @ one.weight.double().T + (0 if one.bias is None else one.bias.double()) for one in matrices]
    return torch.cat(parts, dim=1)


@pytest.fixture(autouse=True)
def rows_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a program have several rows: what a program costs in the interpreter depends little on its rows."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(dense, "ROWS", 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("columns", [7, 577, 2880])
@pytest.mark.parametrize("rows", [(5,), (3, 1, 6)])
def test_products_stand_side_by_side(dtype: torch.dtype, tokens: int, columns: int, rows: Sequence[int]) -> None:
    x = random(tokens, columns, dtype=dtype)
    matrices = [matrix(one, columns, dtype, seed) for seed, one in enumerate(rows, start=1)]
    y = product(x, None, matrices, torch.float32)
    torch.testing.assert_close(y.double(), expected_of(x, matrices), rtol=1e-5, atol=1e-5)  # sums of 2880 in float32
    rounded = product(x, None, matrices, dtype)
    torch.testing.assert_close(rounded, y.to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("has_bias", [True, False])
def test_the_stream_takes_the_product(has_bias: bool) -> None:
    x, one = random(2, 40, dtype=torch.bfloat16), matrix(24, 40, torch.bfloat16, 1, has_bias)
    stream = random(2, 24, seed=9)
    expected = stream.double() + expected_of(x, [one])
    add_product(stream, x, None, one)
    torch.testing.assert_close(stream.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_activation_gates(activation: Activation, dtype: torch.dtype) -> None:
    x = random(3, 96, dtype=dtype)
    gate, up = (matrix(21, 96, dtype, seed) for seed in (1, 5))
    expected = FUNCTIONS[activation](expected_of(x, [gate])) * expected_of(x, [up])
    h = gated_product(x, None, gate, up, torch.float32, False, activation.kernel_name)
    torch.testing.assert_close(h.double(), expected, rtol=1e-5, atol=1e-5)
    plain = product(x, None, [up], torch.float32, activation=activation.kernel_name)
    torch.testing.assert_close(plain.double(), FUNCTIONS[activation](expected_of(x, [up])), rtol=1e-5, atol=1e-5)


def test_large_negative_arguments_give_zero_and_no_nan() -> None:
    one = DeviceMatrix(torch.tensor([[-1.0], [1.0]]), None, None, DENSE, 2)
    for activation in ("silu", "gelu", "gelu_tanh"):
        y = product(torch.full((1, 1), 300.0), None, [one], torch.float32, activation=activation)
        assert y.tolist() == [[0.0, 300.0]]


@pytest.mark.parametrize("divides", [True, False])
def test_codes_and_weights_are_scaled_back(divides: bool) -> None:
    """Sums of codes times -1, 0 and 1 are exact, so the result is correctly rounded up to the divisions."""
    codes = torch.randint(-128, 128, (2, 300), generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    ternary = torch.randint(-1, 2, (12, 300), generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    x_scale, scale = torch.tensor([3.7, 41.0]), torch.tensor([0.37])
    matrices = [DeviceMatrix(part, None, scale * at, DENSE, 6) for at, part in enumerate(ternary.chunk(2), start=1)]
    y = product(codes, x_scale, matrices, torch.float32, divides)
    sums = codes.double() @ ternary.double().T
    factor = torch.tensor([0.37] * 6 + [0.74] * 6).double()
    expected = sums / x_scale.double()[:, None] * (1 / factor if divides else factor)
    torch.testing.assert_close(y.double(), expected, rtol=4e-7, atol=0)


def test_what_differs_in_kind_is_launched_apart() -> None:
    plain, biased = matrix(4, 8, torch.float32, 1, has_bias=False), matrix(4, 8, torch.float32, 2)
    assert [len(run) for run in launches([plain, plain, biased])] == [2, 1]
    x = random(1, 8)
    y = product(x, None, [plain, biased, plain], torch.float32)
    torch.testing.assert_close(y.double(), expected_of(x, [plain, biased, plain]), rtol=1e-6, atol=1e-6)
    h = gated_product(x, None, plain, biased, torch.float32, False, "silu")
    expected = FUNCTIONS[Activation.SILU](expected_of(x, [plain])) * expected_of(x, [biased])
    torch.testing.assert_close(h.double(), expected, rtol=1e-6, atol=1e-6)


def test_gating_apart_covers_odd_widths_and_nothing_else() -> None:
    both, out = random(2, 2 * 301), torch.full((3, 301), float("nan"), dtype=torch.float16)
    launch_gate(both, "relu2", out[:2])
    expected = both[:, :301].double().clamp(min=0).square() * both[:, 301:].double()
    torch.testing.assert_close(out[:2].double(), expected, rtol=1e-3, atol=1e-3)
    assert out[2].isnan().all()


def test_other_columns_of_what_is_written_stay() -> None:
    x, one = random(3, 32), matrix(5, 32, torch.float32, 1)
    out = torch.full((4, 9), float("nan"))
    launch_dense_product(x, None, [one], False, "", out[:3, 2:7], False)
    torch.testing.assert_close(out[:3, 2:7].double(), expected_of(x, [one]), rtol=1e-6, atol=1e-6)
    out[:3, 2:7] = float("nan")
    assert out.isnan().all()


def test_weights_at_an_odd_address_are_read_one_by_one() -> None:
    x, storage = random(1, 6, dtype=torch.bfloat16), random(25, dtype=torch.bfloat16, seed=3)
    one = DeviceMatrix(storage[1:].view(4, 6), None, None, DENSE, 4)
    torch.testing.assert_close(
        product(x, None, [one], torch.float32).double(), expected_of(x, [one]), rtol=1e-5, atol=1e-5
    )
