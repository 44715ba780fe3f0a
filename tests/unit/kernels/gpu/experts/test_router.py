"""The router's choice on a GPU, against torch's own top-k and softmax."""

import pytest
import torch
from arrivals import orders_of_arrival
from torch import Tensor

from graphcore.kernels.gpu.experts.router import choose_decode_experts, route_decode_experts
from graphcore.kernels.gpu.products import dense
from graphcore.nn.moe import choose_experts
from graphcore.routing import ScoredRouting

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize(("tokens", "num_experts", "top_k"), [(1, 32, 4), (3, 128, 4), (2, 7, 3), (8, 5, 5), (1, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("over_all", [False, True], ids=["chosen", "all"])
def test_the_best_are_chosen_in_order_with_their_shares(
    tokens: int, num_experts: int, top_k: int, dtype: torch.dtype, over_all: bool
) -> None:
    scores = torch.stack([torch.randperm(num_experts) for _ in range(tokens)]).to(dtype) / 4 - 3  # all different
    chosen, shares = choose_decode_experts(scores, None, top_k, over_all)
    best, expected = scores.topk(top_k, dim=-1)
    assert torch.equal(chosen, expected)
    assert (chosen.dtype, shares.dtype) == (torch.int64, dtype)
    tolerance = 1e-6 if dtype is torch.float32 else 2**-7  # the interpreter cuts bits off where a GPU rounds
    whole = scores.double().softmax(-1).gather(-1, expected)
    softmax = whole if over_all else best.double().softmax(-1)
    torch.testing.assert_close(shares.double(), softmax, rtol=tolerance, atol=0)


ROUTINGS = {
    "sigmoid": (12, 4, ScoredRouting("sigmoid", factor=2.5)),
    "not_normalised": (7, 3, ScoredRouting("sigmoid", normalises=False)),
    "softmax": (16, 2, ScoredRouting("softmax", eps=0.25)),
    "groups": (32, 5, ScoredRouting("sigmoid", groups=8, used_groups=3)),
    "odd_groups": (21, 4, ScoredRouting("sigmoid", groups=7, used_groups=2, factor=0.5)),
    "one_group": (12, 3, ScoredRouting("softmax", groups=4, used_groups=1)),
}


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("has_bias", [False, True], ids=["unbiased", "biased"])
def test_experts_with_scores_of_their_own_are_chosen_as_on_the_cpu(name: str, has_bias: bool) -> None:
    num_experts, top_k, routing = ROUTINGS[name]
    generator = torch.Generator().manual_seed(num_experts)
    scores = torch.randn(6, num_experts, generator=generator)
    bias = torch.randn(num_experts, generator=generator) if has_bias else None
    expected, weights = choose_experts(scores, top_k, routing, None, bias)
    chosen, shares = choose_decode_experts(scores, None, top_k, False, routing, bias)
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(shares, weights, rtol=2e-6, atol=0)
    eye = torch.eye(num_experts)
    found = route_decode_experts(scores, eye, None, None, top_k, False, None, routing, bias)
    assert torch.equal(found[0], expected)
    torch.testing.assert_close(found[1], weights, rtol=2e-6, atol=0)


@pytest.mark.parametrize("tokens", [1, 3])
def test_scores_in_float32_choose_between_experts_that_bf16_rounds_to_one_score(tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 64, generator=generator).bfloat16()
    weight = (torch.randn(1, 64, generator=generator) + 0.02 * torch.randn(48, 64, generator=generator)).bfloat16()
    routing = ScoredRouting("sigmoid", normalises=False)
    expected, weights = choose_experts(x.float() @ weight.float().T, 6, routing)
    chosen, shares = route_decode_experts(x, weight, None, None, 6, False, None, routing, None, True)
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(shares, weights, rtol=2e-6, atol=0)
    rounded = route_decode_experts(x, weight, None, None, 6, False, None, routing, None)
    assert not torch.equal(rounded[0], expected)
    assert rounded[1].dtype is torch.bfloat16


def test_of_equal_scores_the_first_is_chosen() -> None:
    scores = torch.tensor([[0.0, 2.0, 1.0, 2.0, 2.0, 1.0]])
    assert choose_decode_experts(scores, None, 4, False)[0].tolist() == [[1, 3, 4, 2]]


def test_padding_chooses_nobody() -> None:
    chosen, _ = choose_decode_experts(torch.randn(3, 9), torch.tensor([1, 0, 1]), 2, False)
    assert chosen[1].tolist() == [-1, -1]
    assert (chosen[[0, 2]] >= 0).all()


def routed(tokens: int, dtype: torch.dtype, num_experts: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return x [N, D], a router [X, D] and its bias [X]: small whole numbers, so that every sum is exact."""
    generator = torch.Generator().manual_seed(tokens)

    def whole(*shape: int) -> Tensor:
        return torch.randint(-3, 4, shape, generator=generator).to(dtype)

    return whole(tokens, dim), whole(num_experts, dim), whole(num_experts) / 8


@pytest.mark.parametrize(
    ("tokens", "num_experts", "dim"), [(1, 32, 64), (2, 7, 30), (3, 40, 64), (8, 5, 16), (2, 9, 7)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_launch_chooses_as_the_router_s_product_and_the_choice_do(
    tokens: int, num_experts: int, dim: int, dtype: torch.dtype
) -> None:
    x, weight, bias = routed(tokens, dtype, num_experts, dim)
    counts, arrivals = torch.ones(tokens, dtype=torch.int64), torch.zeros(3, dtype=torch.int32)
    scores = (x.double() @ weight.double().T + bias.double()).to(dtype)
    for over_all in (False, True, True):  # as a captured graph does, with what the launch before left
        expected = choose_decode_experts(scores, None, 4, over_all)
        found = route_decode_experts(x, weight, bias, counts, 4, over_all, arrivals)
        assert all(map(torch.equal, found, expected))
        assert not arrivals.any()
    counts[-1] = 0
    chosen, _ = route_decode_experts(x, weight, None, counts, 4, False)
    assert chosen[-1].tolist() == [-1] * 4
    assert torch.equal(
        chosen[:-1], choose_decode_experts((x.double() @ weight.double().T).to(dtype), None, 4, False)[0][:-1]
    )


def test_whichever_program_of_the_router_is_last_the_choice_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = routed(2, torch.bfloat16, 12, 32)
    monkeypatch.setattr(dense, "ROWS", 2)
    arrivals = torch.zeros(1, dtype=torch.int32)
    expected = route_decode_experts(x, weight, bias, None, 3, False, arrivals=arrivals)
    for _ in orders_of_arrival(monkeypatch):
        found = route_decode_experts(x, weight, bias, None, 3, False, arrivals=arrivals)
        assert all(map(torch.equal, found, expected))
        assert not arrivals.any()
