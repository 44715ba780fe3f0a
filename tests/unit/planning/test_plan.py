"""What will lie where: sums, the refusal, and that the plan says what is then allocated."""

from dataclasses import replace

import pytest
import torch
from plan_cases import COSTS, PLENTY, equal_sizes, plan_request

from graphcore.errors import PlanError
from graphcore.planning.machine import free_device_nbytes
from graphcore.planning.planner import plan_streaming
from graphcore.tasks.report.plan_report import tier_rows
from graphcore.weights.plan import GIB, GroupPlan, Plan, needs_in_words

SIZES = equal_sizes(8, 1000)
PLAN = Plan(GroupPlan([2 * GIB, GIB, GIB // 2]), kv_nbytes=GIB // 4, device="cpu")


def test_totals_are_sums() -> None:
    assert PLAN.weight_nbytes == 3 * GIB + GIB // 2
    assert PLAN.total_nbytes == 3 * GIB + 3 * GIB // 4


def test_what_a_plan_needs_is_said_in_parts() -> None:
    assert needs_in_words(PLAN) == "streaming=off needs 3.75 GiB on cpu (weights 3.50 GiB, kv cache 256.0 MiB)"


def test_what_just_fits_is_accepted_and_a_few_bytes_less_are_refused_with_what_to_change() -> None:
    needed = plan_streaming(SIZES, plan_request("off"), COSTS, PLENTY).peak_nbytes
    assert plan_streaming(SIZES, plan_request("off"), COSTS, replace(PLENTY, free_nbytes=needed)).policy == "off"
    with pytest.raises(PlanError) as caught:
        plan_streaming(SIZES, plan_request("off"), COSTS, replace(PLENTY, free_nbytes=needed - 1))
    message = str(caught.value)
    assert "are free; use streaming=auto" in message
    assert "context_length" in message
    assert "\n" not in message


def test_free_memory_of_this_machine_is_positive_and_no_more_than_it_has() -> None:
    with open("/proc/meminfo", encoding="ascii") as lines:  # noqa: PTH123  # the kernel's own figure
        total = int(next(line for line in lines if line.startswith("MemTotal")).split()[1]) * 1024
    assert 0 < free_device_nbytes(torch.device("cpu")) <= total


def test_a_head_is_resident_unless_a_slice_of_it_streams() -> None:
    """Groups 1 and 2 are layers, 3 and 4 the head's slices."""
    for streamed, is_resident in (((), True), ((1, 2), True), ((2,), True), ((1, 2, 3, 4), False), ((4,), False)):
        assert GroupPlan((10, 20, 20, 6), (3, 3), streamed).is_head_resident == is_resident


def test_groups_that_are_expanded_on_the_device_move_and_wait_with_their_bytes_on_the_link() -> None:
    """Group 2 is not expanded; the head's slices, 4 and 5, have no other bytes on the link."""
    groups = GroupPlan(
        (100, 50, 40, 60, 70), (30, 40), (1, 2, 3, 4, 5), num_slots=2, slot_nbytes=60, on_link=(30, 40, 35)
    )
    groups = replace(groups, arrival_nbytes=35)
    assert [groups.nbytes_of(number) for number in range(6)] == [100, 30, 40, 35, 30, 40]
    assert groups.streamed_nbytes == 30 + 40 + 35 + 70
    assert groups.host_slot_nbytes == 40
    assert groups.expanded_nbytes == 50 + 30 + 60 + 35
    assert groups.slots_nbytes == 2 * 60 + 35
    rows = {name: (nbytes, note) for name, nbytes, note in tier_rows(Plan(groups, 0, "cuda:0"), free=0)}
    assert rows["slots"] == (155, "2 for 5 groups, async; 35 bytes are a buffer in which groups arrive")
    assert replace(groups, streamed=(2, 4)).expanded_nbytes == 0
    assert replace(groups, streamed=()).resident_nbytes == 100 + 50 + 40 + 60 + 70
