"""A GPU's gates, sums and caps against float64, in the interpreter."""

import pytest
import torch
from torch import Tensor

from graphcore.activations import Activation
from graphcore.kernels.gpu.elementwise import add_elements, cap_elements, gate_elements
from graphcore.kernels.ops.gating import FUNCTIONS

pytestmark = pytest.mark.thorough

CLOSE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def numbers(columns: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(3, columns, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("kind", [Activation.NONE, *FUNCTIONS])
def test_a_gate_is_the_activation_times_the_other(kind: Activation, dtype: torch.dtype) -> None:
    both, b = numbers(3000, 1, dtype), numbers(1500, 2, dtype)
    a = both[:, 1500:]  # a part of a row
    activated = a.double() if kind is Activation.NONE else FUNCTIONS[kind](a.double())
    found = gate_elements(a, b, kind.kernel_name)
    assert found.dtype is dtype
    torch.testing.assert_close(found.double(), activated * b.double(), rtol=CLOSE[dtype], atol=CLOSE[dtype])


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_a_scaled_sum_may_lie_where_its_first_term_did(dtype: torch.dtype) -> None:
    stream, b = numbers(1500, 1), numbers(1500, 2, dtype)
    expected = stream.double() + 0.22 * b.double()
    add_elements(stream, stream, b, 0.22)
    torch.testing.assert_close(stream.double(), expected, rtol=1e-6, atol=1e-6)


def test_a_cap_is_never_passed() -> None:
    a = numbers(1500, 1) * torch.tensor([1.0, 1e4])[torch.arange(1500) % 2]
    found = cap_elements(a, 30.0)
    torch.testing.assert_close(found.double(), 30 * (a.double() / 30).tanh(), rtol=2e-6, atol=5e-6)
    assert found.abs().max() <= 30
