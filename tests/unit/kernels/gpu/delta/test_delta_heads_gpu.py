"""A GPU's kernels of Gated DeltaNet against float64 (interpreted where there is no GPU)."""

from dataclasses import replace

import pytest
import torch
from delta_cases import SHAPES, SMALL, DeltaShape, assert_true, delta_case

from graphcore.kernels.gpu.delta.launch import launch_delta_heads

pytestmark = pytest.mark.thorough

ONE_TOKEN = ([0, 5, 3], [1, 1, 0])
MANY, LONG = ([9, 0], [2, 16]), ([7, 0, 3], [20, 65, 0])


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*((shape, torch.float32) for shape in SHAPES.values()), (SHAPES["qwen"], torch.bfloat16)],
    ids=[*SHAPES, "qwen-bf16"],
)
@pytest.mark.parametrize(("starts", "counts"), [ONE_TOKEN, MANY, pytest.param(*LONG, marks=pytest.mark.thorough)])
def test_kernels_compute_the_layer(shape: DeltaShape, starts: list[int], counts: list[int], dtype: torch.dtype) -> None:
    case = delta_case(shape, starts, counts, dtype)
    before = case.copied()
    out = launch_delta_heads(case.parts())
    if dtype is torch.float32:
        return assert_true(case, out, before, atol=2e-5, rtol=1e-5)
    # on a GPU the products of 16-bit models round to 10 bits
    return assert_true(case, out, before, atol=2e-2 if torch.cuda.is_available() else 1e-3, rtol=2**-8)


@pytest.mark.parametrize(("starts", "counts"), [([0, 3, 5], [0, 0, 1]), ([4, 0, 6], [0, 0, 20])])
def test_a_sequence_without_tokens_keeps_its_states(starts: list[int], counts: list[int]) -> None:
    case = delta_case(SMALL, starts, counts)
    before = case.copied()
    launch_delta_heads(case.parts())
    for state, old in ((case.convolution, before.convolution), (case.recurrent, before.recurrent)):
        torch.testing.assert_close(state[:2], old[:2], rtol=0, atol=0, equal_nan=True)  # a new sequence's holds NaN


def test_answers_to_padding_are_zeros_in_a_chunk() -> None:
    case = delta_case(SMALL, [7, 0], [20, 3])
    assert not launch_delta_heads(case.parts())[1, 3:].any()


def test_states_carry_from_one_chunk_to_the_next() -> None:
    case = delta_case(SMALL, [0], [40])
    before = case.copied()
    outs = []
    for first, end in ((0, 33), (33, 34), (34, 40)):
        inputs = {name: getattr(case, name)[:, first:end] for name in ("mixed", "z", "a", "b")}
        part = replace(case, **inputs, starts=torch.tensor([first]), counts=torch.tensor([end - first]))
        outs.append(launch_delta_heads(part.parts()))
    assert_true(case, torch.cat(outs, dim=1), before, atol=2e-5, rtol=1e-5)
