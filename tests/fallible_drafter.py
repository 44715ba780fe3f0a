"""Speculation for tests: drafters that know the answer and draft it with errors, and steps that cost nothing."""

import random
from collections.abc import Callable, Sequence

from graphcore.engine.program_runner import ProgramRunner
from graphcore.engine.request import Request
from graphcore.engine.speculation.draft_model import DraftModel
from graphcore.engine.speculation.draft_steps import DraftSteps
from graphcore.engine.speculation.drafter import Draft, Drafter
from graphcore.engine.speculation.prompt_lookup import MATCHES, LookupSpeculation
from graphcore.engine.speculation.self_speculation import SelfSpeculation
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
        steps: DraftSteps,
        answer_of: Callable[[Request], Sequence[int]],
        error_rate: float,
    ) -> None:
        super().__init__(runner, steps)
        self._answer_of, self._error_rate, self._random = answer_of, error_rate, random.Random(1)

    def choose(self, request: Request, program: Program, at: int, draw: Draw) -> int | None:
        """Return the token at the draw's position of the answer, or a wrong one; the own choice where it is unknown."""
        answer, place = self._answer_of(request), draw.position - len(request.prompt_ids)
        token = answer[place] if place < len(answer) else super().choose(request, program, at, draw)
        return None if token is None else (token + (self._random.random() < self._error_rate)) % self._vocab


class KnownAnswers:
    """Speculation from known answers, a part of whose tokens is drafted wrong.

    Attributes:
        answers: answers by prompt; drafts of other prompts are all wrong, or a draft model's own.
    """

    def __init__(self) -> None:
        self.answers: dict[tuple[int, ...], Sequence[int]] = {}

    def patch(self, replace: Callable[[object, str, object], None]) -> None:
        """Replace both kinds of speculation, with a function such as `setattr`."""
        replace(LookupSpeculation, "of", self._lookup_of)
        replace(SelfSpeculation, "of", self._self_of)

    def _lookup_of(self, runner: ProgramRunner) -> LookupSpeculation:
        vocab = runner.sizes.vocab

        def drafter_of(request: Request) -> Drafter:
            answer = self.answers.get(tuple(request.prompt_ids), [2] * 20)
            return FallibleDrafter(request.prompt_ids, [*answer, *[1] * 20], 0.3, vocab)

        return LookupSpeculation(FreeSteps(), runner.draft_tokens, drafter_of)

    def _self_of(self, runner: ProgramRunner, steps: DraftSteps) -> SelfSpeculation:
        model = FallibleModel(runner, steps, lambda one: self.answers.get(tuple(one.prompt_ids), ()), 0.3)
        return SelfSpeculation(FreeSteps(), runner.draft_tokens, model, FreeSteps(0.0))
