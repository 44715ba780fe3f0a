"""Drawing on the device keeps the tokens that engine/sampler.py keeps, ties included, and draws fairly."""

from dataclasses import replace

import pytest
import torch
from choosing import drawn
from torch import Tensor

from graphcore.engine.sampler import Sampler, SamplingParams, narrow, penalise
from graphcore.kernels.gpu.sampling.likeliest import PART

CPU = torch.device("cpu")
WARM = SamplingParams(temperature=0.8)
CUTS = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10_000_000},
    {"top_p": 0.01},
    {"top_p": 0.5},
    {"top_p": 0.999},
    {"min_p": 0.3},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.1},
    {},
]


def logits_of(rows: int, vocab: int, seed: int = 0) -> Tensor:
    """Return [rows, vocab] logits from nearly flat to nearly certain, and in the last row few different values."""
    generator = torch.Generator().manual_seed(seed * 1000 + vocab)
    logits = torch.randn(rows, vocab, generator=generator) * torch.linspace(0.1, 9.0, rows)[:, None]
    logits[-1] = (logits[-1] / 4).round()
    return logits


def last_kept(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Return the least likely token that stays, the last of several, and noise with which a draw finds it."""
    warm = logits / params.temperature
    rank = torch.argsort(torch.argsort(warm, dim=-1, descending=True, stable=True), dim=-1)
    kept = ~narrow(warm, params).isinf()
    likelihood = (warm - warm.amax(-1, keepdim=True)).exp()
    noise = torch.where(likelihood > 0, likelihood / (1 + rank), 1.0)
    return torch.where(kept, rank, -1).argmax(-1), noise


@pytest.mark.parametrize(
    ("cuts", "vocab"),
    [
        *((cuts, 50) for cuts in CUTS),
        *((cuts, 2 * PART - 100) for cuts in ({"top_p": 0.5}, {"top_k": 20, "top_p": 0.8})),
    ],
    ids=str,
)
def test_the_tokens_that_stay_are_those_of_the_sampler(cuts: dict[str, float], vocab: int) -> None:
    params = replace(WARM, **cuts)
    logits = logits_of(3, vocab)
    expected, noise = last_kept(logits, params)
    assert torch.equal(drawn(logits, params, noise).chosen, expected)


@pytest.mark.parametrize(
    ("values", "cuts", "kept"),
    [
        ([1.0] * 8, {"top_p": 0.5}, [0, 1, 2, 3]),
        ([1.0] * 8, {"top_k": 3}, list(range(8))),
        ([0.0, -0.0, 0.0, -0.0], {"top_k": 1}, [0, 1, 2, 3]),
        ([2.0, 3.0, 2.0, 2.0], {"top_k": 2}, [0, 1, 2, 3]),
        ([2.0, 3.0, 2.0, 2.0], {"top_p": 0.5}, [0, 1]),  # 3 has 0.475, each 2 has 0.175
        ([2.0, 3.0, 2.0, 2.0], {"top_k": 1, "top_p": 0.9}, [1]),
        ([-5.0, -3.0, -4.0], {"top_k": 2}, [1, 2]),
        ([100.0, -100.0, 99.0], {"min_p": 0.3}, [0, 2]),
        ([3e38, -3e38, 1.0], {"top_p": 0.9}, [0]),
    ],
)
def test_ties_and_extremes(values: list[float], cuts: dict[str, float], kept: list[int]) -> None:
    params = replace(SamplingParams(temperature=1.0), **cuts)
    logits = torch.tensor([values])
    assert (~narrow(logits, params).isinf()).nonzero()[:, 1].tolist() == kept  # the sampler says the same
    rows = logits.expand(len(values), -1).contiguous()
    noise = torch.full(rows.shape, 1e30).fill_diagonal_(1e-30)  # each row asks for one token
    likelihood = (rows - rows.amax(-1, keepdim=True)).exp()
    found = [row for row, token in enumerate(drawn(rows, params, noise).chosen.tolist()) if token == row]
    assert found == [token for token in kept if likelihood[0, token] > 0]


def test_a_share_that_is_one_in_float32_cuts_nothing() -> None:
    logits = logits_of(1, 50)
    noise = torch.ones(1, 50)
    noise[0, int(logits.argmin())] = 1e-30
    assert drawn(logits, replace(WARM, top_p=0.9999999999), noise).chosen == logits.argmin()


def test_a_tie_over_the_parts_of_the_vocabulary_ends_in_the_right_one() -> None:
    logits = torch.zeros(1, 2 * PART + 9)
    logits[0, 3] = -1.0
    params = SamplingParams(temperature=1.0, top_p=0.7)
    expected, noise = last_kept(logits, params)
    assert PART < int(expected) < 2 * PART
    assert torch.equal(drawn(logits, params, noise).chosen, expected)


@pytest.mark.parametrize("params", [WARM, replace(WARM, top_k=40, top_p=0.9, repetition_penalty=1.4)], ids=str)
def test_tokens_are_those_of_the_sampler_with_the_same_generators(params: SamplingParams) -> None:
    logits, history = logits_of(3, 700, seed=1), [[1, 2, 3], [], [699, 4]]  # the sampler draws by torch.multinomial
    sampler = Sampler(params, history, 700, CPU)
    generators = [torch.Generator().manual_seed(params.seed + row) for row in range(3)]
    seen = torch.zeros(3, 700, dtype=torch.uint8)
    for row, ids in enumerate(history):
        seen[row, ids] = 1
    for _ in range(3):
        noise = torch.stack([torch.empty(700).exponential_(generator=generator) for generator in generators])
        flow = drawn(logits, params, noise, seen)
        assert torch.equal(flow.chosen, sampler.choose(logits))
        assert seen.gather(1, flow.chosen[:, None]).all()


def test_a_penalty_without_temperature_takes_the_likeliest_that_is_left() -> None:
    logits, params = logits_of(3, 1500), SamplingParams(repetition_penalty=1.5)
    seen = torch.zeros(logits.shape, dtype=torch.uint8)
    for _ in range(4):
        expected = torch.where(seen.bool(), penalise(logits, 1.5), logits).argmax(-1)
        flow = drawn(logits, params, torch.full(logits.shape, float("nan")), seen)
        assert torch.equal(flow.chosen, expected)
        logprobs = logits.double().log_softmax(-1).gather(1, expected[:, None])[:, 0]
        torch.testing.assert_close(flow.report[:, 1], logprobs, rtol=1e-5, atol=1e-5)


def test_draws_follow_the_probabilities() -> None:
    """Chi-square over 4 tokens that min-p keeps: 3 degrees of freedom, 16.27 is passed once in a thousand."""
    row = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])
    params, rows, repeats = SamplingParams(temperature=1.5, min_p=0.2), 75, 2
    expected = torch.softmax(row[:4].double() / 1.5, dim=-1)
    generator = torch.Generator().manual_seed(5)
    counts = torch.zeros(6)
    for _ in range(repeats):
        noise = torch.empty(rows, 6).exponential_(generator=generator)
        counts += torch.bincount(drawn(row.expand(rows, -1).contiguous(), params, noise).chosen, minlength=6)
    assert counts[4:].sum() == 0
    wanted = expected * rows * repeats
    assert ((counts[:4] - wanted) ** 2 / wanted).sum() < 16.27
