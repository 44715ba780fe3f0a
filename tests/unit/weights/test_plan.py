"""What will lie where: sums, the refusal, and that the plan says what is then allocated."""

import pytest
import torch

from graphcore.errors import PlanError
from graphcore.weights.plan import GIB, Plan, free_nbytes

PLAN = Plan(group_nbytes=[2 * GIB, GIB, GIB // 2], kv_nbytes=GIB // 4, device="cpu")


def test_totals_are_sums() -> None:
    assert PLAN.weight_nbytes == 3 * GIB + GIB // 2
    assert PLAN.total_nbytes == 3 * GIB + 3 * GIB // 4


def test_what_just_fits_is_accepted_and_one_byte_less_is_refused() -> None:
    PLAN.check_fits(PLAN.total_nbytes)
    with pytest.raises(PlanError):
        PLAN.check_fits(PLAN.total_nbytes - 1)


def test_refusal_says_what_is_needed_what_is_free_and_what_to_change() -> None:
    with pytest.raises(PlanError) as caught:
        PLAN.check_fits(3 * GIB)
    message = str(caught.value)
    assert "streaming=off needs 3.75 GiB on cpu (weights 3.50 GiB, kv cache 256.0 MiB), 3.00 GiB are free" in message
    assert "context_length" in message
    assert "\n" not in message


def test_free_memory_of_this_machine_is_positive_and_no_more_than_it_has() -> None:
    with open("/proc/meminfo", encoding="ascii") as lines:  # noqa: PTH123  # the kernel's own figure
        total = int(next(line for line in lines if line.startswith("MemTotal")).split()[1]) * 1024
    assert 0 < free_nbytes(torch.device("cpu")) <= total
