"""Speculation: which draft tokens the next decode step checks.

A step of several tokens costs more than one of a single token, by little if weights are streamed, and by more if they
are resident. So the draft tokens of all requests are taken in order of the probability that they are accepted, as many
as give the most tokens for the time of the step.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

from graphcore.engine.program_runner import ProgramRunner
from graphcore.engine.request import Request
from graphcore.engine.speculation.acceptance import Acceptance, Classes
from graphcore.engine.speculation.drafter import Draft
from graphcore.engine.speculation.step_costs import StepCosts
from graphcore.kernels.cpu.program import rows_by_program
from graphcore.streaming.policy import Resident

RESIDENT_ROW, STREAMED_ROW = 0.3, 0.02  # time of a further token of a step, relative to one token, until it is measured
LEAST_GAIN = 1.03  # expected tokens for the time, relative to a step without drafts

Reserve = Callable[[Request, int], bool]
"""Function that gives a request pages for so many draft tokens after its known ones; False if too few are free."""


@dataclass(frozen=True)
class StepRoom:
    """A decode step before it has drafts.

    Attributes:
        known: tokens of each request of the step.
        most: most draft tokens of each request that may have some.
        spare: further tokens that the step has room for.
    """

    known: Mapping[Request, Sequence[int]]
    most: Mapping[Request, int]
    spare: int

    @property
    def sequences(self) -> int:
        """Number of requests of the step."""
        return len(self.known)

    @property
    def tokens(self) -> int:
        """Number of tokens of the step without drafts."""
        return sum(map(len, self.known.values()))


@dataclass
class SpeculationTimes:
    """Time of drafting and of checking since the model was loaded.

    Attributes:
        draft_seconds: float, seconds of drafting.
        draft_steps: int, steps of a draft model; 0 for drafts that are looked up.
        check_seconds: float, seconds of decode steps with draft tokens, those beside prompts left out.
        check_steps: int, number of these steps.
    """

    draft_seconds: float = 0.0
    draft_steps: int = 0
    check_seconds: float = 0.0
    check_steps: int = 0


class Speculation(ABC):
    """Proposes draft tokens for an engine's requests, from their acceptance rates and the cost of steps.

    Args:
        costs: costs of decode steps.
        most_tokens: most draft tokens of a request in one step.

    Attributes:
        classes: classes of draft tokens, by which acceptance is learned.
        acceptance: shares of accepted tokens, of all requests.
        steps: number of decode steps so far.
        times: time of drafting and checking so far.
    """

    classes: ClassVar[Classes]

    def __init__(self, costs: StepCosts, most_tokens: int) -> None:
        self._costs, self._most_tokens = costs, most_tokens
        self.acceptance, self.steps, self.times = Acceptance(self.classes), 0, SpeculationTimes()
        self._of_request: dict[Request, Acceptance] = {}
        self._checked: dict[Request, Sequence[int]] = {}  # classes of the draft tokens that are being checked

    @abstractmethod
    def propose(self, room: StepRoom, reserve: Reserve) -> dict[Request, Sequence[int]]:
        """Return the draft tokens that are worth their time in the next step; their pages are reserved."""

    def record(self, request: Request, accepted: int) -> None:
        """Record that a request's draft was checked."""
        self._acceptance_of(request).record(self._checked.pop(request), accepted)

    def record_step(self, tokens: int, seconds: float | None, *, has_drafts: bool) -> None:
        """Record a decode step, and its time; None if chunks of prompts ran in the same pass."""
        self.steps += 1
        if seconds is None:
            return
        self._costs.record(tokens, seconds)
        if has_drafts:
            self.times.check_seconds += seconds
            self.times.check_steps += 1

    def forget(self, request: Request) -> None:
        """Free what is known of a request."""
        self._of_request.pop(request, None)
        self._checked.pop(request, None)

    def _acceptance_of(self, request: Request) -> Acceptance:
        if request not in self._of_request:
            self._of_request[request] = Acceptance(self.classes, self.acceptance)
        return self._of_request[request]

    def _worth_checking(
        self, drafts: Mapping[Request, Draft], room: StepRoom, least_gain: float, drafting: float = 0.0
    ) -> dict[Request, int]:
        """Return the number of draft tokens of each request that give the most tokens for the time.

        Args:
            least_gain: smallest gain over a step without drafts.
            drafting: time that drafting took, in the unit of the step's cost.
        """
        chances = sorted(
            ((chance, request) for request, draft in drafts.items() for chance in self._chances(request, draft)),
            key=lambda pair: -pair[0],
        )[: room.spare]
        gains = list(accumulate((chance for chance, _ in chances), initial=float(room.sequences)))
        rates = [gain / (drafting + self._costs.cost(room.tokens + more)) for more, gain in enumerate(gains)]
        best = max(range(len(rates)), key=rates.__getitem__)
        counts: dict[Request, int] = {}
        if not best or rates[best] < least_gain * rates[0]:
            return counts
        for _, request in chances[:best]:
            counts[request] = counts.get(request, 0) + 1
        return counts

    def _check(self, drafts: Mapping[Request, Draft], counts: Mapping[Request, int]) -> dict[Request, Sequence[int]]:
        """Return the first tokens of drafts, which the step will check."""
        self._checked = {request: drafts[request].kinds[:count] for request, count in counts.items()}
        return {request: drafts[request].token_ids[:count] for request, count in counts.items()}

    def _chances(self, request: Request, draft: Draft) -> Iterator[float]:
        """Yield for each draft token the probability that it and all before it are accepted."""
        acceptance, chance = self._acceptance_of(request), 1.0
        for kind in draft.kinds:
            chance *= acceptance.share(kind)
            yield chance


def step_costs_of(runner: ProgramRunner) -> StepCosts:
    """Return the costs of a runner's decode steps; before any is timed, more tokens cost little if weights stream."""
    share = RESIDENT_ROW if isinstance(runner.policy, Resident) else STREAMED_ROW

    def guess(tokens: int) -> float:
        shares = rows_by_program(tokens)
        passes = len(shares) if share == RESIDENT_ROW else 1
        return passes + (tokens - passes) * share

    return StepCosts(guess)
