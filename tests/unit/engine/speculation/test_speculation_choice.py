"""Draft tokens are taken while they are worth their time, those of the likeliest first."""

from collections.abc import Mapping, Sequence

import pytest

from graphcore.engine.request import Request
from graphcore.engine.speculation.drafter import Draft, Drafter
from graphcore.engine.speculation.prompt_lookup import MATCHES, LookupSpeculation
from graphcore.engine.speculation.speculation import StepRoom
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
        return Draft(range(most), [MATCHES.of(self._matched)] * most)


def request_of() -> Request:
    return Request((9,), 100, frozenset(), None, StopStrings([]))


def speculation_of(row_cost: float, matched: Mapping[Request, int]) -> LookupSpeculation:
    costs = StepCosts(lambda tokens: 1 + row_cost * (tokens - 1))
    return LookupSpeculation(costs, 15, lambda one: Fixed(matched[one]))


def proposed(speculation: LookupSpeculation, most: Mapping[Request, int], spare: int) -> dict[Request, Sequence[int]]:
    """Return the drafts of a step with one known token for each request, and pages for all of them."""
    return speculation.propose(StepRoom({one: [9] for one in most}, most, spare), lambda request, count: True)


def counts(found: Mapping[Request, Sequence[int]], *requests: Request) -> list[int]:
    return [len(found.get(request, ())) for request in requests]


def test_cheap_rows_take_whole_drafts_and_dear_ones_none() -> None:
    one = request_of()
    assert counts(proposed(speculation_of(0.01, {one: 30}), {one: 40}, 20), one) == [15]
    assert counts(proposed(speculation_of(0.01, {one: 30}), {one: 40}, 3), one) == [3]
    assert counts(proposed(speculation_of(0.01, {one: 30}), {one: 2}, 20), one) == [2]
    assert proposed(speculation_of(1.0, {one: 30}), {one: 40}, 20) == {}
    assert proposed(speculation_of(0.35, {one: 1}), {one: 40}, 20) == {}


def test_the_request_whose_tokens_are_likelier_gets_the_rows() -> None:
    sure, unsure = request_of(), request_of()
    found = proposed(speculation_of(0.05, {sure: 30, unsure: 1}), {sure: 9, unsure: 9}, 9)
    assert counts(found, sure, unsure) == [9, 0]


def test_it_switches_off_where_drafts_are_wrong_and_on_again_where_they_are_right() -> None:
    one = request_of()
    speculation = speculation_of(0.2, {one: 30})
    taken = []
    for _ in range(40):
        found = proposed(speculation, {one: 15}, 15)
        taken.append(counts(found, one)[0])
        if found:
            speculation.record(one, 0)
    assert taken[0] > 3
    assert taken[-1] == 0
    other = request_of()
    fresh = speculation_of(0.2, {other: 30})
    for _ in range(40):
        found = proposed(fresh, {other: 15}, 15)
        fresh.record(other, len(found[other]))
    assert counts(proposed(fresh, {other: 15}, 15), other) == [15]


def test_nothing_is_drafted_for_no_request() -> None:
    assert proposed(speculation_of(0.01, {}), {}, 16) == {}


def test_a_request_that_has_ended_is_forgotten() -> None:
    one = request_of()
    speculation = speculation_of(0.01, {one: 30})
    proposed(speculation, {one: 4}, 4)
    speculation.forget(one)
    with pytest.raises(KeyError):
        speculation.record(one, 1)
