"""Steps whose host time is measured have tokens to make, whatever an earlier run left behind."""

from types import SimpleNamespace

import pytest
import torch
from suite.host import begin_steps, tokens_made

from graphcore.graph.gpu.sampling import RowSettings, SamplingBuffers
from graphcore.graph.program import Program
from graphcore.graph.state import StepState

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("steps", [64, 4])
def test_an_earlier_runs_end_token_and_limit_are_gone(steps: int) -> None:
    cpu = torch.device("cpu")
    state, choosing = StepState.empty(1, 1, cpu), SamplingBuffers.allocate(1, 10, cpu)
    choosing.put(0, RowSettings(left=1, ends={5, 7}))
    program = Program(state, [], SimpleNamespace(choosing=choosing))
    begin_steps(program, steps)
    assert choosing.left.tolist() == [steps]
    assert set(choosing.ends.flatten().tolist()) == {-1}
    assert (state.span.starts.tolist(), state.span.counts.tolist()) == ([0], [1])
    state.span.starts.add_(3)
    assert tokens_made(program) == 3
