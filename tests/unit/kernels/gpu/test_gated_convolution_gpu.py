"""A GPU's kernel of the gated short convolution against float64 (interpreted where there is no GPU)."""

from dataclasses import replace

import pytest
import torch
from convolution_cases import SHAPES, assert_true, convolution_case

from graphcore.kernels.gpu.gated_convolution import launch_gated_convolution

pytestmark = pytest.mark.thorough

PASSES = [([0, 5, 3], [1, 1, 0]), ([9, 0], [2, 16]), ([7, 0, 3], [20, 37, 0])]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("starts", "counts"), PASSES)
def test_the_kernel_computes_the_layer(name: str, dtype: torch.dtype, starts: list[int], counts: list[int]) -> None:
    case = convolution_case(name, starts, counts, dtype)
    before = case.copied()
    out = launch_gated_convolution(case.parts())
    assert_true(case, out, before, atol=1e-5, rtol=1e-5 if dtype is torch.float32 else 2**-7)


@pytest.mark.parametrize(("starts", "counts"), [([0, 3, 5], [0, 0, 1]), ([4, 0, 6], [0, 0, 20])])
def test_a_sequence_without_tokens_keeps_its_state(starts: list[int], counts: list[int]) -> None:
    case = convolution_case("biased", starts, counts)
    before = case.copied()
    launch_gated_convolution(case.parts())
    torch.testing.assert_close(case.convolution[:2], before.convolution[:2], rtol=0, atol=0, equal_nan=True)


def test_a_state_carries_from_one_pass_to_the_next() -> None:
    case = convolution_case("lfm2", [0], [40])
    before = case.copied()
    outs = []
    for first, end in ((0, 33), (33, 34), (34, 40)):
        part = replace(
            case, mixed=case.mixed[:, first:end], starts=torch.tensor([first]), counts=torch.tensor([end - first])
        )
        outs.append(launch_gated_convolution(part.parts()))
    assert_true(case, torch.cat(outs, dim=1), before, atol=1e-5, rtol=1e-5)


def test_a_convolution_wider_than_a_program_is_computed_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "wider", (8, 17, False))
    case = convolution_case("wider", [3], [12])
    before = case.copied()
    assert_true(case, launch_gated_convolution(case.parts()), before, atol=1e-5, rtol=1e-5)
