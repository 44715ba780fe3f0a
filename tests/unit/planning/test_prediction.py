"""Predicted seconds are those of the formula, worked out by hand."""

from dataclasses import replace

import pytest
from plan_cases import COSTS, PLENTY, equal_sizes, plan_request

from graphcore.planning.planner import plan_streaming
from graphcore.planning.prediction import Rates, predict, speed_in_words
from graphcore.planning.sizes import ExpertSizes

SIZES = equal_sizes(6, 1000)  # a token reads 6 groups, a head of 3000 and 11 bytes of vectors; 9000 of them stream


@pytest.mark.parametrize(
    ("prefetch", "mode", "memory", "seconds"),
    [
        (1, "async", 18022.0, 9.0),  # the copy is longer than 9011 / 18022 and hides it
        (1, "async", 450.55, 20.0),  # the other way round
        (0, "async", 18022.0, 9.5),
        (None, "sync", 18022.0, 9.5),
    ],
)
def test_copies_hide_behind_compute_where_something_is_read_ahead(
    prefetch: int | None, mode: str, memory: float, seconds: float
) -> None:
    plan = plan_streaming(SIZES, plan_request("on", 100_000, prefetch, mode), COSTS, PLENTY)
    predicted = predict(plan, Rates(link=1000.0, memory=memory))
    assert predicted.seconds == pytest.approx(seconds)
    assert predicted.tokens_per_second == pytest.approx(1 / seconds)


@pytest.mark.parametrize(("busy", "seconds"), [(0.0, 9.0), (0.5, 9.0), (0.9, 12.1), (1.0, 13.0)])
def test_copying_takes_processors_from_computing(busy: float, seconds: float) -> None:
    plan = plan_streaming(SIZES, plan_request("on", 100_000), COSTS, PLENTY)
    predicted = predict(plan, Rates(link=1000.0, memory=9011.0 / 4, link_busy=busy))
    assert (predicted.copy_seconds, predicted.compute_seconds) == (9.0, pytest.approx(4.0))
    assert predicted.seconds == pytest.approx(seconds)  # 9, or 4 + 9 x busy


def test_expanding_groups_reads_and_writes_memory_behind_their_copies() -> None:
    sizes = replace(SIZES, on_link=(600,) * 6)
    plan = plan_streaming(sizes, plan_request("on", 100_000), COSTS, PLENTY)
    predicted = predict(plan, Rates(link=1000.0, memory=4800.0))
    assert predicted.copy_seconds == pytest.approx((6 * 600 + 3000) / 1000 + 6 * (600 + 1000) / 4800)
    assert predicted.compute_seconds == pytest.approx(9011 / 4800)


def test_a_plan_without_streams_is_as_fast_as_memory() -> None:
    plan = plan_streaming(SIZES, plan_request("off"), COSTS, PLENTY)
    assert predict(plan, Rates(link=1.0, memory=9011.0)).seconds == pytest.approx(1.0)


def test_fetched_experts_wait_for_the_router() -> None:
    sizes = replace(SIZES, experts=ExpertSizes((100, 100), experts_per_layer=4, top_k=2, min_slots=2))
    asked = replace(plan_request("on", 100_000), expert_cache=400)
    predicted = predict(plan_streaming(sizes, asked, COSTS, PLENTY), Rates(link=1000.0, memory=9411.0))
    # 4 of 8 experts have slots, where 89.1 % of the routed ones are found: of 400 routed bytes 43.6 are fetched
    assert (predicted.copy_seconds, predicted.fetch_seconds) == (pytest.approx(9.0), pytest.approx(0.0436))
    assert predicted.seconds == pytest.approx(9.0436)


def test_sequences_share_what_moves_and_choose_other_experts() -> None:
    sizes = replace(SIZES, experts=ExpertSizes((100, 100), experts_per_layer=4, top_k=2, min_slots=2))
    plan = plan_streaming(sizes, replace(plan_request("on", 100_000), expert_cache=400), COSTS, PLENTY)
    rates = Rates(link=1000.0, memory=9411.0)
    one, two = predict(plan, rates), predict(plan, rates, 2)
    assert two.copy_seconds == one.copy_seconds
    assert two.fetch_seconds == pytest.approx(
        one.fetch_seconds * 1.5
    )  # of 4 experts 2, and of those left 2 once more: 3
    assert two.compute_seconds == pytest.approx(one.compute_seconds * 1.35)
    assert two.tokens_per_second == pytest.approx(2 / two.seconds)


def test_on_a_cpu_each_16_sequences_read_all_weights() -> None:
    plan = plan_streaming(SIZES, plan_request("off"), COSTS, PLENTY)
    rates = Rates(link=1.0, memory=9011.0)
    seconds = {count: predict(plan, rates, count).compute_seconds for count in (1, 16, 17, 32)}
    assert seconds[16] == pytest.approx(1 + 15 * 0.35)
    assert seconds[17] == pytest.approx(2 + 15 * 0.35)
    assert seconds[32] == pytest.approx(2 * seconds[16])


def test_a_speed_has_three_significant_digits_and_no_exponent() -> None:
    shown = {0.00002: "0.00002", 0.4977: "0.498", 31.46: "31.5", 860.4: "860", 3444.0: "3,440", 267_400.0: "267,000"}
    assert {speed: speed_in_words(speed) for speed in shown} == shown
