"""Predicted speeds with a draft model are those of the formula, worked out by hand."""

from dataclasses import replace

import pytest
from plan_cases import COSTS, PLENTY, equal_sizes, plan_request

from graphcore.planning import draft_prediction
from graphcore.planning.draft_prediction import predict_drafts
from graphcore.planning.planner import plan_streaming
from graphcore.planning.prediction import Rates
from graphcore.planning.sizes import DraftSizes
from graphcore.weights.plan import Plan

SIZES = equal_sizes(6, 1000)  # a token reads 6 groups, a head of 3000 and 11 bytes of vectors; 9000 of them stream
DRAFT = DraftSizes((250,) * 6, 800, 2300)
RATES = Rates(link=1000.0, memory=9011.0)  # copying takes 9 s, computing 1 s


def plans() -> tuple[Plan, Plan]:
    """Return a plan with a draft model, and one without; everything streams, through one slot."""
    request = plan_request("on", 100_000, prefetch=0)
    plain = plan_streaming(SIZES, request, COSTS, PLENTY)
    return plan_streaming(replace(SIZES, draft=DRAFT), request, COSTS, PLENTY), plain


def test_drafts_and_their_check_take_the_time_of_what_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_prediction, "ACCEPTANCE", {"q4_k": 0.5})
    plan, plain = plans()
    assert (plan.draft_nbytes, plain.draft_nbytes) == (6 * 250 + 800, 0)
    found = predict_drafts(plan, plain, RATES, "q4_k", 1)
    assert found is not None
    assert found.draft_seconds == pytest.approx((2300 + 11) / 9011)
    assert (found.draft_tokens, found.tokens_per_step) == (1, 1.5)
    ahead = found.draft_seconds  # the slot is filled meanwhile: a second would fill it
    assert found.check_seconds == pytest.approx(9 - ahead + 1.35)
    assert found.tokens_per_second == pytest.approx(1.5 / (9 + 1.35))
    assert found.tokens_per_second_without == pytest.approx(1 / 10)


def test_no_more_is_read_ahead_than_slots_hold_and_the_best_depth_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_prediction, "ACCEPTANCE", {"q4_k": 0.9})
    plan, plain = plans()
    found = predict_drafts(plan, plain, RATES, "q4_k", 31)
    assert found is not None
    draft = (2300 + 11) / 9011

    def speed(count: int) -> float:
        rows = -(-(1 + count) // 16)
        computing = rows + (1 + count - rows) * 0.35
        seconds = count * draft + max(0.0, 9 - min(1.0, count * draft)) + computing
        return (1 - 0.9 ** (1 + count)) / 0.1 / seconds

    assert found.draft_tokens == max(range(32), key=speed)
    assert found.tokens_per_second == pytest.approx(speed(found.draft_tokens))


def test_drafts_that_are_seldom_accepted_do_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_prediction, "ACCEPTANCE", {"q2_k": 0.01})
    plan, plain = plans()
    found = predict_drafts(plan, plain, RATES, "q2_k", 31)
    assert found is not None
    assert (found.draft_tokens, found.tokens_per_step) == (0, 1.0)
    assert predict_drafts(plan, plain, RATES, "q8_0", 31) is None
