"""The host decode loop: the programs of the next step of decoding requests, and sampling from their logits.

    start       returns the programs of a step, for all decoding requests
    ...         the pass runs them, beside the chunks of prompts
    finish      samples tokens and appends them to their requests

The host samples here, from the logits of each step; in device_decode_loop.py a GPU does.

Legend: V vocab.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from graphcore.engine.batching.interface import DecodeLoop
from graphcore.engine.program_runner import ProgramRunner
from graphcore.engine.programs import DecodeStep
from graphcore.engine.request import Request
from graphcore.engine.sampler import SequenceSampler
from graphcore.graph.program import Program

IDLE = 0.01  # seconds that a pass without any work waits for a mask


class HostDecodeLoop(DecodeLoop):
    """Decode loop in which the host samples the tokens of a step before the next step."""

    def __init__(self, runner: ProgramRunner) -> None:
        self._programs, self._chooser = runner.programs, SequenceSampler(runner)
        self.most_together = min(runner.programs.most_together, runner.programs.most_rows)
        self._steps: list[DecodeStep] = []
        self._due: dict[int, Request] = {}  # by their rows of the caches

    def take_forced(self, requests: Sequence[Request]) -> None:
        """Append the tokens that masks force."""
        self._chooser.take_forced(requests)

    def start(self, tokens: Mapping[Request, Sequence[int]]) -> tuple[list[Program], Mapping[Request, int]]:
        """Return the programs of a step of the requests whose next tokens are known, and these requests."""
        due = {request: ids for request, ids in tokens.items() if ids}
        self._due = {request.own_row: request for request in due}
        inputs = {request.own_row: (ids, request.num_computed) for request, ids in due.items()}
        self._steps = self._programs.step(inputs) if inputs else []
        return [program for program, _ in self._steps], {request: len(ids) for request, ids in due.items()}

    def finish(self, ended: Sequence[tuple[Request, Tensor]]) -> bool:
        """Sample a token for each request whose known tokens have all run."""
        has_run = bool(ended) or bool(self._steps)
        has_chosen = self._chooser.choose_pending(0.0 if has_run else IDLE) or bool(ended)
        for program, rows in self._steps:
            due = {at: self._due[row] for row, at in rows.items() if not self._due[row].num_uncomputed}
            has_chosen = has_chosen or bool(due)
            if self._programs.finds_likeliest:
                likeliest = program.state.chosen.tolist()
                plain = {at: request for at, request in due.items() if request.takes_likeliest}
                self._chooser.take_likeliest([*plain.values()], [likeliest[at] for at in plain])
                due = {at: request for at, request in due.items() if at not in plain}
            if due:
                logits = program.state.logits.unbind(0)
                self._chooser.choose([*due.values()], [logits[at] for at in due])
        for request, after in ended:
            self._chooser.choose([request], after.unbind(0))
        self._steps, self._due = [], {}
        return has_chosen

    def drain(self, request: Request) -> None:
        """Do nothing: no step is in flight between two passes."""

    def may_leave(self, request: Request) -> bool:
        """Return True: no step is in flight between two passes."""
        return True

    def leave(self, request: Request) -> list[int]:
        """Remove a request that has ended, and return those of its tokens that the caches hold."""
        self._chooser.forget(request)
        return request.ids[: request.num_computed]

    def drop(self) -> None:
        """Forget the programs of the pass."""
        self._steps, self._due = [], {}
