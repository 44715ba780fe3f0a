"""The sampler cuts and penalises as transformers' logits processors do, and draws what the probabilities say."""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.cases import in_case
from support.packed_matrices import native_backend
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from graphcore.engine.request import Request
from graphcore.engine.sampler import Sampler, SequenceSampler
from graphcore.errors import GraphError
from graphcore.kernels.backend import TorchBackend
from graphcore.kernels.ops.draw import Draw, kept_weights, penalise, weight_of
from graphcore.sampling_params import SamplingParams
from graphcore.tokenizer.text_stream import StopStrings

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


def rows_of(
    params: SamplingParams, count: int, position: int = 0, histories: Sequence[Sequence[int]] = ()
) -> list[Draw]:
    """Return rows that draw with seeds from params.seed on, each after its history."""
    rows = [
        Draw.after(history, replace(params, seed=params.seed + row), VOCAB, CPU)
        for row, history in enumerate(histories or [()] * count)
    ]
    return [replace(row, position=row.position + position) for row in rows]


@pytest.fixture(params=["torch", "kernel"])
def sampler(request: pytest.FixtureRequest) -> Sampler:
    return Sampler(native_backend() if request.param == "kernel" else TorchBackend())


def transformers_cut(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    warpers = LogitsProcessorList()
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers(torch.zeros(len(logits), 1, dtype=torch.int64), logits.clone())


def test_the_tokens_that_stay_are_those_of_transformers() -> None:
    """Temperature comes before the cuts, as there."""
    for temperature, params in product([1.0, 3.0], CUTS):
        with in_case(params, temperature):
            logits = random_logits(seed=1)
            warm = TemperatureLogitsWarper(temperature)(torch.zeros(len(logits), 1, dtype=torch.int64), logits.clone())
            expected = ~transformers_cut(warm, params).isinf()
            (row,) = rows_of(replace(params, temperature=temperature), 1)
            found = torch.stack([kept_weights(each, row) > 0 for each in logits])
            assert torch.equal(found, expected)
            assert found.any(dim=-1).all()


@pytest.mark.parametrize("params", CUTS, ids=str)
def test_only_tokens_that_stay_are_drawn_and_each_of_few(params: SamplingParams) -> None:
    """By the kernel, which chooses what torch chooses (tests/unit/kernels/ops/test_draw.py)."""
    sampler = Sampler(native_backend())
    logits = random_logits(seed=2, rows=6)
    warm = replace(params, temperature=3.0)
    allowed = torch.stack([kept_weights(each, rows_of(warm, 1)[0]) > 0 for each in logits])
    drawn = torch.zeros_like(allowed)
    for position in range(300):
        drawn.scatter_(1, torch.tensor(sampler.choose(logits, rows_of(warm, 6, position)))[:, None], True)
    assert not (drawn & ~allowed).any()
    few = allowed.sum(dim=-1) <= 3
    assert torch.equal(drawn[few], allowed[few])


def test_the_penalty_is_that_of_transformers(sampler: Sampler) -> None:
    logits = random_logits(seed=3)
    history = torch.randint(0, VOCAB, (len(logits), 15), generator=torch.Generator().manual_seed(3))
    expected = RepetitionPenaltyLogitsProcessor(1.3)(history, logits.clone())
    seen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, history, True)
    assert torch.equal(torch.where(seen, penalise(logits, 1.3), logits), expected)
    rows = rows_of(SamplingParams(repetition_penalty=1.3), len(logits), histories=history.tolist())
    assert sampler.choose(logits, rows) == expected.argmax(dim=-1).tolist()


def test_chosen_tokens_join_the_penalised_history(sampler: Sampler) -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0, -1.0] + [-9.0] * 46])
    (row,) = rows_of(SamplingParams(repetition_penalty=2.0), 1)
    found = []
    for _ in range(4):
        found += sampler.choose(logits, [row])
        row.append(found[-1])
    assert found == [0, 1, 2, 0]  # 5, 4, 3, then 2.5 beats 2 and 1.5
    assert row.position == 4


def test_greedy_takes_the_likeliest_and_leaves_the_logits_alone(sampler: Sampler) -> None:
    logits = random_logits(seed=4)
    before = logits.clone()
    rows = rows_of(SamplingParams(repetition_penalty=1.2), len(logits))
    assert sampler.choose(logits, rows) == before.numpy().argmax(axis=1).tolist()
    assert torch.equal(logits, before)


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.5, 0), (2.0, 3)])
def test_draws_follow_the_probabilities(temperature: float, top_k: int) -> None:
    sampler = Sampler(native_backend())
    row = np.array([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])
    weights = np.exp(row / temperature)
    if top_k:
        weights[np.argsort(row)[:-top_k]] = 0.0
    expected = weights / weights.sum()
    # One draw of each of many seeds, and many draws of one: both must be fair.
    count = 3_000
    logits = torch.from_numpy(row).float().expand(count, -1)
    params = SamplingParams(temperature=temperature, top_k=top_k, seed=11)
    once = [Draw(replace(params, seed=11 + at), 0) for at in range(count)]
    often = [Draw(replace(params, seed=11), at) for at in range(count)]
    for rows in (once, often):
        shares = np.bincount(sampler.choose(logits, rows), minlength=len(row)) / count
        deviation = np.sqrt(expected * (1 - expected) / count)
        assert (np.abs(shares - expected) <= 4.5 * deviation + 1e-12).all()


def test_rows_of_different_settings_choose_as_if_they_were_alone(sampler: Sampler) -> None:
    logits = random_logits(seed=5, rows=len(CUTS))
    rows = [
        Draw.after([3, at], replace(cut, temperature=at / 4, repetition_penalty=1 + at / 9, seed=at), VOCAB, CPU)
        for at, cut in enumerate(CUTS)
    ]
    rows[3].mask = torch.arange(VOCAB) % 7 == 2
    together = sampler.choose(logits, rows)
    assert together == [sampler.choose(logits[at : at + 1], [row])[0] for at, row in enumerate(rows)]
    assert together[3] % 7 == 2
    assert together != sampler.choose(logits, [replace(row, position=row.position + 1) for row in rows])


def test_seeds_differ_and_the_largest_one_works(sampler: Sampler) -> None:
    logits = torch.zeros(400, VOCAB)
    drawn = Counter(sampler.choose(logits, rows_of(SamplingParams(temperature=1.0), 400)))
    assert len(drawn) > VOCAB * 0.9
    largest = SamplingParams(temperature=1.0, seed=(1 << 63) - 1)
    assert len(sampler.choose(torch.zeros(3, VOCAB), rows_of(largest, 3))) == 3


@pytest.mark.parametrize(("top_p", "kept"), [(0.25, 1), (0.5, 2), (0.75, 3), (0.76, 4)])
def test_likelier_tokens_that_reach_top_p_exactly_are_enough(top_p: float, kept: int) -> None:
    """Four tokens of a fourth each: sums of them are exact."""
    (row,) = rows_of(SamplingParams(temperature=1.0, top_p=top_p), 1)
    assert kept_weights(torch.zeros(4), row).tolist() == [1.0] * kept + [0.0] * (4 - kept)


def test_a_token_as_likely_as_min_p_asks_for_stays() -> None:
    share = weight_of(torch.tensor([-1.0])).item()  # of a token whose logit is 1 below the highest
    (row,) = rows_of(SamplingParams(temperature=1.0, min_p=share), 1)
    assert kept_weights(torch.tensor([1.0, 3.0, 3.0, 2.0]), row).tolist() == [0.0, 1.0, 1.0, share]


def test_a_mask_that_allows_nothing_is_an_error_by_name(sampler: Sampler) -> None:
    (row,) = rows_of(SamplingParams(), 1)
    row.mask = torch.zeros(VOCAB, dtype=torch.bool)
    with pytest.raises(GraphError, match="mask of a request allows no token"):
        sampler.choose(torch.zeros(1, VOCAB), [row])


def sequence_sampler() -> SequenceSampler:
    """Return a sampler for a vocabulary of four tokens and a context of 64."""
    backend = SimpleNamespace(draw_kernel=lambda: None)
    runner = SimpleNamespace(sizes=SimpleNamespace(vocab=4, context=64), device=torch.device("cpu"), backend=backend)
    return SequenceSampler(runner)


def test_an_error_before_a_token_is_drawn_ends_its_own_request_alone() -> None:
    hides = SamplingParams(min_tokens=2)
    broken, sound = (Request([1], 5, frozenset([end]), None, StopStrings([]), params=hides) for end in (99, 3))
    sequence_sampler().choose([broken, sound], [torch.arange(4.0)] * 2)
    assert broken.finish_reason == "error"
    with pytest.raises(IndexError, match="99"):  # there is no such token to hide
        broken.output.wait_to_end(1.0)
    assert (sound.token_ids, sound.finish_reason) == ([2], None)  # its end, the likeliest token, is hidden


def test_logits_of_tokens_that_run_again_wait_for_no_mask() -> None:
    sampler = sequence_sampler()
    asked = [Request([1], 5, frozenset(), None, StopStrings([])) for _ in range(2)]
    for request in asked:
        request.mask = SimpleNamespace(future=Future())
    sampler.choose(asked, [torch.zeros(4)] * 2)
    sampler.supersede(asked[:1])
    assert sampler.has_pending
    sampler.supersede(asked[1:])
    assert not sampler.has_pending
