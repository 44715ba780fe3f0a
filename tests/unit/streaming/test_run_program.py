"""The hot loop: each step between its group's acquire and release."""

from dataclasses import dataclass, field

import pytest
import torch

from graphcore.errors import CheckpointError, StreamingError
from graphcore.graph.program import Program
from graphcore.graph.state import StepState
from graphcore.streaming.policy import Resident
from graphcore.streaming.scheduler import StoppedError, in_one_pass, run_program, run_together


@dataclass
class Recorder:
    """A policy that writes down what is asked of it."""

    log: list[str] = field(default_factory=list)

    def acquire(self, group: int) -> None:
        self.log.append(f"acquire {group}")

    def release(self, group: int) -> None:
        self.log.append(f"release {group}")

    def reset(self) -> None:
        self.log.append("reset")


@dataclass
class Recorded:
    """A step that writes down that it ran."""

    group: int
    log: list[str]

    def replay(self) -> None:
        self.log.append(f"replay {self.group}")


def program_of(log: list[str], *groups: int) -> Program:
    return Program(StepState.empty(1, 1, torch.device("cpu")), [Recorded(group, log) for group in groups])


def test_each_step_runs_once_in_order_between_acquire_and_release_of_its_group() -> None:
    policy = Recorder()
    run_program(program_of(policy.log, 0, 1, 2, 2), policy)
    expected = [f"{verb} {group}" for group in (0, 1, 2, 2) for verb in ("acquire", "replay", "release")]
    assert policy.log == expected


def test_resident_groups_are_there_and_stay() -> None:
    log: list[str] = []
    run_program(program_of(log, 3, 4), Resident())
    assert log == ["replay 3", "replay 4"]


def test_a_step_that_fails_leaves_nothing_read_ahead_behind() -> None:
    policy = Recorder()
    program = program_of(policy.log, 0, 1)

    def fail() -> None:
        raise CheckpointError("rows cannot be read")

    program.steps[1].replay = fail  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="rows cannot be read"):
        run_program(program, policy)
    assert policy.log == ["acquire 0", "replay 0", "release 0", "acquire 1", "reset"]


def test_programs_that_run_together_share_each_group() -> None:
    policy = Recorder()
    run_together([program_of(policy.log, 0, 1, 3), program_of(policy.log, 1, 2, 3), program_of(policy.log, 0)], policy)
    groups = {0: 2, 1: 2, 2: 1, 3: 2}
    expected = [[f"acquire {one}", *[f"replay {one}"] * count, f"release {one}"] for one, count in groups.items()]
    assert policy.log == [line for lines in expected for line in lines]


def test_a_step_that_goes_back_to_a_group_keeps_its_place_and_waits_for_nobody_earlier() -> None:
    """A program whose tokens' embedding comes after its head, as in a greedy program, beside one that is longer."""
    log: list[str] = []
    together = in_one_pass([program_of(log, 0, 2, 0), program_of(log, 1, 2, 3)])
    assert [(group, len(steps)) for group, steps in together] == [(0, 1), (1, 1), (2, 2), (0, 1), (3, 1)]


def test_programs_with_several_steps_before_the_layers_share_each_group() -> None:
    """A native program whose embedding the host gathers, then instructions change, beside a chunk of a prompt."""
    log: list[str] = []
    together = in_one_pass([program_of(log, 0, 0, 1, 2, 0), program_of(log, 0, 1, 2, 3)])
    assert [(group, len(steps)) for group, steps in together] == [(0, 2), (0, 1), (1, 2), (2, 2), (0, 1), (3, 1)]


def test_a_pass_that_is_stopped_runs_no_further_group_and_leaves_nothing_read_ahead() -> None:
    policy, answers = Recorder(), [False, False, True]
    with pytest.raises(StoppedError):
        run_together([program_of(policy.log, 0, 1, 2)], policy, lambda: answers.pop(0))
    groups = [f"{verb} {group}" for group in (0, 1) for verb in ("acquire", "replay", "release")]
    assert policy.log == [*groups, "reset"]


def test_the_first_error_is_raised_although_another_comes_when_reads_are_discarded() -> None:
    policy = Recorder()
    program = program_of(policy.log, 0)

    def fail() -> None:
        raise CheckpointError("rows cannot be read")

    def fail_again() -> None:
        raise StreamingError("a read ahead has failed")

    program.steps[0].replay = fail  # type: ignore[method-assign]
    policy.reset = fail_again  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="rows cannot be read"):
        run_program(program, policy)
