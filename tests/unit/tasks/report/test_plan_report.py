"""Rows of the plan's table: which layers share one, and what it says of them."""

from graphcore.planning.plan_record import PlannedGroup
from graphcore.tasks.report.plan_report import group_rows


def layer(index: int, nbytes: int, place: str = "resident", width: int = 1) -> PlannedGroup:
    return PlannedGroup(f"layers.{index}", (), nbytes, place, layers=range(index, index + width))


def test_layers_that_are_alike_share_a_row_whatever_is_between_them() -> None:
    # llama.cpp's q4_k_m: the first and last eighth, and every third layer between them, has larger matrices.
    larger = {*range(4), *range(28, 32), *range(6, 28, 3)}
    groups = [PlannedGroup("embed_tokens", (0,), 7, "gathered")]
    groups += [layer(index, 50 if index in larger else 40) for index in range(32)]
    assert list(group_rows([*groups, PlannedGroup("head", (), 0, "resident")], is_folded=True)) == [
        ("embed_tokens", 7, "gathered"),
        ("layers 0-3, 6, 9 ... 27-31 (16, each)", 50, "resident"),
        ("layers 4-5, 7-8, 10-11 ... 25-26 (16, each)", 40, "resident"),
        ("head (the bytes of embed_tokens)", 0, "resident"),
    ]
    assert [row[0] for row in group_rows(groups, is_folded=False)] == [group.name for group in groups]


def test_layers_of_two_places_are_two_rows_and_one_layer_keeps_its_name() -> None:
    groups = [layer(0, 40, "streamed"), *(layer(index, 40) for index in range(1, 4)), layer(4, 50)]
    assert [row[0] for row in group_rows(groups, is_folded=True)] == ["layers.0", "layers 1-3 (3, each)", "layers.4"]


def test_groups_of_layers_are_counted_as_groups() -> None:
    groups = [layer(0, 80, width=2), layer(2, 80, width=2), layer(4, 80)]  # a single layer as large as two others
    assert [row[0] for row in group_rows(groups, is_folded=True)] == ["layers 0-3 (2 groups, each)", "layers.4"]
