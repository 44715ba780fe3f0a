"""A draft goes on while more tokens for the time are expected of it."""

from collections.abc import Sequence
from itertools import accumulate

import pytest

from graphcore.engine.speculation.draft_depth import Chain, worth_drafting

FLAT = [1.0] * 33


def depth(share: float, draft: float, check: Sequence[float] = FLAT, least_gain: float = 1.0) -> int:
    """Return how many steps one request drafts whose tokens all have the same share."""
    gains = list(accumulate((share**at for at in range(1, len(check))), initial=1.0))
    taken = 0
    while worth_drafting(
        [Chain(share**taken, share, len(check) - 1 - taken)],
        gains[taken],
        taken * draft,
        check[taken:],
        lambda rows: draft,
        least_gain,
    ):
        taken += 1
    return taken


@pytest.mark.parametrize(("share", "draft"), [(0.8, 0.05), (0.95, 0.1), (0.6, 0.3), (0.9, 0.4)])
def test_it_drafts_as_many_tokens_as_give_the_most_for_the_time(share: float, draft: float) -> None:
    rates = [sum(share**at for at in range(count + 1)) / (1 + count * draft) for count in range(len(FLAT))]
    assert depth(share, draft) == max(range(len(rates)), key=rates.__getitem__) > 0


def test_it_drafts_nothing_where_that_loses() -> None:
    assert depth(0.9, 1.0) == 0
    assert depth(0.2, 0.3) == 0
    assert depth(0.5, 0.49, least_gain=1.03) == 0
    assert depth(0.5, 0.49) > 0


def test_dear_checks_shorten_drafts() -> None:
    dear = [1 + 0.2 * more for more in range(33)]
    assert 0 < depth(0.9, 0.1, dear) < depth(0.9, 0.1)


def test_it_looks_beyond_a_step_that_alone_would_lose() -> None:
    jump = [1.0, *[1.9] * 32]  # the first further token is dear, and all others are free
    assert worth_drafting([Chain(1.0, 0.99, 32)], 1.0, 0.0, jump, lambda rows: 0.05, 1.0) == 1
    assert worth_drafting([Chain(1.0, 0.99, 1)], 1.0, 0.0, [1.0, 2.1], lambda rows: 0.05, 1.0) == 0


def test_only_the_likeliest_drafts_go_on() -> None:
    chains = [Chain(0.9, 0.9, 4), Chain(0.8, 0.9, 4), Chain(0.01, 0.9, 4)]
    check = [1 + 0.1 * more for more in range(13)]
    assert worth_drafting(chains, 3.0, 0.0, check, lambda rows: 0.05 * rows, 1.0) == 2
    assert worth_drafting([], 3.0, 0.0, check, lambda rows: 0.05, 1.0) == 0


def test_a_draft_that_is_full_gains_nothing_more() -> None:
    assert Chain(0.5, 0.8, 2).gain(5) == pytest.approx(0.5 * (0.8 + 0.64))
    assert worth_drafting([Chain(1.0, 1.0, 0)], 1.0, 0.0, FLAT, lambda rows: 0.01, 1.0) == 0
