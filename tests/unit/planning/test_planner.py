"""The planner against a plain account of bytes and against every subset of groups. Seed: FR-004, FR-005, T-005, T-006.

The seed's memory budget "never exceeded" is a property here; that the engine keeps to its plan is measured elsewhere.
"""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plan_cases import COSTS, KV, PLENTY, account, any_request, any_sizes, equal_sizes, fewest_streamed, plan_request
from support.cases import in_case

from graphcore.errors import PlanError
from graphcore.planning.machine import Memory
from graphcore.planning.planner import Costs, PlanRequest, budget_of, plan_streaming
from graphcore.planning.sizes import DraftSizes, ExpertSizes, WeightSizes
from graphcore.weights.plan import GIB, ExpertPlan, Plan, bytes_per_token, expected_bytes_per_token

FIXED = KV * 100 + 77 + 33 + 11  # kv, workspace, buffers and vectors of `equal_sizes`
SIZES = equal_sizes(6, 1000)


def plan_of(sizes: WeightSizes, asked: PlanRequest, costs: Costs = COSTS, memory: Memory = PLENTY) -> Plan:
    return plan_streaming(sizes, asked, costs, memory)


def smallest_budget(sizes: WeightSizes, asked: PlanRequest) -> int:
    """Return the first budget that works, found by halving, without the planner's own word."""
    too_small, enough = 0, 1 << 40
    while enough - too_small > 1:
        middle = (too_small + enough) // 2
        try:
            plan_of(sizes, replace(asked, budget=middle))
            enough = middle
        except PlanError:
            too_small = middle
    return enough


@given(any_sizes(), any_request(), st.integers(1, 400_000))
def test_a_plan_is_never_above_its_budget_and_counts_every_byte(
    sizes: WeightSizes, asked: PlanRequest, budget: int
) -> None:
    try:
        plan = plan_of(sizes, replace(asked, budget=budget))
    except PlanError:
        assume(False)
    assert plan.total_nbytes <= budget
    assert plan.total_nbytes == account(plan, sizes)
    assert plan.kv_nbytes == KV * (plan.context_length or 0)
    assert plan.groups.num_slots <= len(plan.groups.streamed)


@settings(deadline=None)  # forty plans and more
@given(any_sizes(), any_request())
def test_the_refusal_names_the_smallest_budget_that_works(sizes: WeightSizes, asked: PlanRequest) -> None:
    smallest = smallest_budget(sizes, asked)
    with pytest.raises(PlanError) as caught:
        plan_of(sizes, replace(asked, budget=1))
    assert f" {smallest} bytes" in str(caught.value)
    assert plan_of(sizes, replace(asked, budget=smallest)).total_nbytes == smallest
    with pytest.raises(PlanError):
        plan_of(sizes, replace(asked, budget=smallest - 1))


def rank(plan: Plan) -> tuple[float, ...]:
    """Return what more budget may only make smaller: first the context is kept, then the prefetch, then bytes."""
    slots = plan.groups.num_slots if plan.groups.streamed else 9
    return (-(plan.context_length or 0), -min(slots, 2), plan.groups.streamed_nbytes, expected_bytes_per_token(plan))


@given(any_sizes(), any_request(), st.integers(1, 400_000), st.integers(0, 100_000))
def test_more_budget_never_makes_a_plan_worse(sizes: WeightSizes, asked: PlanRequest, budget: int, more: int) -> None:
    try:
        less = plan_of(sizes, replace(asked, budget=budget))
    except PlanError:
        assume(False)
    richer = plan_of(sizes, replace(asked, budget=budget + more))
    assert (richer.context_length or 0) >= (less.context_length or 0)
    if richer.context_length == less.context_length and asked.prefetches != (1, 0):
        assert richer.groups.streamed_nbytes <= less.groups.streamed_nbytes
        if richer.groups.streamed_nbytes == less.groups.streamed_nbytes:
            assert expected_bytes_per_token(richer) <= expected_bytes_per_token(less)
    elif richer.context_length == less.context_length:
        assert rank(richer) <= rank(less)


@given(st.integers(1, 7), st.sampled_from([0, 1, 2]), st.integers(1, 20_000))
def test_auto_streams_as_little_as_any_choice_of_groups_could(num_groups: int, prefetch: int, budget: int) -> None:
    sizes = equal_sizes(num_groups, 1000)
    room = budget - FIXED
    fewest = fewest_streamed(sizes, prefetch + 1, room)
    asked = plan_request("auto", budget, prefetch)
    if fewest is None:
        with pytest.raises(PlanError):
            plan_of(sizes, asked)
        return
    plan = plan_of(sizes, asked)
    assert plan.groups.streamed_nbytes == fewest
    assert plan.groups.is_embedding_resident == (
        plan.total_nbytes - (3000 if plan.groups.is_embedding_resident else 0) + 3000 <= budget
    )


def test_on_streams_every_layer_group_and_the_head_through_two_slots() -> None:
    plan = plan_of(SIZES, plan_request("on", 100_000))
    assert (plan.groups.streamed, plan.groups.num_slots, plan.groups.slot_nbytes) == (tuple(range(1, 10)), 2, 1000)
    assert (plan.groups.is_embedding_resident, plan.groups.is_head_resident, plan.groups.resident_nbytes) == (
        False,
        False,
        0,
    )
    assert bytes_per_token(plan) == expected_bytes_per_token(plan) == 9000
    assert plan.total_nbytes == 2 * 1000 + FIXED


def test_auto_keeps_all_where_all_fits_and_one_byte_less_makes_the_table_be_gathered() -> None:
    whole = 6000 + 3000 + 3000 + FIXED - 33  # without read buffers
    plan = plan_of(SIZES, plan_request("auto", whole))
    assert (plan.groups.streamed, plan.groups.num_slots, plan.is_streaming, bytes_per_token(plan)) == ((), 0, False, 0)
    assert plan.total_nbytes == whole
    assert plan.notes == ("streaming=auto: everything fits, so nothing streams",)
    less = plan_of(SIZES, plan_request("auto", whole - 1))
    assert (less.groups.streamed, less.groups.is_embedding_resident, less.is_streaming) == ((), False, True)


def test_streaming_on_says_in_one_line_what_auto_gives_where_everything_fits() -> None:
    sizes = equal_sizes(4, 1000)
    resident = plan_streaming(sizes, plan_request("auto"), COSTS, PLENTY)
    (note,) = plan_streaming(sizes, plan_request("on", resident.peak_nbytes), COSTS, PLENTY).notes
    assert note == (
        "streaming=on reads 6.84 KiB for each token; everything fits in 10.83 KiB, so streaming=auto would read nothing"
    )
    assert plan_streaming(sizes, plan_request("on", resident.peak_nbytes - 1), COSTS, PLENTY).notes == ()


def test_a_draft_has_copies_of_what_streams_and_takes_their_room_from_resident_groups() -> None:
    sizes = replace(SIZES, draft=DraftSizes((300,) * 6, 1500, 3300))
    on = plan_of(sizes, plan_request("on", 100_000))
    assert (on.draft_nbytes, on.total_nbytes) == (6 * 300 + 1500, 2 * 1000 + 6 * 300 + 1500 + FIXED)
    budget = 2 * 1000 + 3000 + 3000 + FIXED  # slots, head and three groups
    plain, drafting = (plan_of(one, plan_request("auto", budget)) for one in (SIZES, sizes))
    assert (plain.groups.streamed_nbytes, plain.draft_nbytes) == (3000, 0)
    assert (len(drafting.groups.streamed), drafting.groups.is_head_resident) == (5, True)
    assert drafting.draft_nbytes == 5 * 300
    with pytest.raises(PlanError, match="draft model 3"):
        plan_of(sizes, plan_request("on", 1000))


def test_a_draft_of_a_resident_model_copies_all_and_auto_leaves_it_out_where_it_does_not_fit() -> None:
    sizes = replace(SIZES, draft=DraftSizes((300,) * 6, 1500, 3300))
    whole = 6000 + 3000 + 3000 + FIXED - 33
    assert plan_of(sizes, plan_request("off", whole + 3300)).draft_nbytes == 3300
    assert plan_of(sizes, plan_request("auto", whole + 3300)).draft_nbytes == 3300
    without = plan_of(sizes, plan_request("auto", whole + 3299))
    assert (without.draft_nbytes, without.groups.streamed, without.is_streaming) == (0, (), False)
    with pytest.raises(PlanError, match="draft model"):
        plan_of(sizes, plan_request("off", whole + 3299))


@pytest.mark.parametrize(("budget", "slots"), [(2000 + FIXED, 2), (1999 + FIXED, 1), (1000 + FIXED, 1)])
def test_auto_prefetch_reads_one_group_ahead_where_that_fits(budget: int, slots: int) -> None:
    plan = plan_of(SIZES, plan_request("on", budget))
    assert plan.groups.num_slots == slots
    assert any("room for one slot" in note for note in plan.notes) == (slots == 1)


def test_prefetch_has_a_slot_each_but_no_more_than_there_are_groups() -> None:
    assert plan_of(SIZES, plan_request("on", 100_000, prefetch=4)).groups.num_slots == 5
    assert plan_of(equal_sizes(1, 10), plan_request("on", 100_000, prefetch=8)).groups.num_slots == 4
    assert plan_of(SIZES, plan_request("on", 100_000, mode="sync")).groups.num_slots == 1
    with pytest.raises(PlanError, match=rf"is {5000 + FIXED} bytes; a smaller layer_group_size, prefetch, "):
        plan_of(SIZES, plan_request("on", 4999 + FIXED, prefetch=4))


def test_a_remainder_group_streams_through_a_slot_of_the_largest() -> None:
    sizes = WeightSizes(500, 90, (90,), False, (400, 400, 130), 11)
    plan = plan_of(sizes, plan_request("on", 100_000))
    assert (plan.groups.slot_nbytes, plan.groups.streamed_nbytes) == (400, 400 + 400 + 130 + 90)
    assert [plan.groups.nbytes_of(number) for number in (0, *plan.groups.streamed)] == [500, 400, 400, 130, 90]


def test_decode_programs_count_with_the_context_that_is_planned() -> None:
    costs = replace(COSTS, program_nbytes=lambda context: 50 + 2 * context)
    plain, plan = plan_of(SIZES, plan_request("on")), plan_of(SIZES, plan_request("on"), costs)
    assert plan.other.program_nbytes == 50 + 2 * 100
    assert plan.total_nbytes == plain.total_nbytes + 250
    least = 1000 + 33 + 77 + 11 + KV * 1024 + 50 + 2 * 1024
    asked = replace(plan_request("on", least), context_length=4096, may_halve_context=True)
    assert plan_of(SIZES, asked, costs).context_length == 1024
    assert plan_of(SIZES, replace(asked, budget=least - 1), costs).context_length == 512


def test_a_context_that_nobody_asked_for_is_halved_until_it_fits() -> None:
    asked = replace(plan_request("on", 2000 + 33 + 77 + 11 + KV * 1500), context_length=4096, may_halve_context=True)
    plan = plan_of(SIZES, asked)
    assert (plan.context_length, plan.groups.num_slots) == (1024, 2)
    assert plan.notes == ("context_length=1024, because 4096 tokens of KV cache do not fit in the budget",)
    assert replace(asked, context_length=3000).context_lengths == (3000, 1500, 750)
    assert replace(asked, context_length=700).context_lengths == (700,)
    with pytest.raises(PlanError, match="at context_length=4096"):
        plan_of(SIZES, replace(asked, may_halve_context=False))


EXPERTS = ExpertSizes(expert_nbytes_by_layer=(100, 100, 80), experts_per_layer=8, top_k=2, min_slots=2)
MIXTURE = replace(SIZES, experts=EXPERTS)
ALL_BUT_EXPERTS = 6000 + 3000 + FIXED  # the table gathered


def test_a_default_context_grows_while_its_cache_takes_half_of_what_resident_weights_leave() -> None:
    longer = (1600, 800, 400)
    for policy, keeps in (("off", "all"), ("auto", "most"), ("on", "nothing")):
        asked = replace(plan_request(policy), longer_contexts=longer)
        resident = plan_of(SIZES, plan_request("off")).peak_nbytes - KV * 100
        for context in (*longer, 100):
            enough = resident + 2 * KV * context if context > 100 else resident + KV * 100
            with in_case(policy, context):
                if keeps == "nothing":
                    assert plan_of(SIZES, replace(asked, budget=enough)).context_length == 100
                    continue
                found = plan_of(SIZES, replace(asked, budget=enough))
                assert (found.context_length, found.is_streaming, found.notes) == (context, False, found.notes)
                assert not any("do not fit" in note for note in found.notes)
                if context > 100:
                    below = plan_of(SIZES, replace(asked, budget=enough - 1)).context_length
                    assert below == (100 if context == 400 else context // 2)


def test_experts_get_what_the_budget_leaves_over() -> None:
    fewest = plan_of(MIXTURE, plan_request("auto", ALL_BUT_EXPERTS + 200))
    assert fewest.experts is not None
    assert (fewest.groups.streamed, fewest.experts.num_slots) == ((), 2)
    assert bytes_per_token(fewest) == 2 * (100 + 100 + 80)
    assert expected_bytes_per_token(fewest) == pytest.approx(560 * (1 - 2 / 6))  # two slots find at most two of six
    more = plan_of(MIXTURE, plan_request("auto", ALL_BUT_EXPERTS + 1299))
    assert more.experts is not None
    assert (more.groups.streamed, more.experts.num_slots, more.experts.nbytes) == ((), 12, 1200)
    assert expected_bytes_per_token(more) == pytest.approx(560 * (1 - 0.891))  # half of all experts have slots
    assert bytes_per_token(more) == 560


@pytest.mark.parametrize(
    ("num_slots", "num_routed", "rate"),
    [
        (0, 20, 0.0),
        (15, 20, 0.135),  # half way to 3 %
        (30, 20, 0.270),
        (200, 20, 0.716),  # half way from 15 to 25 %
        (750, 20, 0.9455),  # half way from 50 to 100 %
        (1000, 20, 1.0),
        (30, 120, 0.25),  # replays say 27 %, but a token's 120 can find no more than 30
    ],
)
def test_hits_follow_the_replayed_rates_and_are_never_more_than_slots(
    num_slots: int, num_routed: int, rate: float
) -> None:
    experts = ExpertPlan(num_slots, 10, num_experts=1000, num_layers=5, routed_nbytes=200, num_routed=num_routed)
    assert experts.expected_hit_rate == pytest.approx(rate)
    assert replace(experts, are_device_readable=True).expected_hit_rate == 0.0


def test_all_experts_stay_where_all_fits_unless_fewer_were_asked_for() -> None:
    whole = ALL_BUT_EXPERTS - 33 + 3000 + 8 * 280
    plan = plan_of(MIXTURE, plan_request("auto", whole))
    assert (plan.experts, plan.resident_expert_nbytes, plan.is_streaming) == (None, 8 * 280, False)
    assert plan.total_nbytes == whole
    capped = plan_of(MIXTURE, replace(plan_request("auto", 10 * whole), expert_cache=750))
    assert capped.experts is not None
    assert (capped.experts.num_slots, capped.groups.is_embedding_resident) == (7, True)
    on = plan_of(MIXTURE, plan_request("on", 10 * whole))
    assert on.experts is not None
    assert (on.experts.num_slots, on.experts.is_all, expected_bytes_per_token(on)) == (24, True, 9000)


def test_an_expert_cache_without_experts_is_said_to_have_no_effect() -> None:
    plan = plan_of(SIZES, replace(plan_request("on", 100_000), expert_cache=750))
    assert "streaming.expert_cache has no effect: the model has no experts" in plan.notes


@pytest.mark.parametrize("asked", [10 * GIB + 1, 17 * GIB])
def test_a_budget_above_what_can_be_taken_is_refused_and_the_largest_that_is_named_works(asked: int) -> None:
    memory = Memory("cuda:0", free_nbytes=10 * GIB, physical_nbytes=16 * GIB)
    with pytest.raises(PlanError) as caught:
        plan_of(SIZES, plan_request("on", asked), memory=memory)
    said = f"is {asked / GIB:.2f} GiB, but 10.00 GiB can be taken on cuda:0, which has 16.00 GiB in all"
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    largest = int(str(caught.value).partition("the largest that works now is ")[2].split()[0])
    assert 10 * GIB - 10**6 < largest <= 10 * GIB
    assert plan_of(SIZES, plan_request("on", largest), memory=memory).budget == largest


def test_a_load_that_takes_more_than_what_stays_is_counted() -> None:
    costs = replace(COSTS, loading_nbytes=50_000)
    whole = 6000 + 3000 + 3000 + 11  # all weights, before the cache and the workspace are there
    plan = plan_of(SIZES, plan_request("off", 100_000), costs)
    assert (plan.load_peak_nbytes, plan.peak_nbytes) == (whole + 50_000, whole + 50_000)
    with pytest.raises(PlanError, match=f"while loading .*{whole + 50_000} bytes would do"):
        plan_of(SIZES, plan_request("off", whole + 49_999), costs)
    streamed = plan_of(SIZES, plan_request("on", 60_000), costs)
    assert streamed.load_peak_nbytes == 50_000 + 11
    on_gpu = plan_of(SIZES, plan_request("off", 60_000), costs, replace(PLENTY, device="cuda:0"))
    assert (on_gpu.load_peak_nbytes, on_gpu.peak_nbytes) == (50_000, on_gpu.total_nbytes)


def test_an_auto_budget_is_a_share_of_what_is_free() -> None:
    assert budget_of(plan_request("on"), Memory("cpu", 1000, 2000)) == 900
    assert budget_of(plan_request("auto"), Memory("cuda:1", 1000, 2000)) == 950
    assert budget_of(plan_request("off"), Memory("cpu", 1000, 2000)) == 1000


def test_refusals_say_what_is_needed_and_what_there_is() -> None:
    big = WeightSizes(GIB, GIB, (GIB // 2,) * 2, False, (GIB,) * 8, GIB // 4)
    with pytest.raises(PlanError) as caught:
        plan_of(big, plan_request("off", 4 * GIB))
    assert "streaming=off needs 10.25 GiB on cpu (weights 10.25 GiB, " in str(caught.value)
    assert ", the budget is 4.00 GiB; use streaming=auto, or a smaller model" in str(caught.value)
    with pytest.raises(PlanError) as caught:
        plan_of(big, plan_request("on"), memory=Memory("cpu", GIB, 16 * GIB))
    assert "streaming=on needs 1.25 GiB on cpu (weights 256.0 MiB, slots 1.00 GiB, " in str(caught.value)
    assert ", 921.6 MiB are free; the smallest streaming.memory_budget that works at context_length=100 is " in str(
        caught.value
    )
    assert "\n" not in str(caught.value)


def test_slots_hold_two_turns_and_the_head_if_other_processes_run_layers_between() -> None:
    def slots_of(**changes: Any) -> int:
        return plan_of(SIZES, replace(plan_request("on"), **changes)).groups.num_slots

    assert slots_of() == 2
    assert slots_of(groups_of_turn=1) == 2 + 3  # of the head's three slices
    assert slots_of(groups_of_turn=2) == 4 + 3
    assert slots_of(groups_of_turn=4) == 6 + 3  # all that streams
    assert slots_of(groups_of_turn=2, prefetch=1) == 2
    assert slots_of(groups_of_turn=2, mode="sync") == 1
    least = FIXED + 4 * 1000
    assert slots_of(groups_of_turn=2, budget=least) == 2  # there is no room for more


def test_a_head_that_stays_takes_no_slots() -> None:
    asked = replace(plan_request("auto", FIXED + 7 * 1000), groups_of_turn=1)
    groups = plan_of(replace(SIZES, embedding=0, has_table=False), asked).groups
    assert groups.is_head_resident
    assert groups.num_slots == 2
