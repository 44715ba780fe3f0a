"""Both implementations of the mixture of experts, against a loop over tokens in float64; the op as torch sees it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product as every_pair

import pytest
import torch
from support.cases import in_case
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from graphcore.activations import CLAMPED_SWIGLU, SILU, Gating
from graphcore.kernels.ops import experts as kernel
from graphcore.kernels.ops.experts import experts, looped_experts, masked_experts

OP = torch.ops.graphcore.experts.default
IMPLEMENTATIONS = {"looped": looped_experts, "masked": masked_experts, "op": experts}
DIM, HIDDEN, EXPERTS, TOP_K = 12, 20, 7, 3
SWIGLU = Gating(CLAMPED_SWIGLU, 0.9, 1.3)  # with biases here, as in gpt-oss; SILU without, as in Qwen
Implementation = Callable[..., Tensor]
# float32: sums of 20 products; narrow ones: four roundings of numbers up to 4
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 6e-2, torch.float16: 8e-3}

every_gating = pytest.mark.parametrize("gating", [SWIGLU, SILU], ids=["clamped", "silu"])
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)


@dataclass(frozen=True)
class Case:
    """Some tokens, who was chosen for them, and the experts."""

    x: Tensor
    chosen: Tensor
    weights: list[Tensor]
    biases: list[Tensor]
    gating: Gating

    @property
    def arguments(self) -> tuple[object, ...]:
        return self.x, self.chosen, self.weights, self.biases, self.gating


def case_of(tokens: int, dtype: torch.dtype = torch.float32, gating: Gating = SWIGLU) -> Case:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    weights = [randn(EXPERTS, HIDDEN, DIM) / 3, randn(EXPERTS, HIDDEN, DIM) / 3, randn(EXPERTS, DIM, HIDDEN) / 3]
    biases = [randn(EXPERTS, HIDDEN), randn(EXPERTS, HIDDEN), randn(EXPERTS, DIM)]
    chosen = randn(tokens, EXPERTS).topk(TOP_K).indices
    return Case(randn(tokens, DIM), chosen, weights, biases if gating == SWIGLU else [], gating)


def expected_of(case: Case) -> Tensor:
    """Return what the chosen experts answer, token by token: [N, C, D] float64; zeros for nobody."""
    out = torch.zeros(*case.chosen.shape, DIM, dtype=torch.float64)
    gate_w, up_w, down_w = (weight.double() for weight in case.weights)
    gate_b, up_b, down_b = (bias.double() for bias in case.biases or [torch.zeros(EXPERTS, 1)] * 3)
    for token, x in enumerate(case.x.double()):
        for rank, expert in enumerate(case.chosen[token].tolist()):
            if expert < 0:
                continue
            gate, up = gate_w[expert] @ x + gate_b[expert], up_w[expert] @ x + up_b[expert]
            if case.gating == SWIGLU:
                gate, up = gate.clamp(max=SWIGLU.limit), up.clamp(-SWIGLU.limit, SWIGLU.limit)
                hidden = (up + 1) * gate / (1 + torch.exp(-SWIGLU.alpha * gate))
            else:
                hidden = up * gate / (1 + torch.exp(-gate))
            out[token, rank] = down_w[expert] @ hidden + down_b[expert]
    return out


@every_implementation
@every_gating
def test_tokens_go_through_their_experts_as_in_a_plain_loop(implementation: Implementation, gating: Gating) -> None:
    for dtype, tokens in every_pair(CLOSE, [1, 2, 3, 40]):
        with in_case(dtype, tokens):
            case = case_of(tokens, dtype, gating)
            found = implementation(*case.arguments)
            assert (found.shape, found.dtype) == ((tokens, TOP_K, DIM), dtype)
            assert (found.double() - expected_of(case)).abs().max() < CLOSE[dtype]


def test_limits_bind_in_these_cases_and_experts_are_not_chosen_evenly() -> None:
    case = case_of(40)
    gate = torch.einsum("nd,xfd->nxf", case.x, case.weights[0]) + case.biases[0]
    assert (gate > SWIGLU.limit).float().mean() > 0.1
    assert (gate < -SWIGLU.limit).float().mean() > 0.1  # where up would be clamped and gate is not
    assert case.chosen.flatten().bincount().unique().numel() > 2


@every_implementation
@pytest.mark.parametrize("tokens", [1, 2, 30])
def test_experts_that_nobody_chose_may_hold_anything(implementation: Implementation, tokens: int) -> None:
    case = case_of(tokens)
    case.chosen.copy_(torch.tensor([5, 0, 3]).expand(tokens, -1))
    expected = expected_of(case)
    for tensor in (*case.weights, *case.biases):
        tensor[[1, 2, 4, 6]] = float("nan")
    found = implementation(*case.arguments)
    assert (found.double() - expected).abs().max() < 1e-5


def test_on_the_cpu_no_weight_of_an_expert_that_nobody_chose_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(4)
    case.chosen.copy_(torch.tensor([[5, 0, 3], [3, 0, 5], [0, 3, 2], [2, 3, 5]]))
    read: list[int] = []

    def watched(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        read.append(weight.data_ptr())
        return torch.nn.functional.linear(x, weight, bias)

    monkeypatch.setattr(kernel, "linear", watched)
    experts(*case.arguments)  # type: ignore[arg-type]
    assert sorted(read) == sorted(weight[expert].data_ptr() for weight in case.weights for expert in (0, 2, 3, 5))


@every_implementation
def test_no_tokens_give_no_rows(implementation: Implementation) -> None:
    case = case_of(2)
    empty = Case(case.x[:0], case.chosen[:0], case.weights, case.biases, case.gating)
    assert implementation(*empty.arguments).shape == (0, TOP_K, DIM)


def placed(case: Case, order: Sequence[int], num_places: int) -> tuple[Case, list[int]]:
    """Return the case with expert order[p] at place p and NaN everywhere else, and the places."""
    weights = [torch.full((num_places, *weight.shape[1:]), float("nan"), dtype=weight.dtype) for weight in case.weights]
    places = [-1] * EXPERTS
    for place, expert in enumerate(order):
        places[expert] = place
        for ours, theirs in zip(weights, case.weights, strict=True):
            ours[place] = theirs[expert]
    return replace(case, weights=weights), places


@every_implementation
def test_an_expert_gives_the_same_bits_wherever_it_lies(implementation: Implementation) -> None:
    """Float32 gate matrices are whole cache lines; the others begin anywhere."""
    for dtype, tokens in every_pair(CLOSE, [1, 2, 40]):
        with in_case(dtype, tokens):
            case = case_of(tokens, dtype)
            expected = implementation(*case.arguments)
            for order, num_places in (([6, 5, 4, 3, 2, 1, 0], 7), ([3, 1, 0, 6, 2, 4, 5], 11)):
                moved, places = placed(case, order, num_places)
                assert torch.equal(implementation(*moved.arguments, places), expected)


def test_products_are_given_aligned_matrices_whatever_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bf16 matrix here is seven and a half cache lines, so every other one begins within a line."""
    case = case_of(4, torch.bfloat16)
    assert case.weights[0][1].data_ptr() % 64
    addresses: list[int] = []

    def watched(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        addresses.append(weight.data_ptr())
        return torch.nn.functional.linear(x, weight, bias)

    monkeypatch.setattr(kernel, "linear", watched)
    experts(*case.arguments)  # type: ignore[arg-type]
    assert len(addresses) > 6
    assert not any(address % 64 for address in addresses)


@every_implementation
@every_gating
def test_some_experts_at_a_time_give_the_bits_of_all_at_once(implementation: Implementation, gating: Gating) -> None:
    for tokens, waves in every_pair([1, 2, 40], [[[0, 1, 2, 3, 4, 5], [6]], [[2, 6], [5, 1], [0, 4], [3]]]):
        with in_case(tokens, waves):
            case = case_of(tokens, gating=gating)
            expected = implementation(*case.arguments)
            found = torch.zeros_like(expected)
            for wave in waves:
                some, places = placed(case, wave, len(wave))
                answers = implementation(*some.arguments, places)
                is_here = torch.isin(case.chosen, torch.tensor(wave))
                assert not answers[~is_here].any()
                found[is_here] = answers[is_here]
            assert torch.equal(found, expected)


@every_implementation
@every_gating
def test_nobody_answers_zeros_and_changes_no_other_answer(implementation: Implementation, gating: Gating) -> None:
    for tokens in [2, 20]:
        with in_case(tokens):
            case = case_of(tokens, gating=gating)
            case.chosen[tokens // 2 :] = -1
            found = implementation(*case.arguments)
            assert not found[tokens // 2 :].any()
            assert (found.double() - expected_of(case)).abs().max() < 1e-5


@every_implementation
def test_weights_may_be_views_of_something_larger(implementation: Implementation) -> None:
    case = case_of(5)
    wide = [torch.cat((weight, weight + 1), dim=-1)[..., : weight.shape[-1]] for weight in case.weights]
    assert not wide[0].is_contiguous()
    found = implementation(case.x, case.chosen, wide, case.biases, case.gating)
    assert (found.double() - expected_of(case)).abs().max() < 1e-5


def test_op_on_the_cpu_is_the_looped_implementation() -> None:
    case = case_of(9)
    assert torch.equal(experts(*case.arguments), looped_experts(*case.arguments))  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [1, 9])
@every_gating
def test_opcheck_finds_schema_and_fake_true_to_the_op(tokens: int, gating: Gating) -> None:
    arguments = case_of(tokens, gating=gating).arguments
    torch.library.opcheck(OP, (*arguments[:4], *gating), test_utils=("test_schema", "test_faketensor"))


@every_implementation
def test_fake_has_the_shape_strides_and_dtype_of_the_real_result(implementation: Implementation) -> None:
    case = case_of(4, torch.bfloat16)
    strided = case.x.T.contiguous().T
    real = implementation(strided, *case.arguments[1:])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = experts(mode.from_tensor(strided), *case.arguments[1:])
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
