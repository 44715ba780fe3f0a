"""The speed of several processes: disks that read at once, what keeps one waiting, and what hand-overs add."""

from dataclasses import replace

import pytest
from plan_cases import COSTS, PLENTY, plan_request

from graphcore.planning.planner import plan_streaming
from graphcore.planning.prediction import Rates, predict
from graphcore.planning.ring_prediction import Network, RankPlan, RingPrediction, Turn, predict_ring, turns_of
from graphcore.planning.sizes import ExpertSizes, WeightSizes
from graphcore.weights.groups import LayerGroup
from graphcore.weights.plan import GroupPlan, Plan


def ring(owners: str, slots: int, hand_over: float = 0.0, compute: float = 0.0) -> RingPrediction:
    """Return the prediction for groups that each take a second to arrive."""
    turns = [Turn(int(owner), 1.0, compute) for owner in owners]
    return predict_ring(turns, [slots] * (max(turn.rank for turn in turns) + 1), hand_over)


def test_disks_that_read_in_turn_read_at_once() -> None:
    assert ring("0" * 12, 2).seconds == pytest.approx(12)
    assert ring("01" * 6, 2).seconds == pytest.approx(6)
    assert ring("01" * 6, 2).tokens_per_second == pytest.approx(1 / 6)  # of one sequence
    assert ring("0123" * 3, 2).seconds == pytest.approx(3)


def test_neighbours_read_at_once_only_as_far_as_their_slots_reach() -> None:
    assert ring("000000111111", 2).seconds == pytest.approx(8)  # 2 of 6 arrive while the other reads
    assert ring("000000111111", 6).seconds == pytest.approx(6)


def test_matrices_of_a_layer_need_slots_for_the_layer_and_more() -> None:
    layers = "0000111122223333" * 5
    assert ring(layers, 2).seconds == pytest.approx(40)  # 2 of 4 arrive while the others read
    assert ring(layers, 8).seconds == pytest.approx(20)


def test_what_is_computed_and_handed_over_hides_behind_reading_as_long_as_it_is_less() -> None:
    assert ring("01" * 6, 3, hand_over=0.1, compute=0.1).seconds == pytest.approx(6, rel=0.05)
    bound = ring("01" * 6, 3, hand_over=1.0, compute=0.5)
    assert bound.seconds == pytest.approx(12 * 1.5)
    assert bound.hand_over_seconds == pytest.approx(12)
    assert bound.compute_seconds == pytest.approx([3, 3])


def test_resident_groups_are_computed_one_after_another() -> None:
    turns = [Turn(rank, 0.0, 0.25) for rank in (0, 0, 1, 1)]
    found = predict_ring(turns, [0, 0], 0.5, sequences=8)
    assert found.seconds == pytest.approx(4 * 0.25 + 2 * 0.5)
    assert found.tokens_per_second == pytest.approx(4)


def test_features_of_layers_arrive_before_the_first_hand_over_of_rank_0() -> None:
    turns = [Turn(rank, 0.0, 0.25) for rank in (0, 1, 0, 1)]
    plain, found = predict_ring(turns, [0, 0], 0.5), predict_ring(turns, [0, 0], 0.5, feature_seconds=0.3)
    assert found.seconds == pytest.approx(plain.seconds + 0.3)
    assert found.hand_over_seconds == pytest.approx(plain.hand_over_seconds + 0.3)


def test_a_hand_over_takes_the_latency_and_its_bytes() -> None:
    assert Network(125e6, 0.0002).seconds(32768) == pytest.approx(0.0002 + 0.000262144)


def test_turns_follow_the_layers_and_the_heads_slices_come_last() -> None:
    first = GroupPlan((100, 10, 10, 0), head_slices=(30, 30), streamed=(2, 3, 4), num_slots=2)
    second = GroupPlan((0, 20, 20, 0), streamed=(1,), num_slots=1)
    ranks = [
        RankPlan(
            Plan(first, 0, "cpu", read_nbytes=80), [LayerGroup(range(1)), LayerGroup(range(2, 3))], Rates(10, 100)
        ),
        RankPlan(
            Plan(second, 0, "cpu", read_nbytes=40),
            [LayerGroup(range(1, 2), ("one",)), LayerGroup(range(1, 2), ("two",))],
            Rates(5, 200),
        ),
    ]
    turns = turns_of((0, 1, 0), ranks)
    assert [turn.rank for turn in turns] == [0, 1, 1, 0, 0, 0]
    assert [turn.copy_seconds for turn in turns] == pytest.approx([0, 4, 0, 1, 3, 3])
    assert [turn.compute_seconds for turn in turns] == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.3, 0.3])


def test_the_time_in_which_experts_arrive_is_shared_by_the_groups_of_layers() -> None:
    experts = ExpertSizes((100, 100), experts_per_layer=4, top_k=2, min_slots=2)
    sizes = WeightSizes(30, 30, (30,), False, (10, 10), 0, experts)
    plan = plan_streaming(sizes, replace(plan_request("on", 100_000), expert_cache=400), COSTS, PLENTY)
    rates = Rates(link=1e3, memory=1e6)
    fetched = predict(plan, rates).fetch_seconds
    assert 0.0 < fetched < 1.0
    first, second, head = turns_of((0, 0), [RankPlan(plan, [LayerGroup(range(1)), LayerGroup(range(1, 2))], rates)])
    assert first.compute_seconds == second.compute_seconds == pytest.approx(fetched / 2 + head.compute_seconds / 3)
