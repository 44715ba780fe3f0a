"""A draft model drafts where that pays, and tries again now and then where it did not."""

from collections.abc import Callable, Mapping, Sequence

import pytest

from graphcore.engine.request import Request
from graphcore.engine.speculation.draft_model import DraftModel, DraftToken
from graphcore.engine.speculation.self_speculation import ATTEMPT_AFTER, ATTEMPT_TOKENS, PLAIN_AFTER, SelfSpeculation
from graphcore.engine.speculation.speculation import StepRoom
from graphcore.engine.speculation.step_costs import StepCosts
from graphcore.tokenizer.text_stream import StopStrings


class Scripted(DraftModel):
    """A draft model of tokens 0, 1, 2, ... with a probability, which runs nothing."""

    def __init__(self, probability: float, last: int = 1000) -> None:
        self.probability, self.last = probability, last
        self.calls: list[str] = []
        self._drafted: dict[Request, int] = {}

    def begin(self, known: Mapping[Request, Sequence[int]]) -> None:
        self.calls.append("begin")
        self._drafted = dict.fromkeys(known, 0)

    def step(self, requests: Sequence[Request]) -> dict[Request, DraftToken | None]:
        self.calls.append("step")
        found = {
            one: DraftToken(self._drafted[one], self.probability, self._drafted[one] == self.last) for one in requests
        }
        for one in requests:
            self._drafted[one] += 1
        return dict(found)

    def end(self) -> None:
        self.calls.append("end")

    def forget(self, request: Request) -> None:
        self.calls.append("forget")


class Fixed(StepCosts):
    """Costs that no clock changes."""

    def record(self, tokens: int, seconds: float) -> None:
        """Record nothing."""


def request_of() -> Request:
    return Request((9,), 100, frozenset(), None, StopStrings([]))


def speculation_of(model: DraftModel, draft: float, row: float = 0.0) -> SelfSpeculation:
    return SelfSpeculation(Fixed(lambda tokens: 1 + row * (tokens - 1)), 12, model, Fixed(lambda rows: draft))


def proposed(
    speculation: SelfSpeculation,
    most: Mapping[Request, int],
    spare: int,
    reserve: Callable[[Request, int], bool] = lambda request, count: True,
) -> dict[Request, Sequence[int]]:
    return speculation.propose(StepRoom({one: [9] for one in most}, most, spare), reserve)


def test_it_drafts_as_far_as_it_may() -> None:
    one, model = request_of(), Scripted(1.0)
    assert proposed(speculation_of(model, 0.0), {one: 40}, 40)[one] == list(range(12))
    assert model.calls == ["begin", *["step"] * 12, "end"]
    assert proposed(speculation_of(model, 0.0), {one: 3}, 40)[one] == [0, 1, 2]
    assert proposed(speculation_of(model, 0.0), {one: 40}, 5)[one] == [0, 1, 2, 3, 4]
    assert proposed(speculation_of(Scripted(1.0, last=1), 0.0), {one: 40}, 40)[one] == [0, 1]


def test_pages_are_asked_for_before_each_step_and_none_end_the_draft() -> None:
    one, asked = request_of(), list[int]()

    def reserve(_request: Request, count: int) -> bool:
        asked.append(count)
        return count < 4

    model = Scripted(1.0)
    assert proposed(speculation_of(model, 0.0), {one: 40}, 40, reserve)[one] == [0, 1, 2]
    assert asked == [1, 2, 3, 4]
    assert model.calls == ["begin", *["step"] * 3, "end"]


def test_improbable_tokens_end_a_draft_early() -> None:
    one = request_of()
    sure, unsure = Scripted(1.0), Scripted(0.1)
    assert len(proposed(speculation_of(sure, 0.1), {one: 40}, 40)[one]) > 5
    proposed(speculation_of(unsure, 0.1), {one: 40}, 40)
    assert unsure.calls.count("step") < 3


@pytest.mark.thorough
def test_it_switches_off_where_drafts_are_wrong_and_tries_again_now_and_then() -> None:
    one, model = request_of(), Scripted(1.0)
    speculation = speculation_of(model, 0.0, 0.3)
    for _ in range(200):
        if proposed(speculation, {one: 40}, 15):
            speculation.record(one, 0)
    before = model.calls.count("begin")
    for _ in range(2 * (ATTEMPT_AFTER + 1)):
        if found := proposed(speculation, {one: 40}, 15):
            speculation.record(one, 0)
            assert len(found[one]) <= ATTEMPT_TOKENS
    assert model.calls.count("begin") == before + 2
    for _ in range(40 * ATTEMPT_AFTER):
        if found := proposed(speculation, {one: 40}, 15):
            speculation.record(one, len(found[one]))
    assert len(proposed(speculation, {one: 40}, 15)[one]) > ATTEMPT_TOKENS


def test_a_step_without_drafts_is_measured_now_and_then() -> None:
    one, costs = request_of(), StepCosts(lambda tokens: 1.0)
    speculation = SelfSpeculation(costs, 12, Scripted(1.0), Fixed(lambda rows: 0.0))
    found = list[int]()
    for _ in range(3 * (PLAIN_AFTER + 2)):
        draft = proposed(speculation, {one: 4}, 4).get(one, ())
        found.append(len(draft))
        speculation.record_step(1 + len(draft), 0.01, has_drafts=bool(draft))
        if draft:
            speculation.record(one, len(draft))
    assert found.count(0) == 3
    assert all(count == 4 for count in found if count)


def test_the_model_is_put_back_if_a_step_fails() -> None:
    class Broken(Scripted):
        def step(self, requests: Sequence[Request]) -> dict[Request, DraftToken | None]:
            raise ZeroDivisionError

    model = Broken(1.0)
    with pytest.raises(ZeroDivisionError):
        proposed(speculation_of(model, 0.0), {request_of(): 4}, 4)
    assert model.calls == ["begin", "end"]


def test_several_requests_draft_together_and_share_the_room() -> None:
    model, requests = Scripted(1.0), [request_of(), request_of(), request_of()]
    found = proposed(speculation_of(model, 0.0), dict.fromkeys(requests, 9), 10)
    assert sum(map(len, found.values())) == 10
    assert sorted(map(len, found.values())) == [3, 3, 4]


def test_an_ended_request_is_forgotten() -> None:
    model = Scripted(1.0)
    speculation_of(model, 0.0).forget(request_of())
    assert model.calls == ["forget"]
