"""Prompt lookup: drafts are what followed the last tokens at an earlier place of the same sequence.

    prompt   ... the cat sat on the mat ...      answer   ... the cat sat
                             |-- draft --|                    |-- longest suffix that occurs before

The longest suffix is searched with whole-array comparisons: 25 us for 100,000 tokens, far less than a step, and no
index has to be kept.

Source: Saxena 2023, Prompt Lookup Decoding; Yang et al. 2023 (LLMA), arXiv 2304.04487.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np

from graphcore.engine.program_runner import ProgramRunner
from graphcore.engine.request import Request
from graphcore.engine.speculation.acceptance import Classes
from graphcore.engine.speculation.drafter import Draft, Drafter
from graphcore.engine.speculation.speculation import (
    LEAST_GAIN,
    Reserve,
    Speculation,
    StepRoom,
    step_costs_of,
)
from graphcore.engine.speculation.step_costs import StepCosts

LONGEST_MATCH = 32  # tokens; a longer match says no more
MATCHES = Classes((1, 2, 3, 4, 6, 9, 14, 20), (0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.88, 0.92))
"""Classes of draft tokens by the number of tokens before them that agree with the place where they were found."""


class PromptLookup(Drafter):
    """Drafter that looks the last tokens of a sequence up among those before."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._tokens = np.array([*token_ids], dtype=np.int64)
        self.num_tokens = len(self._tokens)

    def append(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        end = self.num_tokens + len(token_ids)
        if end > len(self._tokens):
            self._tokens = np.concatenate([self._tokens[: self.num_tokens], np.empty(max(end, 64), dtype=np.int64)])
        self._tokens[self.num_tokens : end] = token_ids
        self.num_tokens = end

    def propose(self, most: int) -> Draft:
        """Return what followed the latest of the longest matches; if it overlaps the end, it repeats from there on."""
        tokens = self._tokens[: self.num_tokens]
        if most < 1 or not len(tokens):
            return Draft()
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])
        if not len(ends):
            return Draft()
        matched = 1
        while matched < LONGEST_MATCH:
            before = ends - matched
            longer = ends[(before >= 0) & (tokens[before] == tokens[-1 - matched])]
            if not len(longer):
                break
            ends, matched = longer, matched + 1
        follows = tokens[int(ends[-1]) + 1 :]  # at least one token: the last one
        ids = np.resize(follows, most) if len(follows) < most else follows[:most]
        return Draft(ids.tolist(), [MATCHES.of(matched + at) for at in range(most)])


def lookup_of(request: Request) -> Drafter:
    """Return the prompt lookup of a request."""
    return PromptLookup(request.prompt_ids)


class LookupSpeculation(Speculation):
    """Speculation with a drafter for each request, which costs no time worth mentioning and writes no cache.

    Args:
        drafter_of: function that returns the drafter of a request.
    """

    classes = MATCHES

    def __init__(
        self, costs: StepCosts, most_tokens: int, drafter_of: Callable[[Request], Drafter] = lookup_of
    ) -> None:
        super().__init__(costs, most_tokens)
        self._drafter_of = drafter_of
        self._drafters: dict[Request, Drafter] = {}

    @classmethod
    def of(cls, runner: ProgramRunner) -> "LookupSpeculation":
        """Return prompt lookup for a runner's requests."""
        return cls(step_costs_of(runner), runner.draft_tokens)

    def propose(self, room: StepRoom, reserve: Reserve) -> dict[Request, Sequence[int]]:
        """Return the draft tokens that are worth their time; none if that is too small a gain."""
        if not room.most:
            return {}
        began = time.perf_counter()
        drafts = {one: self._draft(one, min(most, room.spare, self._most_tokens)) for one, most in room.most.items()}
        counts = self._worth_checking(drafts, room, LEAST_GAIN)
        self.times.draft_seconds += time.perf_counter() - began
        return self._check(drafts, {one: count for one, count in counts.items() if reserve(one, count)})

    def forget(self, request: Request) -> None:
        """Free the drafter of a request."""
        super().forget(request)
        self._drafters.pop(request, None)

    def _draft(self, request: Request, most: int) -> Draft:
        if request not in self._drafters:
            self._drafters[request] = self._drafter_of(request)
        drafter = self._drafters[request]
        drafter.append(request.token_ids[drafter.num_tokens - len(request.prompt_ids) :])
        return drafter.propose(most)
