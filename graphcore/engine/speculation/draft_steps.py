"""Decode steps of a draft model over the model's KV caches; recurrent states are restored afterwards."""

from collections.abc import Mapping, Sequence

from graphcore.engine.program_runner import ProgramRunner
from graphcore.engine.programs import Programs
from graphcore.graph.program import Program
from graphcore.kvcache.host_copies import Copies

RowTokens = Mapping[int, tuple[Sequence[int], int]]
"""For each row of the KV cache, the token ids to run and the position of the first of them."""


class DraftSteps:
    """Runs the steps of drafts.

    Args:
        runner: runner whose caches the programs share.
        programs: programs of the draft's decoder.

    Attributes:
        programs: the argument.
    """

    def __init__(self, runner: ProgramRunner, programs: Programs) -> None:
        self.programs, self._pages, self._policy = programs, runner.pages, runner.policy
        self._states: dict[int, Sequence[Copies]] = {}

    def begin(self, rows: Sequence[int]) -> None:
        """Copy the recurrent states of rows, before drafts change them."""
        self._states = {row: [cache.copy_out(row) for cache in self._pages.states] for row in rows}

    def run(self, tokens: RowTokens) -> dict[int, tuple[Program, int]]:
        """Run tokens of rows whose pages reach up to their positions; return the place of each row's last logits."""
        places: dict[int, tuple[Program, int]] = {}
        for place, (program, rows) in enumerate(self.programs.step(tokens)):
            program.state.place = place
            with self._policy.drafting():
                for step in program.steps:
                    step.replay()
            places |= {row: (program, at[-1]) for row, at in rows.items()}
        return places

    def end(self) -> None:
        """Put the recurrent states back to those before `begin`."""
        for row, states in self._states.items():
            self._pages.put_states(states, row)
        self._states = {}
