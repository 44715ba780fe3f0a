"""Costs of steps are those measured, lines between them, and guesses beyond them."""

import pytest

from graphcore.engine.speculation.step_costs import KEPT, LATEST, StepCosts


def guess(tokens: int) -> float:
    return 1 + 0.5 * (tokens - 1)


def test_without_a_measurement_the_guess_counts() -> None:
    assert [StepCosts(guess).cost(tokens) for tokens in (1, 3)] == [1.0, 2.0]


def test_measured_costs_count_and_the_guess_goes_on_from_them() -> None:
    costs = StepCosts(guess)
    costs.record(1, 0.010)
    costs.record(5, 0.030)
    assert costs.cost(1) == 0.010
    assert costs.cost(3) == pytest.approx(0.020)
    assert costs.cost(9) == pytest.approx(0.030 * guess(9) / guess(5))


def test_one_slow_step_does_not_count() -> None:
    costs = StepCosts(guess)
    for seconds in (0.01, 9.0, 0.01):
        costs.record(2, seconds)
    assert costs.cost(2) == 0.01
    for _ in range(KEPT):
        costs.record(2, 0.5)
    assert costs.cost(2) == 0.5


def test_old_measurements_are_forgotten() -> None:
    costs = StepCosts(guess)
    costs.record(8, 100.0)
    for _ in range(LATEST):
        costs.record(1, 1.0)
    assert costs.cost(8) == guess(8)
