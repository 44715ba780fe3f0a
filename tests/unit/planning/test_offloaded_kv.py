"""Which layers' keys and values a plan offloads, and what reading them takes; bytes are worked out by hand."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from plan_cases import PLENTY, any_request, any_sizes, equal_sizes, plan_request

from graphcore.errors import ConfigError, PlanError
from graphcore.kvcache.sizes import PoolSizes
from graphcore.planning.planner import Costs, PlanRequest, plan_streaming
from graphcore.planning.prediction import Rates, predict
from graphcore.planning.sizes import WeightSizes
from graphcore.weights.plan import Plan

SIZES = equal_sizes(6, 1000)
TABLES = 7  # bytes of page tables, which always stay


def costs_of(pools: Mapping[int, int], readers: int = 1) -> Costs:
    """Return the costs of caches with so many bytes for a token, by layer."""
    return Costs(
        lambda context: TABLES + context * sum(pools.values()),
        workspace_nbytes=77,
        buffer_nbytes=lambda job_nbytes: 33,
        kv_pools=lambda context: {
            layer: PoolSizes(context * nbytes, readers * context * nbytes) for layer, nbytes in pools.items()
        },
    )


COSTS = costs_of({0: 10, 1: 10, 2: 10, 3: 10})  # 1000 bytes a layer for 100 tokens
LEAST = 2 * 1000 + 77 + 33 + 11 + TABLES  # of streaming=on: two slots, workspace, buffers, vectors, tables


def layers_of(plan: Plan) -> list[int]:
    return [] if plan.offloaded_kv is None else sorted(plan.offloaded_kv.layers)


@pytest.mark.parametrize(
    ("room", "offloaded"), [(0, [0, 1, 2, 3]), (999, [0, 1, 2, 3]), (1000, [1, 2, 3]), (3999, [3]), (4000, [])]
)
def test_caches_for_which_weights_leave_no_room_are_offloaded(room: int, offloaded: list[int]) -> None:
    plan = plan_streaming(SIZES, plan_request("on", LEAST + room, prefetch=1), COSTS, PLENTY)
    assert layers_of(plan) == offloaded
    assert plan.kv_nbytes == TABLES + 1000 * (4 - len(offloaded))
    assert plan.total_nbytes == LEAST + 1000 * (4 - len(offloaded))
    assert any(f"that of {len(offloaded)} of 4 layers" in note for note in plan.notes) == bool(offloaded)


def test_weights_stay_before_keys_and_values_do() -> None:
    whole = 6000 + 3000 + 3000 + 77 + 11 + TABLES
    plan = plan_streaming(SIZES, plan_request("auto", whole + 1500), COSTS, PLENTY)
    assert (plan.groups.is_embedding_resident, layers_of(plan)) == (False, [])  # the table makes room for the cache
    least = plan_streaming(SIZES, plan_request("auto", LEAST + 3999, prefetch=1), COSTS, PLENTY)
    assert (len(least.groups.streamed), layers_of(least)) == (9 - 3, [0, 1, 2, 3])
    fewer = replace(plan_request("auto", LEAST + 3999, prefetch=1), context_length=200)
    assert layers_of(plan_streaming(SIZES, fewer, costs_of({0: 4, 1: 4, 2: 12, 3: 12}), PLENTY)) == [1, 2, 3]


def test_a_context_that_nobody_asked_for_is_halved_and_never_offloaded() -> None:
    asked = replace(plan_request("on", LEAST + 4 * 10 * 600), context_length=4096, may_halve_context=True)
    plan = plan_streaming(SIZES, asked, COSTS, PLENTY)
    assert (plan.context_length, plan.offloaded_kv) == (512, None)
    with pytest.raises(PlanError, match="at context_length=512"):
        plan_streaming(SIZES, replace(asked, budget=LEAST), COSTS, PLENTY)


def test_resident_weights_and_other_devices_offload_nothing() -> None:
    with pytest.raises(PlanError, match="streaming=off needs"):
        plan_streaming(SIZES, plan_request("off", 13_000), COSTS, PLENTY)
    on_gpu = replace(plan_request("on", LEAST), kv_obstacle="keys and values on cuda:0 are not offloaded yet")
    with pytest.raises(PlanError, match=f"is {LEAST - 1000 + 4000} bytes"):
        plan_streaming(SIZES, on_gpu, COSTS, PLENTY)
    with pytest.raises(
        ConfigError, match=r"kv_memory_budget is not possible: keys .* yet; leave it out, or use device"
    ):
        plan_streaming(SIZES, replace(on_gpu, kv_budget=0), COSTS, PLENTY)


def test_a_budget_of_its_own_decides_whatever_else_is_free() -> None:
    for kv_budget, offloaded in ((0, [0, 1, 2, 3]), (TABLES + 2000, [2, 3]), (TABLES + 4000, [])):
        plan = plan_streaming(SIZES, replace(plan_request("auto"), kv_budget=kv_budget), COSTS, PLENTY)
        assert (layers_of(plan), plan.is_streaming) == (offloaded, False)
        assert plan.kv_nbytes <= max(kv_budget, TABLES)
    longer = replace(plan_request("auto"), kv_budget=TABLES + 40 * 400, longer_contexts=(1600, 800, 400))
    plan = plan_streaming(SIZES, longer, COSTS, PLENTY)
    assert (plan.context_length, plan.offloaded_kv) == (400, None)  # the longest whose cache is in its budget
    with pytest.raises(PlanError, match="a smaller kv_memory_budget, layer_group_size"):
        plan_streaming(SIZES, replace(plan_request("on", LEAST), kv_budget=TABLES + 4000), COSTS, PLENTY)


def test_caches_that_several_layers_read_stay_first() -> None:
    shared = Costs(
        lambda context: 30 * context,
        kv_pools=lambda context: {
            0: PoolSizes(10 * context, 10 * context),
            1: PoolSizes(10 * context, 30 * context),
            4: PoolSizes(10 * context, 10 * context),
        },
    )
    plan = plan_streaming(SIZES, replace(plan_request("auto"), kv_budget=2000), shared, PLENTY)
    assert layers_of(plan) == [4]
    plan = plan_streaming(SIZES, replace(plan_request("auto"), kv_budget=1000), shared, PLENTY)
    assert layers_of(plan) == [0, 4]


def test_reading_them_adds_to_the_time_of_a_token() -> None:
    plan = plan_streaming(SIZES, replace(plan_request("on", 100_000), kv_budget=0), costs_of({0: 10, 1: 30}, 2), PLENTY)
    rates = Rates(link=1000.0, memory=18022.0, offload=500.0)
    one, eight = predict(plan, rates), predict(plan, rates, 8)
    assert one.kv_seconds == pytest.approx(2 * 40 * 100 / 500)  # twice 4000 bytes
    assert one.seconds == pytest.approx(9.0 + 16.0)
    assert eight.kv_seconds == one.kv_seconds  # all sequences share pools for 100 tokens
    in_turn = plan_streaming(SIZES, replace(plan_request("on", 100_000, 0), kv_budget=0), COSTS, PLENTY)
    assert predict(in_turn, rates).seconds == pytest.approx(9.5 + 8.0)


@st.composite
def any_pools(draw: st.DrawFn) -> Mapping[int, int]:
    return draw(st.dictionaries(st.integers(0, 11), st.integers(1, 40), max_size=6))


@given(any_sizes(), any_request(), any_pools(), st.integers(1, 400_000), st.none() | st.integers(0, 100_000))
def test_what_fits_is_offloaded_no_more_and_no_less_than_needed(
    sizes: WeightSizes, asked: PlanRequest, pools: Mapping[int, int], budget: int, kv_budget: int | None
) -> None:
    costs = costs_of(pools)
    asked = replace(asked, budget=budget, kv_budget=None if asked.keeps == "all" else kv_budget)
    in_memory = _plan(sizes, replace(asked, kv_budget=None, kv_obstacle="none"), costs)
    plan = _plan(sizes, asked, costs)
    if plan is None:
        assert in_memory is None or asked.kv_budget is not None
        assume(False)
    assert plan.total_nbytes <= budget
    away = 0 if plan.offloaded_kv is None else plan.offloaded_kv.nbytes
    context = plan.context_length or 0
    assert plan.kv_nbytes + away == TABLES + context * sum(pools.values())
    left = [context * pools[layer] for layer in layers_of(plan)]
    assert sum(left) == away
    if asked.kv_budget is None:
        assert in_memory is None or replace(in_memory, notes=()) == replace(plan, notes=())
        assert all(plan.total_nbytes + nbytes > budget for nbytes in left)
    else:
        assert plan.kv_nbytes <= max(asked.kv_budget, TABLES)
        assert all(plan.kv_nbytes + nbytes > asked.kv_budget for nbytes in left)


def _plan(sizes: WeightSizes, asked: PlanRequest, costs: Costs) -> Plan | None:
    try:
        return plan_streaming(sizes, asked, costs, PLENTY)
    except PlanError:
        return None
