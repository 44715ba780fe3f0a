"""The draft model: a second decoder over the caches of the model itself, which runs tokens ahead of it.

    known token    w0 -> draft model -> d1 -> draft model -> d2 -> draft model -> d3
    it writes      keys and values at p          p + 1             p + 2
    then           the model's own step runs w0, d1, d2, d3 at p, p + 1, ... and overwrites them in every layer

So it needs no caches of its own, and runs no prompts: the keys that it sees before p are the model's. Recurrent states
are copied before, and put back afterwards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from graphcore.engine.program_runner import ProgramRunner
from graphcore.engine.request import Request
from graphcore.engine.sampler import Sampler
from graphcore.engine.speculation.draft_steps import DraftSteps
from graphcore.errors import GraphError
from graphcore.graph.program import Program
from graphcore.kernels.ops.draw import Draw


class DraftToken(NamedTuple):
    """A token that a draft model has chosen.

    Attributes:
        probability: share of the token in the softmax of the draft model's logits.
        is_last: True if nothing can follow it: it ends the answer.
    """

    token_id: int
    probability: float
    is_last: bool = False


@dataclass
class _Ahead:
    """A request's tokens that the draft model is to run next, and the position of the first of them."""

    ids: Sequence[int]
    start: int
    draw: Draw


class DraftModel:
    """Chooses draft tokens with a decoder's programs; tokens are chosen as the model chooses its own.

    Sampled requests draw with the seed and the position of the model's own draw, and with the penalties and the bias of
    their parameters. Masks and `min_tokens` are left to the check.

    Args:
        runner: runner of the model.
        steps: steps of the draft's decoder over the runner's caches.
    """

    def __init__(self, runner: ProgramRunner, steps: DraftSteps) -> None:
        self._steps = steps
        self._vocab, self._device = runner.sizes.vocab, runner.device
        self._sampler = Sampler(runner.backend)
        self._draws: dict[Request, Draw] = {}
        self._ahead: dict[Request, _Ahead] = {}

    def begin(self, known: Mapping[Request, Sequence[int]]) -> None:
        """Start drafts after the known tokens of requests, which have not run yet."""
        self._steps.begin([request.own_row for request in known])
        for request, ids in known.items():
            self._ahead[request] = _Ahead(ids, request.num_computed, self._draw_of(request))

    def step(self, requests: Sequence[Request]) -> dict[Request, DraftToken | None]:
        """Run one draft step of some of the requests; return the tokens of those whose known tokens have all run.

        Their pages must reach up to the positions that run. The token is None where a logit is not finite.
        """
        programs = self._steps.programs
        share = max(1, min(programs.most_together, programs.most_rows // len(requests)))
        inputs: dict[int, tuple[Sequence[int], int]] = {}
        for request in requests:
            ahead = self._ahead[request]
            inputs[request.own_row] = ahead.ids[:share], ahead.start
            ahead.start += len(ahead.ids[:share])
            ahead.ids = ahead.ids[share:]
        places = self._steps.run(inputs)
        return {one: self._token(one, *places[one.own_row]) for one in requests if not self._ahead[one].ids}

    def end(self) -> None:
        """Put the recurrent states back to those before `begin`."""
        self._steps.end()
        self._ahead = {}

    def forget(self, request: Request) -> None:
        """Free what is known of a request."""
        self._draws.pop(request, None)

    def choose(self, request: Request, program: Program, at: int, draw: Draw) -> int | None:
        """Return the next token, chosen from a row's logits; None if one of them is not finite."""
        if request.params.is_greedy:
            token = int(program.state.chosen[at])
            return token if token >= 0 else None
        try:
            return self._sampler.choose([program.state.logits[at]], [draw])[0]
        except GraphError:
            return None

    def _token(self, request: Request, program: Program, at: int) -> DraftToken | None:
        """Return the draft token after a row of a program, and make it the next to run; None without one."""
        ahead = self._ahead[request]
        token = self.choose(request, program, at, ahead.draw)
        if token is None:
            return None
        ahead.draw.append(token)
        ahead.ids = [token]
        is_last = token in request.end_ids or token in request.params.stop_token_ids
        return DraftToken(token, probability_of(program.state.logits[at], token), is_last)

    def _draw_of(self, request: Request) -> Draw:
        """Return a copy of a request's sampling state after its known tokens."""
        if request not in self._draws:
            known = request.prompt_ids, request.params, self._vocab, self._device, (), request.dry_breakers
            self._draws[request] = Draw.after(*known)
        draw = self._draws[request]
        for token_id in request.token_ids[draw.position - len(request.prompt_ids) :]:
            draw.append(token_id)
        return draw.copy()


def probability_of(logits: Tensor, token_id: int) -> float:
    """Return the share of a token in the softmax of logits [V]."""
    return float((logits[token_id] - logits.logsumexp(0)).exp())
