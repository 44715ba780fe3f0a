"""Draft tokens are taken while they are worth their time, those of the likeliest first."""

from collections.abc import Mapping, Sequence

import pytest

from graphcore.engine.request import Request
from graphcore.engine.speculation.drafter import Draft, Drafter
from graphcore.engine.speculation.speculation import Speculation
from graphcore.engine.speculation.step_costs import StepCosts
from graphcore.tokenizer.text_stream import StopStrings


class Fixed(Drafter):
    """A drafter of tokens 0, 1, 2, ... with a number of matched tokens."""

    def __init__(self, matched: int) -> None:
        self.num_tokens, self._matched = 1, matched

    def append(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        self.num_tokens += len(token_ids)

    def propose(self, most: int) -> Draft:
        """Return as many tokens as allowed."""
        return Draft(range(most), self._matched)


def request_of() -> Request:
    return Request((9,), 100, frozenset(), None, StopStrings([]))


def speculation_of(row_cost: float, matched: Mapping[Request, int]) -> Speculation:
    return Speculation(StepCosts(lambda tokens: 1 + row_cost * (tokens - 1)), 15, lambda one: Fixed(matched[one]))


def counts(found: Mapping[Request, Sequence[int]], *requests: Request) -> list[int]:
    return [len(found.get(request, ())) for request in requests]


def test_cheap_rows_take_whole_drafts_and_dear_ones_none() -> None:
    one = request_of()
    assert counts(speculation_of(0.01, {one: 30}).propose({one: 40}, 1, 1, 20), one) == [15]
    assert counts(speculation_of(0.01, {one: 30}).propose({one: 40}, 1, 1, 3), one) == [3]
    assert counts(speculation_of(0.01, {one: 30}).propose({one: 2}, 1, 1, 20), one) == [2]
    assert speculation_of(1.0, {one: 30}).propose({one: 40}, 1, 1, 20) == {}
    assert speculation_of(0.35, {one: 1}).propose({one: 40}, 1, 1, 20) == {}


def test_the_request_whose_tokens_are_likelier_gets_the_rows() -> None:
    sure, unsure = request_of(), request_of()
    found = speculation_of(0.05, {sure: 30, unsure: 1}).propose({sure: 9, unsure: 9}, 2, 2, 9)
    assert counts(found, sure, unsure) == [9, 0]


def test_it_switches_off_where_drafts_are_wrong_and_on_again_where_they_are_right() -> None:
    one = request_of()
    speculation = speculation_of(0.2, {one: 30})
    taken = []
    for _ in range(40):
        found = speculation.propose({one: 15}, 1, 1, 15)
        taken.append(counts(found, one)[0])
        if found:
            speculation.record(one, taken[-1], 0)
    assert taken[0] > 3
    assert taken[-1] == 0
    other = request_of()
    fresh = speculation_of(0.2, {other: 30})
    for _ in range(40):
        found = fresh.propose({other: 15}, 1, 1, 15)
        fresh.record(other, len(found[other]), len(found[other]))
    assert counts(fresh.propose({other: 15}, 1, 1, 15), other) == [15]


def test_nothing_is_drafted_for_no_request() -> None:
    assert speculation_of(0.01, {}).propose({}, 0, 0, 16) == {}


def test_a_request_that_has_ended_is_forgotten() -> None:
    one = request_of()
    speculation = speculation_of(0.01, {one: 30})
    speculation.propose({one: 4}, 1, 1, 4)
    speculation.forget(one)
    with pytest.raises(KeyError):
        speculation.record(one, 1, 1)
