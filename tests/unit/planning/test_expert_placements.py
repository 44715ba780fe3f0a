"""What of a mixture of experts is kept on the device where kernels read the others in RAM."""

from dataclasses import replace

import pytest
from plan_cases import COSTS, KV, PLENTY, equal_sizes, plan_request

from graphcore.planning.plan_record import planned_groups
from graphcore.planning.planner import plan_streaming
from graphcore.planning.prediction import Rates, predict
from graphcore.planning.sizes import ExpertSizes
from graphcore.planning.tier import host_nbytes
from graphcore.tasks.report.plan_report import tier_rows
from graphcore.weights.groups import split_layers
from graphcore.weights.plan import Plan, bytes_per_token, expected_bytes_per_token

EXPERTS = ExpertSizes(expert_nbytes_by_layer=(100, 100, 80), experts_per_layer=16, top_k=2, min_slots=2)
MIXTURE = replace(equal_sizes(6, 1000), experts=EXPERTS)
FIXED = KV * 100 + 77 + 33 + 11  # kv, workspace, buffers and vectors of `equal_sizes`
ALL_BUT_EXPERTS = 6000 + 3000 + FIXED  # the table gathered
LAYERS = split_layers(6, 1)


def mapped(room: int, cap: int | None = None, policy: str = "auto", may_have_slots: bool = False) -> Plan:
    """Return the plan whose budget leaves so many bytes for experts."""
    asked = replace(plan_request(policy, ALL_BUT_EXPERTS + room), has_device_readable_experts=True, expert_cache=cap)
    return plan_streaming(MIXTURE, replace(asked, has_layer_slots=may_have_slots), COSTS, PLENTY)


@pytest.mark.parametrize(("room", "slots"), [(600, 6), (699, 6), (700, 7), (4000, 40)])
def test_all_room_is_for_slots_once_each_layer_has_as_many_as_a_token_has_experts(room: int, slots: int) -> None:
    plan = mapped(room, may_have_slots=True)
    assert plan.experts is not None
    assert plan.experts.are_device_readable
    assert plan.experts.has_layer_slots
    assert plan.experts.num_slots == slots
    assert (plan.experts.num_layers, plan.experts.num_experts, plan.resident_expert_nbytes) == (3, 48, 0)
    assert plan.total_nbytes == ALL_BUT_EXPERTS + 100 * slots
    less = mapped(599, may_have_slots=True)
    assert less == mapped(599)
    assert less.experts is not None
    assert not less.experts.has_layer_slots


def test_slots_take_no_more_than_was_asked_for_and_no_more_than_there_are_experts() -> None:
    capped, whole = mapped(4000, cap=1234, may_have_slots=True), mapped(100_000, policy="on", may_have_slots=True)
    assert capped.experts is not None
    assert whole.experts is not None
    assert (capped.experts.num_slots, whole.experts.num_slots) == (12, 48)
    assert whole.experts.is_all
    assert expected_bytes_per_token(whole) == whole.groups.streamed_nbytes


def test_slots_are_predicted_by_the_replayed_rates_and_all_experts_wait_in_ram() -> None:
    plan = mapped(1200, may_have_slots=True)  # a quarter of 48
    assert plan.experts is not None
    assert plan.experts.expected_hit_rate == pytest.approx(0.77)
    assert expected_bytes_per_token(plan) == pytest.approx(2 * 280 * 0.23)
    assert predict(plan, Rates(10.0, 100.0)).compute_seconds == pytest.approx(MIXTURE.read_nbytes / 100)
    assert host_nbytes(plan) == 48 * 100 + 3000  # and the table
    places = {group.name: (group.nbytes, group.place) for group in planned_groups(plan, LAYERS, EXPERTS.total_nbytes)}
    assert places["experts"] == (EXPERTS.total_nbytes, "cached")
    notes = {name: note for name, _, note in tier_rows(plan, free=0)}
    assert notes["expert cache"].startswith("12 of 48 experts; a decode step fetches the others by itself, so all of")


@pytest.mark.parametrize(
    ("room", "layers", "slots"), [(200, 0, 2), (399, 0, 3), (400, 0, 4), (1799, 0, 4), (1800, 1, 2), (3400, 2, 2)]
)
def test_whole_layers_stay_first_and_a_fourth_of_one_has_slots(room: int, layers: int, slots: int) -> None:
    plan = mapped(room)
    assert plan.experts is not None
    assert plan.experts.are_device_readable
    assert (plan.experts.num_layers, plan.experts.num_slots) == (3 - layers, slots)
    assert plan.resident_expert_nbytes == 1600 * layers
    assert plan.total_nbytes == ALL_BUT_EXPERTS + 1600 * layers + 100 * slots


def test_a_token_moves_what_it_is_routed_to_in_the_layers_that_are_left() -> None:
    plan = mapped(1800)
    assert plan.experts is not None
    assert (plan.experts.num_experts, plan.experts.routed_nbytes) == (32, 2 * (100 + 80))
    assert bytes_per_token(plan) == expected_bytes_per_token(plan) == 360
    assert not plan.experts.is_all


def test_experts_take_no_more_than_was_asked_for() -> None:
    plan = mapped(100_000, cap=1900)
    assert plan.experts is not None
    assert (plan.experts.num_layers, plan.experts.num_slots) == (2, 3)


def test_all_stay_where_all_fit_unless_layers_stream() -> None:
    assert mapped(3000 + 16 * 280).experts is None
    on = mapped(100_000, policy="on").experts
    assert on is not None
    assert on.num_layers == 1


def test_mapped_experts_take_the_link_s_time_and_none_of_the_memory_s() -> None:
    plan = mapped(1800)
    predicted = predict(plan, Rates(link=10.0, memory=100.0))
    assert predicted.fetch_seconds == pytest.approx(360 / 10)
    assert predicted.compute_seconds == pytest.approx((MIXTURE.read_nbytes - 360) / 100)


def test_a_plan_s_report_says_where_experts_lie() -> None:
    plan = mapped(1800)
    places = {group.name: (group.nbytes, group.place) for group in planned_groups(plan, LAYERS, EXPERTS.total_nbytes)}
    assert places["experts"] == (1600, "resident")
    assert places["experts of the last 2"] == (16 * 180, "mapped")
    notes = {name: note for name, _, note in tier_rows(plan, free=0)}
    assert notes["expert cache"] == "2 of 32 experts; a token's are read in RAM, in 2 layers"
