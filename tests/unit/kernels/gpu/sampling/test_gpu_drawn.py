"""Drawing on the device chooses the tokens that kernels/ops/draw.py chooses, ties included, row by row."""

import pytest
import torch
import triton
import triton.language as tl
from choosing import drawn, likeliest
from support.engine_fakes import changed, draw_of
from torch import Tensor

from graphcore.kernels.gpu.sampling.likeliest import PART
from graphcore.kernels.gpu.sampling.weights_and_noise import noise_of, sampling_weight
from graphcore.kernels.ops import draw as rule
from graphcore.kernels.ops.draw import Draw, choose_token, choose_tokens, kept_weights, penalise
from graphcore.sampling_params import KERNEL_PARAMETERS

pytestmark = pytest.mark.thorough

WARM = draw_of(seed=5, temperature=0.8)
CUTS = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10_000_000},
    {"top_p": 0.0},
    {"top_p": 0.01},
    {"top_p": 0.5},
    {"top_p": 0.999},
    {"min_p": 0.3},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.1},
    {"temperature": 1e-40},
    {"temperature": 0.0, "top_p": 0.1},
    {"temperature": 50.0, "seed": -(1 << 62) + 9},
    {"temperature": 0.05},
    {},
]


def test_draws_have_values_of_every_parameter() -> None:
    assert set(KERNEL_PARAMETERS) <= {name for draw in CUTS for name in draw} | {"repetition_penalty"}


def logits_of(rows: int, vocab: int, seed: int = 0) -> Tensor:
    """Return [rows, vocab] logits from nearly flat to nearly certain, and in the last row few different values."""
    generator = torch.Generator().manual_seed(seed * 1000 + vocab)
    logits = torch.randn(rows, vocab, generator=generator) * torch.linspace(0.1, 9.0, rows)[:, None]
    logits[-1] = (logits[-1] / 4).round()
    return logits


def many_draws(vocab: int, seed: int) -> list[Draw]:
    """Return draws with all kinds of cuts at other positions, some with a penalty."""
    generator = torch.Generator().manual_seed(seed)
    draws = [changed(WARM, **cuts, position=1 + at * (seed + 7)) for at, cuts in enumerate(CUTS)]
    seen = torch.rand(len(draws), vocab, generator=generator) < 0.2
    return [
        changed(draw, repetition_penalty=1.4, seen=row) if at % 3 == 1 else draw
        for at, (draw, row) in enumerate(zip(draws, seen, strict=True))
    ]


@triton.jit
def _store_noise(seed, position, out, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, noise_of(tl.load(seed), tl.load(position), at))


@triton.jit
def _store_weights(x, out, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, sampling_weight(tl.load(x + at)))


@pytest.mark.parametrize(("seed", "position"), [(3, 9), (-(1 << 63) + 5, (7 << 32) + 11), ((1 << 63) - 1, 4095)])
def test_the_noise_of_every_token_has_the_bits_of_the_statement(seed: int, position: int) -> None:
    vocab = 8 * PART
    found = torch.empty(vocab)
    _store_noise[(8,)](torch.tensor([seed]), torch.tensor([position]), found, SIZE=PART, enable_fp_fusion=False)
    assert torch.equal(found, rule.noise(seed, position, vocab))


def test_every_weight_has_the_bits_of_the_statement() -> None:
    x = torch.cat([-torch.linspace(0, 90, 8 * PART - 3), torch.tensor([-0.0, -1e38, float("-inf")])])
    found = torch.empty(len(x))
    _store_weights[(8,)](x, found, SIZE=PART, enable_fp_fusion=False)
    assert torch.equal(found, rule.weight_of(x))


@pytest.mark.parametrize(("vocab", "seed"), [(50, 1), (700, 4), (2 * PART - 100, 5)])
def test_rows_of_different_settings_choose_the_tokens_of_the_statement(vocab: int, seed: int) -> None:
    logits, draws = logits_of(len(CUTS), vocab, seed), many_draws(vocab, seed)
    assert drawn(logits, draws).chosen.tolist() == choose_tokens(logits, draws)


@pytest.mark.parametrize(
    ("values", "cuts", "kept"),
    [
        ([1.0] * 4, {"top_p": 0.5}, [0, 1]),
        ([1.0] * 4, {"top_k": 3}, [0, 1, 2, 3]),
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
    draw, logits = draw_of(temperature=1.0, position=1, **cuts), torch.tensor([values])
    assert kept_weights(logits[0], draw).nonzero()[:, 0].tolist() == kept  # the statement says the same
    draws = [changed(draw, seed=seed_of(token, len(values))) for token in range(len(values))]
    rows = logits.expand(len(draws), -1).contiguous()
    found = drawn(rows, draws).chosen.tolist()
    assert [token for row, token in enumerate(found) if token == row] == kept
    assert found == choose_tokens(rows, draws)


def seed_of(token: int, vocab: int) -> int:
    """Return a seed whose noise at position 1 lets a token win against all others that are about as likely."""
    noise = torch.stack([rule.noise(seed, 1, vocab) for seed in range(300)])
    others = noise.clone()
    others[:, token] = float("inf")
    return int((others.amin(1) / noise[:, token]).argmax())


def test_a_share_that_is_one_in_float32_cuts_nothing() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, -1.0]]).expand(40, -1).contiguous()
    draws = [changed(WARM, top_p=0.9999999999, seed=seed, position=1) for seed in range(40)]
    assert set(drawn(logits, draws).chosen.tolist()) == {0, 1, 2, 3}


def test_a_tie_over_the_parts_of_the_vocabulary_ends_in_the_right_one() -> None:
    logits = torch.full((1, 2 * PART + 9), -30.0)
    likely = [*range(PART - 5, PART), *range(PART, PART + 9), 2 * PART + 3]
    logits[0, likely] = 1.0
    draw = draw_of(temperature=1.0, top_p=0.7)
    assert kept_weights(logits[0], draw).nonzero()[:, 0].tolist() == likely[:11]
    draws = [changed(draw, position=at) for at in range(1, 50)]
    expected = choose_tokens(logits.expand(len(draws), -1), draws)
    looked_at = [*range(5), expected.index(likely[10])]  # the last that is kept lies behind the first part
    found = drawn(logits.expand(len(looked_at), -1).contiguous(), [draws[at] for at in looked_at])
    assert found.chosen.tolist() == [expected[at] for at in looked_at]


def test_a_penalty_without_temperature_takes_the_likeliest_that_is_left() -> None:
    logits = logits_of(3, 1500)
    seen = torch.zeros(logits.shape, dtype=torch.bool)
    for _ in range(2):
        expected = torch.where(seen, penalise(logits, 1.5), logits).argmax(-1)
        flow = drawn(logits, [draw_of(position=1, repetition_penalty=1.5, seen=row) for row in seen])
        assert torch.equal(flow.chosen, expected)
        logprobs = logits.double().log_softmax(-1).gather(1, expected[:, None])[:, 0]
        torch.testing.assert_close(flow.report[:, 1], logprobs, rtol=1e-5, atol=1e-5)
        seen.scatter_(1, expected[:, None], True)


def test_a_draw_is_the_same_alone_and_beside_others() -> None:
    logits, draws = logits_of(len(CUTS), 200), many_draws(200, 8)
    together = drawn(logits, draws).chosen.tolist()
    for at in (0, 8, 14):
        assert drawn(logits[at : at + 1], draws[at : at + 1]).chosen.tolist() == together[at : at + 1]
        assert choose_token(logits[at], draws[at]) == together[at]


@pytest.mark.parametrize("vocab", [96, 700, 3000])
def test_a_log_probability_has_the_same_bits_as_in_a_greedy_step(vocab: int) -> None:
    """Steps in which a row draws, and those in which none does, run kernels of different layouts."""
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    greedy = draw_of(seed=1, position=9, temperature=0.0)
    found = drawn(logits, [greedy, *[draw_of(seed=2, position=9, temperature=0.7)] * 2, greedy]).report
    expected = likeliest(logits).report
    assert torch.equal(found[[0, 3]], expected[[0, 3]])
