"""Draws of tokens: the C++ kernel and the statement in torch choose the same ones, by the rule and with fair odds.

Legend: B rows, V vocab.
"""

import math
import random
from itertools import product as every_pair

import numpy as np
import pytest
import torch
from support.cases import in_case
from support.engine_fakes import changed, draw_of
from support.packed_matrices import native_kernels
from torch import Tensor

from graphcore.errors import GraphError
from graphcore.kernels.ops.draw import (
    LOW,
    Draw,
    DrawKernel,
    choose_token,
    choose_tokens,
    exponential_of,
    kept_weights,
    noise,
    philox,
    weight_of,
)
from graphcore.sampling_params import KERNEL_PARAMETERS

CHOICES = {
    "temperature": (0.0, 1e-40, 1e-6, 0.3, 1.0, 2.5, 100.0),
    "top_k": (0, 0, 1, 7, 40, 300, 4000),
    "top_p": (1.0, 1.0, 0.0, 1e-6, 0.3, 0.5, 0.95, 0.99999),
    "min_p": (0.0, 0.0, 0.1, 1.0),
}


def logits_of(rows: int, vocab: int, spread: float = 3.0, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.fixture
def kernel(library: str) -> DrawKernel:
    return DrawKernel(library, 2)


def random_draw(vocab: int, source: random.Random) -> Draw:
    """Return settings of any kind, extreme ones included."""
    bits = torch.Generator().manual_seed(source.getrandbits(32))
    seen = torch.rand(vocab, generator=bits) < 0.3 if source.random() < 0.2 else None
    mask = torch.rand(vocab, generator=bits) < source.choice((0.01, 0.5)) if source.random() < 0.2 else None
    if mask is not None:
        mask[source.randrange(vocab)] = True
    values = {name: source.choice(choices) for name, choices in CHOICES.items()}
    penalty = source.choice((1.3, 0.5)) if seen is not None else 1.0
    noise_of = {"seed": source.getrandbits(64), "position": source.getrandbits(source.choice((8, 40)))}
    return draw_of(**noise_of, **values, repetition_penalty=penalty, seen=seen, mask=mask)


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        (0, (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((1 << 64) - 1, (LOW, LOW, LOW, LOW), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            0x299F31D0_A4093822,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_its_authors_known_answers(key: int, counter: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """The vectors of Random123's kat_vectors for philox4x32-10."""
    first, second, third, fourth = (torch.tensor([word]) for word in counter)
    assert tuple(int(word) for word in philox(key, (first, second, third, fourth))) == expected


def test_draws_have_values_of_every_parameter() -> None:
    assert {*CHOICES, "repetition_penalty"} == set(KERNEL_PARAMETERS), (
        "the kernel is compared with what random_draw returns"
    )


def test_noise_takes_the_word_of_its_token() -> None:
    """Written out for single tokens, in numbers of Python and float64."""
    seed, position, vocab = 0xFEDCBA98_76543210, (3 << 32) + 77, 200
    found = noise(seed, position, vocab)
    for token in (0, 15, 16, 63, 64, 79, 130, 199):
        counter = [torch.tensor([one]) for one in ((token >> 6) * 16 + (token & 15), 77, 3, 0)]
        word = int(philox(seed, (counter[0], counter[1], counter[2], counter[3]))[token >> 4 & 3])
        assert float(found[token]) == pytest.approx(-math.log(((word >> 9) + 0.5) / 2**23), rel=2e-7)


def test_the_logarithm_is_as_good_as_float32() -> None:
    """At all numbers near 0 and 1, and at some between them, in order."""
    whole, near = 1 << 23, 1 << 16
    bits = torch.cat([torch.arange(near), torch.arange(near, whole - near, 61), torch.arange(whole - near, whole)])
    found = exponential_of(bits << 9)
    expected = -(((bits.double() + 0.5) * 2.0**-23).log())
    assert float(((found - expected) / expected).abs().max()) < 1.5e-7  # 2^-23 is 1.2e-7
    assert bool((found[1:] <= found[:-1]).all())


def test_the_exponential_is_as_good_as_float32() -> None:
    x = -torch.linspace(0, 87, 1_000_001)
    exact = x.double().exp()
    assert float(((weight_of(x) - exact) / exact).abs().max()) < 4e-7
    assert weight_of(torch.tensor([0.0, -87.5, -1e30, -math.inf])).tolist() == [1.0, 0.0, 0.0, 0.0]


def test_the_kernel_chooses_what_torch_chooses(kernel: DrawKernel) -> None:
    for vocab, spread in every_pair([1, 7, 63, 64, 65, 257, 5000], [0.0, 1.0, 30.0]):
        with in_case(vocab, spread):
            source = random.Random(f"{vocab} {spread}")
            for is_rounded in (False, True):
                draws = [random_draw(vocab, source) for _ in range(48)]
                logits = logits_of(len(draws), vocab, spread)
                logits = (logits * 2).round() / 2 if is_rounded else logits  # many ties
                assert kernel.choose(logits, draws) == choose_tokens(logits, draws)


def test_the_kernel_chooses_what_torch_chooses_from_a_large_vocabulary(kernel: DrawKernel) -> None:
    warm = draw_of(seed=3, temperature=0.8)
    cuts = ({}, {"top_k": 40}, {"top_p": 0.95}, {"top_k": 400, "top_p": 0.9, "min_p": 0.01}, {"top_p": 0.999})
    draws = [changed(warm, position=at, **cut) for at, cut in enumerate(cuts)]
    for spread in (0.5, 3.0):
        logits = logits_of(len(draws), 151_936, spread)
        assert kernel.choose(logits, draws) == choose_tokens(logits, draws)


@pytest.mark.parametrize("is_masked", [False, True])
def test_every_token_has_the_noise_of_the_statement(is_masked: bool, kernel: DrawKernel) -> None:
    """Logits that make a token win by a last bit, or lose by it, tell whether the kernel's noise has the same bits."""
    vocab, temperature = 192, 1.0
    mask = torch.ones(vocab, dtype=torch.bool) if is_masked else None
    for position in range(40):
        draw = draw_of(seed=11, position=position, temperature=temperature, mask=mask)
        drawn = noise(11, position, vocab)
        logits = drawn.log()  # weights in proportion to the noise: all scores are equal but for their last bits
        assert kernel.choose(logits[None], [draw]) == [choose_token(logits, draw)]


def test_of_equals_top_k_keeps_all_and_top_p_the_first(kernel: DrawKernel) -> None:
    logits = torch.zeros(1, 600)
    logits[0, 100:104] = 1.0
    for draw, kept in (
        (draw_of(temperature=1.0, top_k=2), {100, 101, 102, 103}),
        (draw_of(temperature=0.05, top_p=0.74), {100, 101, 102}),
        (draw_of(temperature=0.01, top_p=0.75), {100, 101, 102}),
        (draw_of(temperature=0.01, top_p=0.75001), {100, 101, 102, 103}),
        (draw_of(temperature=0.05, top_p=0.01), {100}),
        (draw_of(temperature=1.0, top_k=4, min_p=1.0), {100, 101, 102, 103}),
        (draw_of(temperature=1e-4), {100, 101, 102, 103}),
    ):
        assert set(kept_weights(logits[0], draw).nonzero()[:, 0].tolist()) == kept
        rows = [changed(draw, position=at) for at in range(300)]
        assert set(kernel.choose(logits.expand(300, -1), rows)) == kept


@pytest.mark.thorough
@pytest.mark.parametrize(
    "cuts",
    [{}, {"temperature": 0.5}, {"top_k": 6, "top_p": 0.9}, {"min_p": 0.1}, {"top_p": 0.7, "temperature": 2.0}],
    ids=str,
)
def test_draws_are_distributed_as_float64_says(cuts: dict[str, float]) -> None:
    """Chi-squared over positions, over seeds, and over both; 7 deviations above its mean have a chance of 1 in 10^6.

    Of this processor's kernel: the tests above show that all choose the same tokens.
    """
    kernel = DrawKernel(native_kernels(), 2)
    vocab, count = 130, 15_000
    logits = logits_of(1, vocab, 1.0)[0]
    draw = draw_of(**{"temperature": 1.0, **cuts})
    scaled = logits.double().numpy() / draw.params.temperature
    weights = np.where(kept_weights(logits, draw).numpy() > 0, np.exp(scaled - scaled.max()), 0.0)
    expected = count * weights / weights.sum()
    kept = expected > 0
    for of in (lambda at: (77, at), lambda at: (at, 5), lambda at: (at % 120, at // 120)):
        rows = [changed(draw, seed=of(at)[0], position=of(at)[1]) for at in range(count)]
        found = np.bincount(kernel.choose([logits] * count, rows), minlength=vocab)
        assert not found[~kept].any()
        degrees = kept.sum() - 1
        chi_squared = ((found - expected)[kept] ** 2 / expected[kept]).sum()
        assert chi_squared < degrees + 7 * math.sqrt(2 * degrees)


@pytest.mark.parametrize(("seeds", "positions"), [(1, 0), (0, 1), (1, -1)])
def test_neighbouring_seeds_and_positions_draw_independently(seeds: int, positions: int) -> None:
    """Pairs of draws from 8 equal tokens: 64 cells, 63 degrees of freedom."""
    kernel = DrawKernel(native_kernels(), 2)
    count, logits = 10_000, torch.zeros(1, 8)
    draws = [draw_of(seed=at % 100, position=at // 100 + 1, temperature=1.0) for at in range(count)]
    others = [changed(draw, seed=draw.params.seed + seeds, position=draw.position + positions) for draw in draws]
    first, second = (np.array(kernel.choose([logits[0]] * count, each)) for each in (draws, others))
    found = np.bincount(first * 8 + second, minlength=64)
    assert ((found - count / 64) ** 2 / (count / 64)).sum() < 63 + 7 * math.sqrt(2 * 63)


def test_a_draw_is_the_same_alone_and_beside_others(kernel: DrawKernel) -> None:
    logits, source = logits_of(8, 3000), random.Random(5)
    draws = [random_draw(3000, source) for _ in range(8)]
    together = kernel.choose(logits, draws)
    alone = [kernel.choose(logits[at : at + 1], [draws[at]])[0] for at in reversed(range(8))]
    assert together == alone[::-1]


@pytest.mark.parametrize("temperature", [0.0, 1e-3])
def test_a_penalty_lowers_what_was_seen(temperature: float, kernel: DrawKernel) -> None:
    logits = torch.tensor([[3.0, 2.9, -1.0, 0.5, 0.4] + [-5.0] * 90])
    seen = torch.zeros(95, dtype=torch.uint8)
    seen[:2] = 1
    draw = draw_of(temperature=temperature, repetition_penalty=10.0, seen=seen)
    assert kernel.choose(logits, [draw]) == choose_tokens(logits, [draw]) == [3]


@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_a_mask_comes_before_everything_else(temperature: float, kernel: DrawKernel) -> None:
    logits = torch.tensor([[9.0, 8.0, -1.0, 0.5, 0.4] + [-3.0] * 90])
    mask = torch.zeros(95, dtype=torch.bool)
    mask[[2, 4, 80]] = True
    rows = [draw_of(seed=at, temperature=temperature, top_p=0.999, mask=mask) for at in range(200)]
    found = kernel.choose(logits.expand(200, -1), rows)
    assert set(found) == ({4} if temperature == 0 else {2, 4, 80})
    assert found == choose_tokens(logits.expand(200, -1), rows)
    for choose in (kernel.choose, choose_tokens):
        with pytest.raises(GraphError, match="allows no token"):
            choose(logits, [changed(rows[0], mask=torch.zeros(95, dtype=torch.bool))])


def test_logits_that_are_not_finite_are_refused(kernel: DrawKernel) -> None:
    for bad, at in every_pair([float("nan"), float("inf"), float("-inf")], [0, 250, 299]):
        with in_case(bad, at):
            logits = logits_of(3, 300)
            logits[1, at] = bad
            for choose in (kernel.choose, choose_tokens):
                with pytest.raises(GraphError, match="not finite"):
                    choose(logits, [draw_of()] * 3)


def test_the_first_of_equal_logits_is_the_likeliest(kernel: DrawKernel) -> None:
    logits = torch.zeros(2, 700)
    logits[1, 650:] = 1.0
    assert kernel.choose(logits, [draw_of()] * 2) == choose_tokens(logits, [draw_of()] * 2) == [0, 650]


def test_logits_as_large_as_float32_has_them_do_no_harm(kernel: DrawKernel) -> None:
    logits = torch.tensor([[3e38, -3e38, 1.0, 2e38]])
    draws = [
        draw_of(temperature=0.5, repetition_penalty=0.1, seen=torch.ones(4, dtype=torch.bool)),
        draw_of(temperature=1e-3),
    ]
    for draw in draws:
        assert kernel.choose(logits, [draw]) == choose_tokens(logits, [draw])
    assert kernel.choose(logits, [draws[1]]) == [0]
