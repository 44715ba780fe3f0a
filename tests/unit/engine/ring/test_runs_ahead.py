"""A pass enqueues hand-overs ahead of the host only if it does nothing but launch graphs that exist."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.fake_cuda import captured_engine, fake_cuda

from graphcore.engine.program_runner import ProgramRunner
from graphcore.graph.hand_over import HandOver
from graphcore.parallel.share import Share
from graphcore.streaming.policy import Policy


@dataclass
class Noted:
    """A transport that notes, at the end of each pass, whether it ran ahead."""

    runs_ahead: bool = False
    passes: list[bool] = field(default_factory=list)

    def settle(self) -> None:
        self.passes.append(self.runs_ahead)


class Moving(Policy):
    """A policy that is not that of resident weights."""

    def acquire(self, group: int) -> None:
        pass

    def release(self, group: int) -> None:
        pass


def noted_runner() -> tuple[ProgramRunner, Noted]:
    """Return a runner whose decode steps are captured, and its transport; it has all layers."""
    runner, noted = captured_engine("qwen3").runner, Noted()
    assert isinstance(runner, ProgramRunner)
    share = Share(0, (0,) * len(runner.builder.decoder.layers))
    alone = SimpleNamespace(transport=noted, refuse_together=lambda error, rows: None)
    runner.builder.hand_over = HandOver(share, cast("Any", alone))
    return runner, noted


def run_passes(runner: ProgramRunner) -> None:
    """Run a chunk of a prompt, a first decode step, which is captured, two more, and a chunk beside a decode step."""
    runner.extend([[1, 2, 3]], [0])
    for start in (3, 4, 5):
        runner.extend([[7]], [start])
    runner.extend([[7], [8, 9]], [6, 0])


def test_decode_steps_run_ahead_once_they_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch)
    runner, noted = noted_runner()
    run_passes(runner)
    assert noted.passes == [False, False, True, True, False]


def test_nothing_runs_ahead_where_weights_stream_as_the_host_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch)
    runner, noted = noted_runner()
    runner.policy = Moving()
    run_passes(runner)
    assert noted.passes == [False] * 5


def test_warming_up_captures_the_step_from_which_the_host_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch)
    runner, noted = noted_runner()
    runner.warm_up(1)
    runner.extend([[7]], [0])
    assert noted.passes == [True]
