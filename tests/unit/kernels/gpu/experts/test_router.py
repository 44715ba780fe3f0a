"""The router's choice on a GPU, against torch's own top-k and softmax."""

import pytest
import torch

from graphcore.kernels.gpu.experts.router import choose_decode_experts


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


def test_of_equal_scores_the_first_is_chosen() -> None:
    scores = torch.tensor([[0.0, 2.0, 1.0, 2.0, 2.0, 1.0]])
    assert choose_decode_experts(scores, None, 4)[0].tolist() == [[1, 3, 4, 2]]


def test_padding_chooses_nobody() -> None:
    chosen, _ = choose_decode_experts(torch.randn(3, 9), torch.tensor([1, 0, 1]), 2)
    assert chosen[1].tolist() == [-1, -1]
    assert (chosen[[0, 2]] >= 0).all()
