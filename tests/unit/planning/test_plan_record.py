"""What a plan's record says of groups: whole layers, and layers whose matrices are groups."""

from dataclasses import replace

from graphcore.planning.plan_record import group_records, memory_record, planned_groups
from graphcore.weights.groups import LayerGroup, split_layers
from graphcore.weights.plan import ExpertPlan, GroupPlan, Plan

PARTS = (("self_attn.q_proj", "self_attn.o_proj"), ("mlp.up_proj",), ("mlp.down_proj",))
IN_PARTS = [LayerGroup(range(layer, layer + 1), names) for layer in range(2) for names in PARTS]


def plan_of(*streamed: int, groups: int = 6) -> Plan:
    return Plan(GroupPlan((100, *[10] * groups, 40), (20, 20), streamed, num_slots=2, slot_nbytes=20), 0, "cpu")


def test_the_bytes_of_experts_are_those_that_stay_and_the_slots_of_the_others() -> None:
    cached = ExpertPlan(5, 100, num_experts=16, num_layers=2, routed_nbytes=400, num_routed=4)
    assert memory_record(plan_of())["expert_bytes"] == 0
    assert memory_record(replace(plan_of(), resident_expert_nbytes=30))["expert_bytes"] == 30
    assert memory_record(replace(plan_of(), resident_expert_nbytes=30, experts=cached))["expert_bytes"] == 530


def test_a_layer_whose_parts_have_one_place_is_one_row_with_their_names() -> None:
    rows = {one["name"]: one for one in group_records(planned_groups(plan_of(4, 5, 6), IN_PARTS, 0))}
    assert rows["layers.0"] | {"place": "streamed", "numbers": [4, 5, 6]} == rows["layers.1"] | {"name": "layers.0"}
    assert rows["layers.1"]["parts"] == ["self_attn.q_proj to o_proj", "mlp.up_proj", "mlp.down_proj"]
    assert rows["layers.0"]["bytes"] == 30
    assert rows["layers.0"]["place"] == "resident"
    assert rows["head"]["numbers"] == [7, 8]


def test_a_layer_whose_parts_have_two_places_is_a_row_for_each() -> None:
    found = [(one.name, one.nbytes, one.place) for one in planned_groups(plan_of(3, 4, 5, 6), IN_PARTS, 0)]
    assert found[1:3] == [
        ("layers.0: self_attn.q_proj to o_proj, mlp.up_proj", 20, "resident"),
        ("layers.0: mlp.down_proj", 10, "streamed"),
    ]


def test_groups_of_layers_have_no_parts() -> None:
    rows = planned_groups(plan_of(1, groups=2), split_layers(3, 2), 0)
    assert [(one.name, one.numbers, one.parts) for one in rows[1:3]] == [
        ("layers.0-1", (1,), []),
        ("layers.2", (2,), []),
    ]
