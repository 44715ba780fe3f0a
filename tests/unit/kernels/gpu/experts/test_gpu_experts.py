"""The GPU's experts in Triton's interpreter, against a loop over tokens in float64."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from arrivals import orders_of_arrival
from mixture_cases import Case, answers_of, dense_case, poisoned
from torch import Tensor

from graphcore.kernels.gpu.experts import few_tokens
from graphcore.kernels.gpu.experts import launch as gpu
from graphcore.kernels.gpu.experts.few_tokens import launch_few, launch_few_summed, launch_gate_up
from graphcore.kernels.gpu.experts.grouped import grouped, launch_many
from graphcore.kernels.gpu.experts.operands import MixtureOperands
from graphcore.kernels.ops.experts import looped_experts
from graphcore.nn.moe import weighted_sum

pytestmark = pytest.mark.thorough

Launch = Callable[[Tensor, Tensor, MixtureOperands], Tensor]
LAUNCHES = {"few": launch_few, "many": launch_many}
# Of sums of 24 products of numbers below 4: float32's own error; narrow ones round the hidden features and the answer.
CLOSE = {torch.float32: 3e-6, torch.bfloat16: 5e-2, torch.float16: 6e-3}

either = pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Have what a kernel leaves out be NaN: torch fills new memory with it where algorithms are to be deterministic."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def check(case: Case, launch: Launch, places: list[int] | None = None) -> Tensor:
    found = launch(case.x, case.chosen, case.mixture(places))
    expected = answers_of(case)
    assert (found.shape, found.dtype) == (expected.shape, case.x.dtype)
    assert (found.double() - expected).abs().max() < CLOSE[case.x.dtype]
    return found


@either
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("tokens", [1, 3])
def test_tokens_go_through_their_experts_as_in_a_plain_loop(launch: Launch, tokens: int, dtype: torch.dtype) -> None:
    check(dense_case(tokens, dtype), launch)


@either
@pytest.mark.parametrize(("dtype", "activation"), [*((dtype, "silu") for dtype in CLOSE), (torch.float32, "gelu")])
def test_experts_without_biases_have_an_activation_of_the_gate(
    launch: Launch, dtype: torch.dtype, activation: str
) -> None:
    check(dense_case(2, dtype).without_biases(activation), launch)
    some = dense_case(2, dtype).without_biases(activation).choosing([[5, 0, 3], [-1, 3, 0]])
    check(poisoned(some, {0, 3, 5}), launch)


@either
@pytest.mark.parametrize(("dim", "hidden"), [(7, 5), (64, 33), (530, 3), (16, 66)])
def test_widths_may_be_anything(launch: Launch, dim: int, hidden: int) -> None:
    case = dense_case(1, torch.float32, dim, hidden, experts=3, top_k=1)
    found = launch(case.x, case.chosen, case.mixture())
    assert (found.double() - answers_of(case)).abs().max() < 1e-4  # longer sums, larger numbers


@either
@pytest.mark.parametrize(
    "chosen",
    [[[5, 0, 3]] * 2, [[-1, -1, -1]] * 2, [[2, -1, 4], [-1, -1, 2]], [[0, 1, 2], [3, 4, 5]]],
    ids=["the same", "nobody", "some", "all"],
)
def test_anybody_or_nobody_may_be_chosen_and_others_are_not_read(launch: Launch, chosen: list[list[int]]) -> None:
    case = dense_case(len(chosen), torch.float32).choosing(chosen)
    assert torch.equal(
        check(poisoned(case, {one for row in chosen for one in row}), launch),
        launch(case.x, case.chosen, case.mixture()),
    )


@either
def test_an_expert_gives_the_same_bits_wherever_it_lies_and_zeros_where_it_does_not(launch: Launch) -> None:
    case = dense_case(2, torch.bfloat16).choosing([[5, 1, 3], [0, -1, 2]])
    whole = launch(case.x, case.chosen, case.mixture())
    places = [4, -1, 0, 7, -1, 1]
    moved = [torch.full((8, *one.shape[1:]), float("nan"), dtype=one.dtype) for one in case.weights]
    for expert, place in enumerate(places):
        if place >= 0:
            for ours, theirs in zip(moved, case.weights, strict=True):
                ours[place] = theirs[expert]
    mixture = case.mixture(places)._replace(weights=moved)
    is_here = torch.tensor(places)[case.chosen] >= 0
    is_here &= case.chosen >= 0
    assert torch.equal(launch(case.x, case.chosen, mixture), torch.where(is_here[..., None], whole, 0))


def test_the_matrices_of_an_expert_that_is_not_there_are_not_read() -> None:
    """What would be read lies before the first place, in somebody else's memory; a program that read it would write."""
    case = dense_case(2, torch.float32).choosing([[5, 1, 3], [0, -1, 2]])
    hidden = torch.full((6, 12), float("nan"))
    launch_gate_up(case.x, case.chosen, case.mixture([4, -1, 0, 3, -1, 1]), hidden)
    assert hidden.isnan().all(1).tolist() == [False, True, False, False, True, False]
    assert hidden.isnan().any(1).tolist() == [False, True, False, False, True, False]


@pytest.mark.parametrize("tokens", [9, 50])
def test_many_tokens_fill_tiles_and_begin_new_ones(tokens: int) -> None:
    """Fifty tokens of three choices among three experts: four tiles of 64 for 50 pairs each would be three, not one."""
    case = dense_case(tokens, torch.bfloat16, experts=3, top_k=2)
    case.chosen[tokens // 2] = -1
    check(case, launch_many)
    few = dense_case(tokens, torch.float32, experts=5, top_k=1).choosing([[4]] * tokens)
    check(poisoned(few, {4}), launch_many)


def test_pairs_are_grouped_without_reading_anything_back() -> None:
    chosen = torch.tensor([[2, 0], [-1, 2], [0, 3], [2, 1]])
    groups = grouped(chosen, 5, None)
    assert groups.counts.tolist() == [2, 1, 3, 1, 0]
    assert groups.order.tolist() == [1, 4, 7, 0, 3, 6, 5, 2]
    some = grouped(chosen, 5, torch.tensor([0, -1, 1, -1, -1]))
    assert some.counts.tolist() == [2, 0, 3, 0, 0]
    assert some.order.tolist()[:5] == [1, 4, 0, 3, 6]


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("is_plain", [False, True], ids=["clamped", "silu"])
def test_the_stream_takes_the_weighted_sum_to_the_bit(dtype: torch.dtype, is_plain: bool) -> None:
    """So that a step whose experts are fetched gives the bits of one that finds them all."""
    case = dense_case(2, dtype).without_biases() if is_plain else dense_case(2, dtype)
    case.chosen[-1, 1] = -1
    shares = torch.rand(2, 3).softmax(-1).to(dtype)
    stream = torch.randn(2, case.x.shape[1])
    mixture = case.mixture()
    expected = stream.double() + (answers_of(case) * shares.double()[..., None]).sum(1)
    apart = stream + weighted_sum(launch_few(case.x, case.chosen, mixture), shares)
    how = case.weights, case.biases, None, case.hidden, case.gating, case.formats
    gpu.add_expert_answers(stream, case.x, case.chosen, shares, *how)
    assert torch.equal(stream, apart)
    assert (stream.double() - expected).abs().max() < CLOSE[dtype]


def summed(case: Case, shares: Tensor, places: list[int] | None = None, arrivals: Tensor | None = None) -> Tensor:
    """Return a stream of ones after the experts' answers were added to it."""
    stream = torch.ones(case.x.shape)
    launch_few_summed(stream, case.x, case.chosen, shares, case.mixture(places), arrivals)
    return stream


def test_whichever_choice_is_last_the_stream_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two large answers take each other away, and the one between them is lost: in another order it would stay."""
    case = dense_case(2, torch.bfloat16).choosing([[5, 1, 3], [0, -1, 2]])
    case.biases[2][5], case.biases[2][3] = 2.0**30, -(2.0**30)
    shares = torch.tensor([[0.25, 0.5, 0.25], [0.5, 0.25, 0.25]], dtype=torch.bfloat16)
    places = [4, 3, 2, -1, 1, 5]
    arrivals = torch.zeros(few_tokens.most_arrivals(torch.device("cpu")), dtype=torch.int32)
    whole, some = summed(case, shares, arrivals=arrivals), summed(case, shares, places)
    turned = torch.tensor([2, 0, 1])
    other = summed(replace(case, chosen=case.chosen[:, turned]), shares[:, turned].contiguous())
    assert not torch.equal(whole, other)
    for _ in orders_of_arrival(monkeypatch):
        assert torch.equal(summed(case, shares, arrivals=arrivals), whole)
        assert not arrivals.any()
        assert torch.equal(summed(case, shares, places), some)


@pytest.mark.parametrize("warps", [0, 40])
def test_blocks_of_many_steps_give_the_bits_of_single_steps(warps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No warps: one program for each token and choice. Forty of one processor: two steps, the last block has one."""
    case = dense_case(2, torch.bfloat16, dim=28, hidden=20).choosing([[5, 1, 3], [0, -1, 2]])
    shares = torch.rand(2, 3).softmax(-1).bfloat16()
    expected, answers = summed(case, shares), launch_few(case.x, case.chosen, case.mixture())
    monkeypatch.setattr(few_tokens, "RESIDENT_WARPS", warps)
    monkeypatch.setattr(few_tokens, "processors_of", lambda _device: 3)
    assert torch.equal(summed(case, shares), expected)
    assert torch.equal(launch_few(case.x, case.chosen, case.mixture()), answers)


@pytest.mark.parametrize("choices", [1, 2, 4])
@pytest.mark.parametrize("warps", [1, 4])
def test_no_launch_takes_more_counters_than_are_kept(choices: int, warps: int) -> None:
    for tokens in range(1, 9):
        for rows in (4, 100, 2880, 8192, 65536):
            _, blocks = few_tokens.program_blocks(rows, 4, tokens * choices, warps, torch.device("cpu"))
            assert tokens * blocks <= few_tokens.most_arrivals(torch.device("cpu"))


@pytest.mark.parametrize("tokens", [2, 20])
def test_the_op_on_a_gpu_agrees_with_the_one_on_the_cpu(tokens: int) -> None:
    case = dense_case(tokens, torch.float32)
    arguments = case.x, case.chosen, case.weights, case.biases, case.gating
    for places in (None, [0, 1, 2, -1, 4, 5]):
        found = gpu.launch_experts(*arguments, places)
        torch.testing.assert_close(found, looped_experts(*arguments, places), rtol=1e-5, atol=1e-5)


def test_no_tokens_give_no_rows() -> None:
    case = dense_case(2, torch.float32)
    assert launch_few(case.x[:0], case.chosen[:0], case.mixture()).shape == (0, 3, 24)


def test_views_of_something_larger_are_read_rightly() -> None:
    case = dense_case(2, torch.float32)
    wide = [torch.cat((weight, weight + 1), dim=-1)[..., : weight.shape[-1]] for weight in case.weights]
    found = gpu.launch_experts(case.x, case.chosen, wide, case.biases, case.gating)
    assert (found.double() - answers_of(case)).abs().max() < 3e-6
