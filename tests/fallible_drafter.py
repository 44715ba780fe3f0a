"""Speculation for tests: a drafter that knows the answer and drafts it with errors, and steps that cost nothing."""

import random
from collections.abc import Sequence

from graphcore.engine.speculation.drafter import Draft, Drafter
from graphcore.engine.speculation.step_costs import StepCosts


class FreeSteps(StepCosts):
    """Steps that cost the same for any number of tokens, so that all drafts are checked, whatever a clock says."""

    def __init__(self) -> None:
        super().__init__(lambda tokens: 1.0)

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
        return Draft([(one + (self._draw.random() < self._error_rate)) % self._vocab for one in ids], 30)
