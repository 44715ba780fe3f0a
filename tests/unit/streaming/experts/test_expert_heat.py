"""Counts of experts that fade: against the sum of powers that they stand for, and who goes by them."""

import random

import pytest
from support.comparisons import steps_of

from graphcore.streaming.experts import cache
from graphcore.streaming.experts.cache import HALF_LIFE, ExpertHeat, Slots
from graphcore.streaming.experts.slots import ExpertPool


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


def test_the_expert_that_goes_is_the_coldest_that_is_not_pinned_and_of_equals_the_first_that_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against a search through all slots; counts are scaled back every few hundred lookups, and loads fail."""
    monkeypatch.setattr(cache, "LARGEST", 4.0)
    rng, evicted = random.Random(0), 0
    for num_slots in (1, 5, 20, 40):
        slots = Slots.of(ExpertPool((0, 1, 2), num_slots, 16))
        for _ in range(1500):
            layer = rng.randrange(3)
            experts = rng.sample(range(16), rng.randint(1, min(num_slots, 6)))
            slots.count(layer, experts)
            for expert in experts:
                slots.pin((layer, expert))
            missing = [expert for expert in experts if (layer, expert) not in slots.held]
            for expert in missing:
                before = dict(slots.held)
                slot = slots.take((layer, expert))
                if len(before) == num_slots:
                    idle = [key for key in before if key not in slots.pinned]  # in the order of their loads
                    assert before[min(idle, key=slots.heat)] == slot
                    evicted += 1
            for expert in experts:
                slots.unpin((layer, expert))
            for expert in missing:
                if rng.random() < 0.1:
                    slots.drop((layer, expert))
            assert len(slots._order) <= 5 * num_slots
        assert slots.heat.num_scalings >= 3
        assert len(slots.held) + len(slots.free) == num_slots
    assert evicted > 5000


def test_finding_the_expert_that_goes_does_not_look_through_all_slots() -> None:
    """In bytecode instructions, for 64 and for 1,024 slots that are all taken."""
    costs = []
    for num_slots in (64, 1024):
        rng, slots = random.Random(0), Slots.of(ExpertPool((0,), num_slots, 2048))
        for expert in range(num_slots):
            slots.count(0, [expert])
            slots.take((0, expert))
        steps = []
        for _ in range(60):
            slots.count(0, rng.sample(range(num_slots), 4))
            (expert,) = rng.sample(range(num_slots, 2048), 1)
            slots.count(0, [expert])
            if (0, expert) not in slots.held:
                steps.append(steps_of(lambda slots=slots, expert=expert: slots.take((0, expert))))
        costs.append(sum(steps[1:]) / len(steps[1:]))
    assert costs[1] < 1.5 * costs[0]
