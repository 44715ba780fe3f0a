"""The sampler cuts and penalises as transformers' logits processors do, and draws what the probabilities say."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from graphcore.engine.sampler import Sampler, SamplingParams, narrow, penalise

CPU = torch.device("cpu")
VOCAB = 50
CUTS = [
    SamplingParams(top_k=1),
    SamplingParams(top_k=7),
    SamplingParams(top_k=VOCAB),
    SamplingParams(top_k=10 * VOCAB),
    SamplingParams(top_p=0.01),
    SamplingParams(top_p=0.5),
    SamplingParams(top_p=0.99),
    SamplingParams(min_p=0.02),
    SamplingParams(min_p=0.5),
    SamplingParams(min_p=0.99),
    SamplingParams(top_k=20, top_p=0.8),
    SamplingParams(top_k=20, top_p=0.8, min_p=0.1),
    SamplingParams(),
]


def random_logits(seed: int, rows: int = 40) -> torch.Tensor:
    """Return [rows, VOCAB] logits, from nearly flat to nearly certain."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.linspace(0.1, 12.0, rows)[:, None]
    return torch.randn(rows, VOCAB, generator=generator) * spread


def transformers_cut(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    warpers = LogitsProcessorList()
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers(torch.zeros(len(logits), 1, dtype=torch.int64), logits.clone())


@pytest.mark.parametrize("params", CUTS, ids=str)
def test_the_tokens_that_stay_are_those_of_transformers(params: SamplingParams) -> None:
    logits = random_logits(seed=1)
    expected = transformers_cut(logits, params)
    found = narrow(logits, params)
    assert torch.equal(found.isinf(), expected.isinf())
    assert torch.equal(found, expected)
    assert (~found.isinf()).any(dim=-1).all()


@pytest.mark.parametrize("params", CUTS, ids=str)
def test_temperature_comes_before_the_cuts(params: SamplingParams) -> None:
    # The set that can be drawn at temperature 3 is that of transformers' processors in transformers' order.
    logits = random_logits(seed=2, rows=6)
    warm = TemperatureLogitsWarper(3.0)(torch.zeros(6, 1, dtype=torch.int64), logits.clone())
    allowed = ~transformers_cut(warm, params).isinf()
    sampler = Sampler(replace(params, temperature=3.0), [()] * 6, VOCAB, CPU)
    drawn = torch.zeros_like(allowed)
    for _ in range(300):
        drawn.scatter_(1, sampler.choose(logits)[:, None], True)
    assert not (drawn & ~allowed).any()
    few = allowed.sum(dim=-1) <= 3
    assert torch.equal(drawn[few], allowed[few])


def test_the_penalty_is_that_of_transformers() -> None:
    logits = random_logits(seed=3)
    history = torch.randint(0, VOCAB, (len(logits), 15), generator=torch.Generator().manual_seed(3))
    expected = RepetitionPenaltyLogitsProcessor(1.3)(history, logits.clone())
    seen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, history, True)
    assert torch.equal(torch.where(seen, penalise(logits, 1.3), logits), expected)
    sampler = Sampler(SamplingParams(repetition_penalty=1.3), history.tolist(), VOCAB, CPU)
    assert torch.equal(sampler.choose(logits), expected.argmax(dim=-1))


def test_chosen_tokens_join_the_penalised_history() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0, -1.0]])
    sampler = Sampler(SamplingParams(repetition_penalty=2.0), [[]], 4, CPU)
    assert [int(sampler.choose(logits)) for _ in range(4)] == [0, 1, 2, 0]  # 5, 4, 3, then 2.5 beats 2 and 1.5


def test_greedy_takes_the_likeliest_and_leaves_the_logits_alone() -> None:
    logits = random_logits(seed=4)
    before = logits.clone()
    sampler = Sampler(SamplingParams(repetition_penalty=1.2), [()] * len(logits), VOCAB, CPU)
    assert torch.equal(sampler.choose(logits), torch.from_numpy(before.numpy().argmax(axis=1)))
    assert torch.equal(logits, before)


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.5, 0), (2.0, 3)])
def test_draws_follow_the_probabilities(temperature: float, top_k: int) -> None:
    row = np.array([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])
    weights = np.exp(row / temperature)
    if top_k:
        weights[np.argsort(row)[:-top_k]] = 0.0
    expected = weights / weights.sum()
    # One draw from each of many generators, and many draws from one: both must be fair.
    rows = 20_000
    logits = torch.from_numpy(row).float().expand(rows, -1)
    params = SamplingParams(temperature=temperature, top_k=top_k, seed=11)
    once = Sampler(params, [()] * rows, len(row), CPU).choose(logits)
    single = Sampler(params, [()], len(row), CPU)
    often = torch.cat([single.choose(logits[:1]) for _ in range(5_000)])
    for draws in (once, often):
        shares = torch.bincount(draws, minlength=len(row)).double().numpy() / len(draws)
        deviation = np.sqrt(expected * (1 - expected) / len(draws))
        assert (np.abs(shares - expected) <= 4.5 * deviation + 1e-12).all()


def test_a_sequence_draws_the_same_whatever_runs_beside_it() -> None:
    logits = random_logits(seed=5, rows=4)
    params = SamplingParams(temperature=1.0, seed=9)
    together, alone = Sampler(params, [()] * 4, VOCAB, CPU), Sampler(params, [()], VOCAB, CPU)
    later = Sampler(replace(params, seed=9 + 2), [()], VOCAB, CPU)
    for _ in range(20):
        drawn = together.choose(logits)
        assert int(alone.choose(logits[:1])) == int(drawn[0])
        assert int(later.choose(logits[2:3])) == int(drawn[2])


def test_seeds_differ_and_the_largest_one_works() -> None:
    logits = torch.zeros(1, VOCAB)
    drawn = Counter(
        int(Sampler(SamplingParams(temperature=1.0, seed=seed), [()], VOCAB, CPU).choose(logits)) for seed in range(400)
    )
    assert len(drawn) > VOCAB * 0.9
    largest = SamplingParams(temperature=1.0, seed=(1 << 63) - 1)
    assert Sampler(largest, [()] * 3, VOCAB, CPU).choose(torch.zeros(3, VOCAB)).shape == (3,)


@pytest.mark.parametrize(("top_p", "kept"), [(0.25, 1), (0.5, 2), (0.75, 3), (0.76, 4)])
def test_likelier_tokens_that_reach_top_p_exactly_are_enough(top_p: float, kept: int) -> None:
    """Four tokens of a fourth each: sums of them are exact."""
    logits = narrow(torch.zeros(1, 4), SamplingParams(top_p=top_p))
    assert logits.isfinite().tolist() == [[True] * kept + [False] * (4 - kept)]


def test_a_token_as_likely_as_min_p_asks_for_stays() -> None:
    logits = narrow(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), SamplingParams(min_p=1.0))
    assert logits.isfinite().tolist() == [[False, True, True, False]]
