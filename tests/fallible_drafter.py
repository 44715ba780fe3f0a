"""Speculation for tests: drafters that know the answer and draft it with errors, and steps that cost nothing."""

import random
from collections.abc import Callable, Sequence

from graphcore.engine.program_runner import ProgramRunner
from graphcore.engine.programs import Programs
from graphcore.engine.request import Request
from graphcore.engine.speculation.draft_model import DraftModel
from graphcore.engine.speculation.drafter import Draft, Drafter
from graphcore.engine.speculation.prompt_lookup import MATCHES
from graphcore.engine.speculation.step_costs import StepCosts
from graphcore.graph.program import Program
from graphcore.kernels.ops.draw import Draw


class FreeSteps(StepCosts):
    """Steps that cost the same for any number of tokens, so that all drafts are checked, whatever a clock says."""

    def __init__(self, cost: float = 1.0) -> None:
        super().__init__(lambda tokens: cost)

    def record(self, tokens: int, seconds: float) -> None:
        """Record nothing."""


class FallibleDrafter(Drafter):
    """A drafter that knows an answer, and drafts some of its tokens wrong.

    Args:
        error_rate: share of tokens that are drafted wrong.
        vocab: number of tokens.
    """

    def __init__(self, prompt: Sequence[int], answer: Sequence[int], error_rate: float, vocab: int) -> None:
        self.num_tokens = len(prompt)
        self._ids, self._draw = [*prompt, *answer], random.Random(len(prompt))
        self._error_rate, self._vocab = error_rate, vocab

    def append(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        self.num_tokens += len(token_ids)

    def propose(self, most: int) -> Draft:
        """Return the next tokens, some of them wrong."""
        ids = self._ids[self.num_tokens : self.num_tokens + most]
        wrong = [(one + (self._draw.random() < self._error_rate)) % self._vocab for one in ids]
        return Draft(wrong, [MATCHES.of(30)] * len(wrong))


class FallibleModel(DraftModel):
    """A draft model whose steps run, but whose tokens are those of a known answer, some of them wrong.

    Args:
        answer_of: function that returns what is known of a request's answer.
        error_rate: share of tokens that are drafted wrong.
    """

    def __init__(
        self,
        runner: ProgramRunner,
        programs: Programs,
        answer_of: Callable[[Request], Sequence[int]],
        error_rate: float,
    ) -> None:
        super().__init__(runner, programs)
        self._answer_of, self._error_rate, self._random = answer_of, error_rate, random.Random(1)

    def choose(self, request: Request, program: Program, at: int, draw: Draw) -> int | None:
        """Return the token at the draw's position of the answer, or a wrong one; the own choice where it is unknown."""
        answer, place = self._answer_of(request), draw.position - len(request.prompt_ids)
        token = answer[place] if place < len(answer) else super().choose(request, program, at, draw)
        return None if token is None else (token + (self._random.random() < self._error_rate)) % self._vocab
