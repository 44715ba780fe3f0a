"""The hot loop: each step between its group's acquire and release."""

from dataclasses import dataclass, field

import pytest
import torch

from graphcore.errors import CheckpointError
from graphcore.graph.program import Program
from graphcore.graph.state import StepState
from graphcore.streaming.policy import Resident
from graphcore.streaming.scheduler import run_program


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
