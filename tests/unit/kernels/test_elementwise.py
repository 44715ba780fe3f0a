"""Gates, sums and caps of a native program against float64, for each instruction set."""

from itertools import product as every_pair

import torch
from support.cases import in_case
from torch import Tensor

from graphcore.activations import Activation
from graphcore.kernels.cpu.instructions import ELEMENTS, Elementwise
from graphcore.kernels.cpu.program import NativeProgram
from graphcore.kernels.ops.gating import FUNCTIONS

SIZES = (1, 15, 33, 1024, 5000)  # a part of a vector, several units


def run(library: str, elements: str, a: Tensor, b: Tensor | None, kind: Activation, factor: float, out: Tensor) -> None:
    program = NativeProgram(library, 2)
    arrays = program.per_row(a), program.per_row(b), program.per_row(out)
    program.add(Elementwise(ELEMENTS[elements], kind, *arrays, out.numel(), factor))
    program.run()


def numbers(size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 3


def test_a_gate_is_the_activation_times_the_other(library: str) -> None:
    for size, kind in every_pair(SIZES, [Activation.NONE, *FUNCTIONS]):
        with in_case(size, kind):
            a, b, out = numbers(size, 1), numbers(size, 2), torch.full((size + 1,), 7.0)
            run(library, "gate", a, b, kind, 0.0, out[:size])
            activated = a.double() if kind is Activation.NONE else FUNCTIONS[kind](a.double())
            torch.testing.assert_close(out[:size].double(), activated * b.double(), rtol=2e-6, atol=2e-6)
            assert out[size] == 7.0


def test_a_scaled_sum_may_lie_where_its_first_term_did(library: str) -> None:
    for size in SIZES:
        with in_case(size):
            a, b = numbers(size, 1), numbers(size, 2)
            expected = a.double() + 0.22 * b.double()
            run(library, "add", a, b, Activation.NONE, 0.22, a)
            torch.testing.assert_close(a.double(), expected, rtol=1e-6, atol=1e-6)


def test_a_cap_is_never_passed(library: str) -> None:
    for size in SIZES:
        with in_case(size):
            a = numbers(size, 1) * torch.tensor([1.0, 1e4])[torch.arange(size) % 2]
            out = torch.empty(size)
            run(library, "cap", a, None, Activation.NONE, 30.0, out)
            torch.testing.assert_close(out.double(), 30 * (a.double() / 30).tanh(), rtol=2e-6, atol=2e-6)
            assert out.abs().max() <= 30


def test_a_sigmoid_ends_in_0_and_1(library: str) -> None:
    a, ones, out = torch.tensor([-200.0, -1.0, 0.0, 2.0, 200.0]), torch.ones(5), torch.empty(5)
    run(library, "gate", a, ones, Activation.SIGMOID, 0.0, out)
    torch.testing.assert_close(out.double(), 1 / (1 + (-a.double()).exp()), rtol=2e-6, atol=1e-30)
