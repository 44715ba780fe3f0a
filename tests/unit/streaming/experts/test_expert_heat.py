"""Counts of experts that fade: against the sum of powers that they stand for."""

import random

from graphcore.streaming.experts import cache
from graphcore.streaming.experts.cache import HALF_LIFE, ExpertHeat


def test_the_order_is_that_of_requests_that_halve_in_weight_every_half_life() -> None:
    """Three layers; 20,000 requests pass the point at which counts are scaled back several times."""
    rng = random.Random(0)
    heat, asked = ExpertHeat(3), list[tuple[int, list[int]]]()
    for number in range(20_000):
        request = number % 3, rng.sample(range(8), 2)
        heat.add(*request)
        asked.append(request)
    exact = {
        (layer, expert): sum(
            0.5 ** ((len(asked) - at) / (3 * HALF_LIFE))
            for at, (its_layer, experts) in enumerate(asked)
            if its_layer == layer and expert in experts
        )
        for layer in range(3)
        for expert in range(8)
    }
    assert sorted(exact, key=heat) == sorted(exact, key=lambda key: exact[key])
    assert heat._weight < cache.LARGEST


def test_who_was_never_asked_for_is_coldest() -> None:
    heat = ExpertHeat(1)
    heat.add(0, [1])
    for _ in range(100 * HALF_LIFE):
        heat.add(0, [2])
    assert heat((0, 3)) == 0 < heat((0, 1)) < heat((0, 2))
