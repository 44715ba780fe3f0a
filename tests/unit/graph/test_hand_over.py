"""The residual stream goes from rank to rank around the steps at their borders."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
import torch
from support.tiny_models import save_tiny
from torch import Tensor

from graphcore import Engine
from graphcore.engine import program_runner
from graphcore.engine.forward_pass import RowChunk
from graphcore.engine.program_runner import ProgramRunner
from graphcore.graph.hand_over import HandedStep, HandOver, feature_steps, features_in, handed, hidden_of, rows_in_use
from graphcore.graph.program import Program
from graphcore.graph.state import StepState
from graphcore.parallel.process_group import ProcessGroup
from graphcore.parallel.share import Share


@dataclass
class Noted:
    """A step, and a process group, that note what is called."""

    group: int = 3
    world_size: int = 3
    calls: list[tuple[str, int, int]] = field(default_factory=list)

    def replay(self) -> None:
        """Note the step."""
        self.calls.append(("step", 0, 0))

    def receive(self, hidden: Tensor, source: int, tag: int) -> None:
        """Note where the stream comes from."""
        hidden.fill_(7.0)
        self.calls.append(("receive", source, tag))

    def send(self, hidden: Tensor, target: int, tag: int) -> None:
        """Note where the stream goes."""
        assert bool((hidden == 7.0).all())
        self.calls.append(("send", target, tag))


def over(noted: Noted) -> HandOver:
    """Return the hand-over of a rank in the middle."""
    return HandOver(Share(1, (0, 1, 2)), cast("ProcessGroup", noted))


def test_a_step_receives_before_it_runs_and_sends_when_it_has_run() -> None:
    noted, state = Noted(), StepState.empty(1, 2, torch.device("cpu"))
    state.hidden, state.place = torch.zeros(1, 2, 4), 5
    step = handed(noted, state, hidden_of(state), over(noted), source=0, target=2)
    assert step.group == noted.group, "it waits for the weights of its own group"
    step.replay()
    assert noted.calls == [("receive", 0, 5), ("step", 0, 0), ("send", 2, 5)]


def test_a_step_without_hand_overs_stays_as_it_is() -> None:
    noted, state = Noted(), StepState.empty(1, 2, torch.device("cpu"))
    assert handed(noted, state, hidden_of(state), over(noted), None, None) is noted
    assert handed(noted, state, hidden_of(state), None, None, None) is noted
    assert isinstance(handed(noted, state, hidden_of(state), over(noted), None, 2), HandedStep)


def test_features_go_from_the_embedding_to_every_other_rank() -> None:
    noted, state = Noted(), StepState.empty(1, 2, torch.device("cpu"))
    state.per_layer, state.place = torch.zeros(3, 1, 2, 4), 5
    for step in feature_steps(state, features_in(state), over(noted)):
        step.replay()
    assert noted.calls == [("receive", 0, 5)]
    noted.calls.clear()
    for step in feature_steps(state, features_in(state), HandOver(Share(0, (0, 1, 2)), cast("ProcessGroup", noted))):
        step.replay()
    assert noted.calls == [("send", 1, 5), ("send", 2, 5)]
    assert feature_steps(state, features_in(state), None) == []


@pytest.mark.parametrize(
    ("counts", "rows"), [([1, 1, 0, 0], 2), ([0, 1, 0, 0], 2), ([1, 1, 1, 1], 4), ([0, 0, 0, 0], 0)]
)
def test_rows_up_to_the_last_in_use_travel(counts: list[int], rows: int) -> None:
    state = StepState.empty(4, 1, torch.device("cpu"))
    state.span.counts.copy_(torch.tensor(counts))
    x = torch.zeros(4, 8)
    assert rows_in_use(state, x)().shape == (rows, 8)
    assert rows_in_use(state, x)().data_ptr() == x.data_ptr() or not rows


def test_programs_of_a_pass_have_numbers_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks may reach programs in different orders; the numbers are the tags of what they send."""
    save_tiny("llama3", tmp_path)
    places: list[int] = []
    run = program_runner.run_together

    def noting(programs: list[Program], *more: object) -> None:
        places.extend(program.state.place for program in programs)
        run(programs, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(program_runner, "run_together", noting)
    with Engine.load(tmp_path, dtype="fp32", device="cpu", overrides=["batch_size=3", "context_length=64"]) as engine:
        runner = engine.runner
        assert isinstance(runner, ProgramRunner)
        with torch.inference_mode():
            for row in range(3):
                runner.reserve(row, 0, 4)
            (step,) = runner.programs.step({0: ([5], 0)})
            chunks = [RowChunk(row, [1, 2, 3], 0, is_last=True) for row in (1, 2)]
            with runner.forward_pass([step.program], chunks, runner.policy):
                pass
    assert places == [0, 1, 2]
