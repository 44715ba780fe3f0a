"""The likeliest token on the device: torch's, ties included, and what a row goes on with."""

import pytest
import torch
from choosing import STARTS, Flow, likeliest

from graphcore.kernels.gpu.sampling.likeliest import PART, choose_likeliest

pytestmark = pytest.mark.thorough

VOCABS = [1, 2, 31, 1000, PART, PART + 1, 5 * PART + 77]


def random_logits(rows: int, vocab: int) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 4


@pytest.mark.parametrize("vocab", VOCABS)
def test_the_choice_and_its_log_probability_are_those_of_torch(vocab: int) -> None:
    logits = random_logits(3, vocab)
    flow = likeliest(logits)
    expected = logits.argmax(dim=-1)
    assert torch.equal(flow.chosen, expected)
    assert torch.equal(flow.token_ids[:, 0], expected)
    assert torch.equal(flow.report[:, 0], expected.double())
    logprobs = logits.double().log_softmax(-1).gather(1, expected[:, None])[:, 0]
    torch.testing.assert_close(flow.report[:, 1], logprobs, rtol=1e-5, atol=1e-5)
    assert (flow.report[:, 2] == 0).all()


@pytest.mark.parametrize("places", [(3, 900), (0, PART), (PART - 1, PART), (PART + 5, 3 * PART), (7, 8)])
def test_of_equal_logits_the_first_is_chosen(places: tuple[int, int]) -> None:
    logits = random_logits(1, 4 * PART - 3)
    logits[0, list(places)] = 50.0
    assert int(likeliest(logits).chosen) == places[0] == int(logits.argmax())


def test_all_equal_and_extreme_logits_have_a_first() -> None:
    for value in (0.0, -0.0, 3.4e38, -3.4e38, 1e-45):
        assert int(likeliest(torch.full((1, 2 * PART), value)).chosen) == 0


def test_a_row_goes_on_until_its_end_token_or_its_last_token() -> None:
    logits = torch.full((5, 40), -1.0)
    for row, token in enumerate((4, 7, 9, 4, 4)):
        logits[row, token] = 3.0
    flow = Flow.of(5, counts=[1, 1, 1, 0, 1], left=[2, 9, 1, 9, 9], ends=[(9, 38), (7, 38), (4, 38), (4, 38), (7, 9)])
    choose_likeliest(logits, *flow.tensors())
    assert flow.counts.tolist() == [1, 0, 0, 0, 1]  # goes on, end token, last token, was not there, goes on
    assert flow.left.tolist() == [1, 8, 0, 9, 8]
    assert flow.starts.tolist() == [STARTS + 1, STARTS + 1, STARTS + 1, STARTS, STARTS + 1]
    assert flow.token_ids[:, 0].tolist() == [4, 7, 9, -7, 4]
    assert flow.chosen.tolist() == [4, 7, 9, -9, 4]  # each row has its own end tokens; one without a token chooses none
    assert flow.report[:, 0].tolist() == [4, 7, 9, -1, 4]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_not_finite_are_counted_and_the_token_is_one(bad: float) -> None:
    logits = random_logits(4, 2 * PART + 10)
    logits[1, 5] = bad
    logits[2, -1] = bad
    logits[3] = bad
    flow = Flow.of(4, counts=[1, 1, 1, 1])
    choose_likeliest(logits, *flow.tensors())
    assert flow.report[:, 2].tolist() == [0, 1, 1, logits.shape[1]]
    assert ((flow.chosen >= 0) & (flow.chosen < logits.shape[1])).all()


def test_what_a_row_without_a_token_holds_alarms_nobody() -> None:
    logits = torch.full((2, 30), float("nan"))
    logits[0] = 1.0
    flow = Flow.of(2, counts=[1, 0])
    choose_likeliest(logits, *flow.tensors())
    assert flow.report[:, 2].tolist() == [0, 0]
