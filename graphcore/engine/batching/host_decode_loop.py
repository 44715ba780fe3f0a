"""The host decode loop: the programs of the next step of decoding requests, and sampling from their logits.

    drafts      returns draft tokens for the step, if the engine speculates
    start       returns the programs of a step, for all decoding requests
    ...         the pass runs them, beside the chunks of prompts
    finish      samples tokens and appends them to their requests

The host samples here, from the logits of each step; in device_decode_loop.py a GPU does.

Legend: V vocab.
"""

import time
from collections.abc import Mapping, Sequence

from torch import Tensor

from graphcore.engine.batching.decode_run import DecodeRun
from graphcore.engine.batching.interface import DecodeLoop
from graphcore.engine.program_runner import ProgramRunner
from graphcore.engine.request import Request
from graphcore.engine.sampler import SequenceSampler
from graphcore.engine.speculation.speculation import Reserve, Speculation, StepRoom
from graphcore.graph.program import Program

IDLE = 0.01  # seconds that a pass without any work waits for a mask


class HostDecodeLoop(DecodeLoop):
    """Decode loop in which the host samples the tokens of a step before the next step.

    Args:
        speculation: source of draft tokens; None for none.
        sampler: sampler of the tokens; None for one of this process alone.

    Attributes:
        has_drafts: True if steps may have draft tokens.
    """

    def __init__(
        self,
        runner: ProgramRunner,
        speculation: Speculation | None = None,
        sampler: SequenceSampler | None = None,
    ) -> None:
        self._programs, self._pages, self._context = runner.programs, runner.pages, runner.sizes.context
        self._chooser, self.speculation = sampler or SequenceSampler(runner), speculation
        self.has_drafts = speculation is not None
        self.most_together = min(runner.programs.most_together, runner.programs.most_rows)
        self._runs: list[DecodeRun] = []
        self._began, self._is_alone = 0.0, True

    def take_forced(self, requests: Sequence[Request]) -> None:
        """Append the tokens that masks force."""
        self._chooser.take_forced(requests)

    def drafts(
        self, tokens: Mapping[Request, Sequence[int]], spare: int, reserve: Reserve, *, is_alone: bool
    ) -> Mapping[Request, Sequence[int]]:
        """Return draft tokens for requests all of whose known tokens run, as far as they are worth their time."""
        self._is_alone = is_alone
        if not self.has_drafts or spare < 1:
            return {}
        room = {request: self._room(request, len(ids)) for request, ids in tokens.items() if request.speculates}
        room = {request: most for request, most in room.items() if most > 0}
        return self.propose(StepRoom(tokens, room, spare), reserve) if room else {}

    def propose(self, room: StepRoom, reserve: Reserve) -> Mapping[Request, Sequence[int]]:
        """Return the draft tokens that the step is to check; their pages are reserved."""
        return {} if self.speculation is None else self.speculation.propose(room, reserve)

    def _room(self, request: Request, num_tokens: int) -> int:
        """Return the most draft tokens that may follow so many tokens of a request."""
        if request.is_in_prompt or not num_tokens or num_tokens < request.num_uncomputed:
            return 0
        if self._pages.has_states and request.reuses_cache:
            return 0  # its states are kept when it ends, and would then be those before a draft
        wanted = request.max_new_tokens - len(request.token_ids) - 1
        return min(wanted, self.most_together - num_tokens, self._context - request.num_known)

    def start(self, tokens: Mapping[Request, Sequence[int]]) -> tuple[list[Program], Mapping[Request, int]]:
        """Return the programs of a step of the requests whose next tokens are known, and these requests."""
        self._runs = [self._run_of(request, ids) for request, ids in tokens.items() if ids]
        inputs = {run.request.own_row: (run.ids, run.start) for run in self._runs}
        steps = self._programs.step(inputs) if inputs else []
        for program, rows in steps:
            for run in self._runs:
                run.places += [(program, at) for at in rows.get(run.request.own_row, ())]
        self._began = time.perf_counter()
        return [program for program, _ in steps], {run.request: run.num_counted for run in self._runs}

    def _run_of(self, request: Request, ids: Sequence[int]) -> DecodeRun:
        num_sure = min(len(ids), request.num_uncomputed)
        request.add_drafted(len(ids) - num_sure, 0)
        spoils = num_sure < len(ids) and self._pages.has_states
        states = [cache.copy_out(request.own_row) for cache in self._pages.states] if spoils else ()
        return DecodeRun(request, ids, request.num_computed, num_sure, states)

    def finish(self, ended: Sequence[tuple[Request, Tensor]]) -> bool:
        """Sample a token for each request whose known tokens have all run, and further ones while drafts are right."""
        seconds = time.perf_counter() - self._began
        has_run = bool(ended) or bool(self._runs)
        self._chooser.supersede([run.request for run in self._runs])  # of which recurrent states were put back
        has_chosen = self._chooser.choose_pending(0.0 if has_run else IDLE) or bool(ended)
        likeliest: dict[int, list[int]] = {}  # by id of their programs
        while due := [(run.request, place) for run in self._runs if (place := run.next_place()) is not None]:
            has_chosen = True
            self._choose(due, likeliest)
            self._chooser.share()
        for request, after in ended:
            self._chooser.choose([request], after.unbind(0))
        self._chooser.share()
        self._count(seconds)
        self._runs = []
        return has_chosen

    def _choose(self, due: Sequence[tuple[Request, tuple[Program, int]]], likeliest: dict[int, list[int]]) -> None:
        """Sample the next token of requests, each from the logits of a program's row."""
        others: list[tuple[Request, Tensor]] = []
        for request, (program, at) in due:
            if not (self._programs.finds_likeliest and request.takes_likeliest):
                others.append((request, program.state.logits[at]))
                continue
            if id(program) not in likeliest:
                likeliest[id(program)] = program.state.chosen.tolist()
            self._chooser.take_likeliest([request], [likeliest[id(program)][at]])
        if others:
            self._chooser.choose([request for request, _ in others], [logits for _, logits in others])

    def _count(self, seconds: float) -> None:
        """Count what the caches hold of draft tokens, put recurrent states back, and record how drafts fared."""
        if self.speculation is not None and self._runs:
            tokens = sum(len(run.ids) for run in self._runs)
            has_drafts = any(run.num_sure < len(run.ids) for run in self._runs)
            self.speculation.record_step(tokens, seconds if self._is_alone else None, has_drafts=has_drafts)
        for run in self._runs:
            if run.num_sure == len(run.ids):
                continue
            if self.speculation is not None:
                self.speculation.record(run.request, run.num_computed - run.num_sure)
            if run.states and run.num_right < len(run.ids):
                self._pages.put_states(run.states, run.request.own_row)  # its known tokens run again
            else:
                run.request.add_computed(run.num_computed - run.num_counted)

    def drain(self, request: Request) -> None:
        """Do nothing: no step is in flight between two passes."""

    def may_leave(self, request: Request) -> bool:
        """Return True: no step is in flight between two passes."""
        return True

    def leave(self, request: Request) -> list[int]:
        """Remove a request that has ended, and return those of its tokens that the caches hold."""
        self._chooser.forget(request)
        if self.speculation is not None:
            self.speculation.forget(request)
        return request.ids[: request.num_computed]

    def drop(self) -> None:
        """Forget the programs of the pass."""
        self._runs = []
