"""DRY, top-n-sigma and XTC, which the host applies, are what their authors define, in plain Python and float64.

Legend: V vocab.
"""

import math
import random
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.cases import in_case
from support.comparisons import dry_penalties
from support.engine_fakes import draw_of
from torch import Tensor

from graphcore.engine.arguments import sampling_params
from graphcore.errors import ConfigError
from graphcore.kernels.ops.draw import Draw, DrawKernel, changed_by_host, choose_tokens, is_xtc_applied, philox
from graphcore.kernels.ops.dry import MOST_PENALTY, DryHistory, repeated_lengths
from graphcore.sampling_params import SamplingParams

CPU = torch.device("cpu")
PI_WORDS = (0x243F6A88, 0x85A308D3)


def penalties_of(ids: list[int], breakers: frozenset[int] = frozenset(), **dry: float) -> dict[int, float]:
    params = SamplingParams(**{"dry_multiplier": 0.8, **dry})  # type: ignore[arg-type]  # numbers of both kinds
    found, grown = DryHistory.of(ids, breakers).penalties(params), DryHistory.of([], breakers)
    for token_id in ids:
        grown.append(token_id)
    assert grown.penalties(params) == found, "token by token"
    return found


def test_dry_penalises_what_continues_a_repetition() -> None:
    assert penalties_of([1, 2, 3, 4, 9, 1, 2, 3]) == {4: pytest.approx(0.8 * 1.75)}
    assert penalties_of([2, 3, 4, 9, 1, 2, 3], dry_base=3) == {4: pytest.approx(0.8)}
    assert penalties_of([3, 4, 9, 2, 3]) == {}
    assert penalties_of([3, 4, 9, 2, 3], dry_allowed_length=1) == {4: pytest.approx(0.8)}
    assert penalties_of([5, 5, 5, 5]) == {5: pytest.approx(0.8 * 1.75)}, "a repetition may overlap what it repeats"
    assert penalties_of([1, 2, 3, 4, 9, 1, 2, 3], frozenset({2})) == {}, "a breaker"
    assert penalties_of([1, 2, 3, 4, 9, 1, 2, 3], frozenset({4})) == {}, "a breaker is not penalised"
    assert penalties_of([2, 4, 9, 2], frozenset({2}), dry_allowed_length=1) == {}, "the last token is a breaker"
    assert penalties_of([1, 2, 3, 4, 9, 1, 2, 3], dry_penalty_last_n=7) == {4: pytest.approx(0.8)}
    assert penalties_of([1] * 4000) == {1: MOST_PENALTY}


class Compared(int):
    """A token that counts comparisons."""

    count = 0
    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        Compared.count += 1
        return int.__eq__(self, other) is True


def test_comparisons_grow_as_the_history_does() -> None:
    for cycle in (1, 2, 7):
        Compared.count, num_tokens = 0, 700
        lengths = repeated_lengths([Compared(at % cycle) for at in range(num_tokens)], frozenset())
        assert lengths == [at if at % cycle == num_tokens % cycle else 0 for at in range(num_tokens)]
        assert Compared.count <= 2 * num_tokens


TOKENS = st.lists(st.integers(0, 3), max_size=40)


@given(TOKENS, TOKENS, st.sets(st.just(0)), st.integers(0, 4), st.sampled_from([-1, 1, 2, 5, 30, 100]))
def test_dry_is_what_its_author_defines(
    prompt: list[int], answer: list[int], breakers: set[int], allowed: int, last: int
) -> None:
    """After a prompt at once, and token by token as an answer grows."""
    params = SamplingParams(dry_multiplier=0.8, dry_allowed_length=allowed, dry_penalty_last_n=last)
    expected = dry_penalties([*prompt, *answer], frozenset(breakers), 0.8, 1.75, allowed, last)
    grown = Draw.after(prompt, params, 4, CPU, (), breakers)
    for token in answer:
        grown.append(token)
    for draw in (grown, Draw.after(prompt, params, 4, CPU, answer, breakers)):
        assert draw.dry is not None
        found = draw.dry.penalties(params)
        assert found == pytest.approx(expected)
        logits = torch.tensor([3.0, 2.0, 1.0, 0.0])
        losses = torch.tensor([expected.get(token, 0.0) for token in range(4)])
        assert torch.allclose(changed_by_host(logits, draw)[0], logits - losses, rtol=1e-6)


def test_a_copy_of_a_draw_has_a_history_of_its_own() -> None:
    params = SamplingParams(dry_multiplier=1.0, frequency_penalty=1.0, repetition_penalty=1.5)
    draw = Draw.after([1, 2, 3, 9, 1], params, 10, CPU)
    logits = torch.linspace(-1, 1, 10)
    before = changed_by_host(logits, draw)[0]
    ahead = draw.copy()
    ahead.append(2)
    assert torch.equal(changed_by_host(logits, draw)[0], before)
    assert float(changed_by_host(logits, ahead)[0][3]) == pytest.approx(float(before[3]) - 1)
    ahead.append(7)  # a token that the prompt has not
    assert torch.equal(changed_by_host(logits, draw)[0], before)


def kept_of(logits: Tensor, mask: Tensor | None, values: Mapping[str, float]) -> list[int]:
    """Return the tokens that may be drawn, the likeliest first: all cuts, XTC last, in Python's floats."""
    raw = logits.tolist()
    order = sorted((at for at in range(len(raw)) if mask is None or mask[at]), key=lambda at: (-raw[at], at))
    if values.get("top_n_sigma", 0) > 0:
        mean = math.fsum(raw) / len(raw)
        sigma = math.sqrt(math.fsum((one - mean) ** 2 for one in raw) / len(raw))
        order = [at for at in order if raw[at] >= raw[order[0]] - values["top_n_sigma"] * sigma]
    order = order[: values["top_k"]] if values.get("top_k") else order  # type: ignore[misc]  # a whole number

    def shares(temperature: float) -> list[float]:
        weights = [math.exp((raw[at] - raw[order[0]]) / temperature) for at in order]
        return [weight / math.fsum(weights) for weight in weights]

    own = shares(values["temperature"])
    order = [at for place, at in enumerate(order) if math.fsum(own[:place]) < values.get("top_p", 1.0)]
    order = [at for place, at in enumerate(order) if own[place] >= own[0] * values.get("min_p", 0.0)]
    if values.get("xtc_probability") == 1:
        num_likely = sum(share >= values.get("xtc_threshold", 0.1) for share in shares(1.0))
        order = order[max(0, num_likely - 1) :]
    return order


CUTS: tuple[dict[str, float], ...] = (
    {"top_n_sigma": 1.0},
    {"top_n_sigma": 2.5, "top_k": 3},
    {"xtc_probability": 1},
    {"xtc_probability": 1, "xtc_threshold": 0.02},
    {"xtc_probability": 1, "xtc_threshold": 0.6},
    {"xtc_probability": 1, "top_k": 5, "xtc_threshold": 0.05},
    {"xtc_probability": 1, "top_p": 0.8, "min_p": 0.1},
    {"xtc_probability": 1, "top_n_sigma": 1.5, "min_p": 0.05, "xtc_threshold": 0.0},
)


def test_tokens_are_drawn_from_what_the_cuts_keep(library: str) -> None:
    """By torch and by the kernel, which choose the same; all tokens that are kept come, and no other."""
    kernel, generator = DrawKernel(library, 1), torch.Generator().manual_seed(4)
    for cut in CUTS:
        for temperature, has_mask in ((0.7, False), (3.0, True)):
            with in_case(cut, temperature, has_mask):
                logits = torch.randn(24, generator=generator) * 2
                mask = torch.rand(24, generator=generator) < 0.5 if has_mask else None
                values = {"temperature": temperature, **cut}
                draws = [draw_of(**values, seed=8, position=at, mask=mask) for at in range(60)]
                found = choose_tokens([logits] * len(draws), draws)
                assert found == kernel.choose([logits] * len(draws), draws)
                kept = kept_of(logits, mask, values)
                assert set(found) <= set(kept)
                assert kept[0] in found, "the likeliest that is left"
                row = changed_by_host(logits, draws[0])[1]
                if "xtc_probability" in cut:
                    assert row.mask is not None
                    assert row.mask.nonzero().flatten().tolist() == sorted(kept)


def test_of_equally_likely_tokens_xtc_keeps_one() -> None:
    row = changed_by_host(torch.tensor([1.0, 1.0, 1.0]), draw_of(temperature=1.0, xtc_probability=1.0))[1]
    assert row.mask is not None
    assert row.mask.tolist() == [False, False, True]


def test_a_token_exactly_at_a_limit_is_llama_cpp_s_too() -> None:
    """Its sources: a probability of the threshold may be dropped by XTC, a logit at the margin of sigmas is kept."""
    row = changed_by_host(torch.tensor([1.0, 1.0]), draw_of(temperature=1.0, xtc_probability=1.0, xtc_threshold=0.5))[1]
    assert row.mask is not None
    assert row.mask.tolist() == [False, True]
    row = changed_by_host(torch.tensor([1.0, -1.0]), draw_of(temperature=1.0, top_n_sigma=2.0))[1]
    assert row.mask is not None
    assert row.mask.tolist() == [True, True]


def test_the_deviation_of_sigmas_is_that_of_the_model_s_own_logits() -> None:
    bias = torch.tensor([3]), torch.tensor([-100.0])  # with it the deviation is 45 instead of 2.3
    row = changed_by_host(torch.tensor([3.0, 2.0, 0.0, -3.0]), draw_of(temperature=1.0, top_n_sigma=1.0, bias=bias))[1]
    assert row.mask is not None
    assert row.mask.tolist() == [True, True, False, False]


def test_xtc_is_drawn_from_a_word_of_its_own() -> None:
    """The word's counter is stated here; token noise has a counter that ends with 0."""
    positions = [*range(400), (5 << 32) + 3]
    for seed in (7, (PI_WORDS[0] << 32) + PI_WORDS[1]):
        counters = (torch.zeros(len(positions), dtype=torch.int64), torch.tensor([at & 0xFFFFFFFF for at in positions]))
        high = torch.tensor([at >> 32 for at in positions])
        words = philox(seed, (*counters, high, torch.ones_like(high)))[0].tolist()
        for probability in (0.3, 1.0, ((words[5] >> 9) + 0.5) / 2**23):  # the last is exactly what position 5 draws
            found = [
                is_xtc_applied(draw_of(temperature=1.0, seed=seed, position=at, xtc_probability=probability))
                for at in positions
            ]
            assert found == [((word >> 9) + 0.5) / 2**23 < probability for word in words]
            assert sum(found) / len(found) == pytest.approx(probability, abs=0.1)  # four deviations of 400 draws


def test_parameters_that_are_off_change_nothing() -> None:
    off = (
        {},
        {"dry_base": 2.0, "dry_allowed_length": 1, "xtc_threshold": 0.3},
        {"top_n_sigma": -1, "dry_multiplier": 0, "xtc_probability": 0},
        {"dry_multiplier": 1, "dry_base": 0.9},
        {"dry_multiplier": 1, "dry_penalty_last_n": 0},
    )
    for values in off:
        for temperature in (0, 0.8):
            params = sampling_params({"temperature": temperature, **values})
            assert not params.changes_logits, values
            assert params.is_greedy == (temperature == 0)
            draw = Draw.after([1, 2, 1], params, 4, CPU)
            assert (draw.dry, draw.changes_logits) == (None, False)


def test_cuts_have_no_effect_on_greedy_requests_and_dry_has() -> None:
    cut = {"top_n_sigma": 1.0, "xtc_probability": 1.0}
    assert sampling_params({"temperature": 0, **cut}).is_greedy
    assert not sampling_params({"temperature": 0, "dry_multiplier": 1.0}).is_greedy
    assert sampling_params({"temperature": 1, "top_p": 0, **cut}).is_greedy
    for name, value in cut.items():
        with pytest.raises(ConfigError, match=f"{name}=1.0 has no effect"):
            sampling_params({name: value})


def test_a_sequence_draws_the_same_beside_others(library: str) -> None:
    kernel, source = DrawKernel(library, 2), random.Random(3)
    logits = torch.randn(6, 70, generator=torch.Generator().manual_seed(1)) * 2
    params = SamplingParams(
        1.2, top_p=0.9, dry_multiplier=2.0, dry_allowed_length=1, top_n_sigma=2.0, xtc_probability=0.5
    )
    draws = [Draw.after([source.randrange(70) for _ in range(90)], params, 70, CPU) for _ in range(6)]
    alone = [kernel.choose([one], [draw])[0] for one, draw in zip(logits, draws, strict=True)]
    assert kernel.choose(logits.unbind(), draws) == alone == choose_tokens(logits.unbind(), draws)
