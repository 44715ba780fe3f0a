"""Speculation: which draft tokens the next decode step checks.

A step of several tokens costs more than one of a single token, by little if weights are streamed, and by more if they
are resident. So the draft tokens of all requests are taken in order of the probability that they are accepted, as many
as give the most tokens for the time of the step; none, if that is no gain.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

from graphcore.engine.program_runner import ProgramRunner
from graphcore.engine.request import Request
from graphcore.engine.speculation.acceptance import Acceptance
from graphcore.engine.speculation.drafter import Draft, Drafter
from graphcore.engine.speculation.prompt_lookup import PromptLookup
from graphcore.engine.speculation.step_costs import StepCosts
from graphcore.kernels.cpu.program import rows_by_program
from graphcore.streaming.policy import Resident

RESIDENT_ROW, STREAMED_ROW = 0.3, 0.02  # time of a further token of a step, relative to one token, until it is measured
LEAST_GAIN = 1.03  # expected tokens for the time, relative to a step without drafts


def lookup_of(request: Request) -> Drafter:
    """Return the prompt lookup of a request."""
    return PromptLookup(request.prompt_ids)


class Speculation:
    """Proposes draft tokens for an engine's requests, from their drafters, acceptance rates and the cost of steps.

    Args:
        costs: costs of decode steps.
        most_tokens: most draft tokens of a request in one step.
        drafter_of: function that returns the drafter of a request.

    Attributes:
        acceptance: shares of accepted tokens, of all requests.
        steps: number of decode steps so far.
    """

    def __init__(
        self, costs: StepCosts, most_tokens: int, drafter_of: Callable[[Request], Drafter] = lookup_of
    ) -> None:
        self._costs, self._most_tokens, self._drafter_of = costs, most_tokens, drafter_of
        self.acceptance, self.steps = Acceptance(), 0
        self._drafters: dict[Request, tuple[Drafter, Acceptance]] = {}
        self._matched: dict[Request, int] = {}  # by the requests whose draft is being checked

    @classmethod
    def of(cls, runner: ProgramRunner) -> "Speculation":
        """Return a runner's speculation; before any step is timed, more tokens cost little if weights are streamed."""
        share = RESIDENT_ROW if isinstance(runner.policy, Resident) else STREAMED_ROW

        def guess(tokens: int) -> float:
            shares = rows_by_program(tokens)
            passes = len(shares) if share == RESIDENT_ROW else 1
            return passes + (tokens - passes) * share

        return cls(StepCosts(guess), runner.draft_tokens)

    def propose(
        self, room: Mapping[Request, int], sequences: int, tokens: int, spare: int
    ) -> dict[Request, Sequence[int]]:
        """Return the draft tokens that are worth their time in the next step.

        Args:
            room: most draft tokens of each request that may have some.
            sequences: requests of the step.
            tokens: tokens of the step without drafts.
            spare: further tokens that it has room for.
        """
        self._matched = {}
        if not room:
            return {}
        drafts = {one: self._draft(one, min(most, spare, self._most_tokens)) for one, most in room.items()}
        chances = sorted(
            ((chance, request) for request, draft in drafts.items() for chance in self._chances(request, draft)),
            key=lambda pair: -pair[0],
        )[:spare]
        gains = list(accumulate((chance for chance, _ in chances), initial=float(sequences)))
        rates = [gain / self._costs.cost(tokens + more) for more, gain in enumerate(gains)]
        best = max(range(len(rates)), key=rates.__getitem__, default=0)
        if not best or rates[best] < LEAST_GAIN * rates[0]:
            return {}
        counts: dict[Request, int] = {}
        for _, request in chances[:best]:
            counts[request] = counts.get(request, 0) + 1
        self._matched = {request: drafts[request].matched for request in counts}
        return {request: drafts[request].token_ids[:count] for request, count in counts.items()}

    def record(self, request: Request, drafted: int, accepted: int) -> None:
        """Record that a request's draft was checked."""
        self._drafters[request][1].record(self._matched.pop(request), drafted, accepted)

    def record_step(self, tokens: int, seconds: float | None) -> None:
        """Record a decode step, and its time; None if chunks of prompts ran in the same pass."""
        self.steps += 1
        if seconds is not None:
            self._costs.record(tokens, seconds)

    def forget(self, request: Request) -> None:
        """Free the drafter of a request."""
        self._drafters.pop(request, None)

    def _draft(self, request: Request, most: int) -> Draft:
        if request not in self._drafters:
            self._drafters[request] = self._drafter_of(request), Acceptance(self.acceptance)
        drafter, _ = self._drafters[request]
        drafter.append(request.token_ids[drafter.num_tokens - len(request.prompt_ids) :])
        return drafter.propose(most)

    def _chances(self, request: Request, draft: Draft) -> Iterator[float]:
        """Yield for each draft token the probability that it and all before it are accepted."""
        acceptance, chance = self._drafters[request][1], 1.0
        for at in range(len(draft.token_ids)):
            chance *= acceptance.share(draft.matched + at)
            yield chance
