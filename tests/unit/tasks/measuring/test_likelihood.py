"""Perplexity and its interval are the textbook's, by numpy."""

import math

import numpy as np
import pytest
import torch

from graphcore.tasks.measuring.likelihood import Likelihood

RANDOM = np.random.default_rng(3)


def test_windows_of_one_size_give_the_mean_and_its_standard_error() -> None:
    losses = RANDOM.gamma(2.0, 1.5, size=(12, 40))
    found = Likelihood.of([torch.tensor(row) for row in losses])
    means = losses.mean(axis=1)
    error = means.std(ddof=1) / math.sqrt(12)
    assert found.tokens == 480
    assert found.nll_mean == pytest.approx(losses.mean())
    assert found.perplexity == pytest.approx(np.exp(losses.mean()))
    assert found.bits_per_token == pytest.approx(np.log2(np.exp(losses.mean())))
    assert found.standard_error == pytest.approx(error)
    assert found.nll_interval == pytest.approx((losses.mean() - 1.959964 * error, losses.mean() + 1.959964 * error))


def test_windows_of_several_sizes_are_weighted_by_their_tokens() -> None:
    rows = [RANDOM.gamma(2.0, 1.5, size=size) for size in (64, 32, 32, 7)]
    found = Likelihood.of([torch.tensor(row) for row in rows])
    every = np.concatenate(rows)
    assert found.nll_mean == pytest.approx(every.mean())
    residuals = np.array([row.sum() - every.mean() * len(row) for row in rows])
    assert found.standard_error == pytest.approx(math.sqrt(4 / 3 * (residuals**2).sum()) / len(every))


def test_the_interval_holds_the_true_mean_as_often_as_it_says() -> None:
    draws, held = 800, 0
    for _ in range(draws):
        levels = RANDOM.normal(3.0, 0.5, size=40)  # passages differ: tokens of one window belong together
        rows = [torch.tensor(RANDOM.normal(level, 1.0, size=10)) for level in levels]
        low, high = Likelihood.of(rows).nll_interval or (0.0, 0.0)
        held += low < 3.0 < high
    assert 0.92 < held / draws < 0.965  # 0.95, less the normal approximation's 0.007, and 3 standard errors of 0.008


def test_one_window_has_no_interval_and_a_hopeless_model_no_overflow() -> None:
    found = Likelihood.of([torch.tensor([1000.0, 2000.0], dtype=torch.float64)])
    assert (found.nll_mean, found.perplexity) == (1500.0, math.inf)
    assert found.standard_error is found.nll_interval is None
