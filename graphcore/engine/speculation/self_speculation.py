"""Self-speculation: a copy of the model's own layers in a small format drafts, and the model checks.

    reading    | ... last groups | first groups of the next pass |  further groups ...
    compute    | ... check       | draft  draft  draft  draft    |  check of 5 tokens ...

How many steps the draft model takes is decided after each of them (draft_depth.py): from the time of draft steps and of
checks, which are measured, and from how often its tokens were accepted, by the probability that it gave them. Where it
loses, nothing is drafted, but for a short attempt now and then.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from graphcore.engine.program_runner import ProgramRunner
from graphcore.engine.request import Request
from graphcore.engine.speculation.acceptance import Classes
from graphcore.engine.speculation.draft_depth import Chain, worth_drafting
from graphcore.engine.speculation.draft_model import DraftModel, DraftToken
from graphcore.engine.speculation.draft_steps import DraftSteps
from graphcore.engine.speculation.drafter import Draft
from graphcore.engine.speculation.speculation import LEAST_GAIN, Reserve, Speculation, StepRoom, step_costs_of
from graphcore.engine.speculation.step_costs import StepCosts

PROBABILITIES = Classes(
    (0.0, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96, 0.99), (0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.88, 0.94, 0.97)
)
"""Classes of draft tokens by the probability that the draft model gives them."""
DRAFT_STEP = 0.3  # time of a draft step, relative to a step of one token, until it is measured
ATTEMPT_AFTER = 128  # steps without drafts after which a short draft shows whether it would pay again
ATTEMPT_TOKENS = 3
PLAIN_AFTER = 64  # steps after which one without drafts is measured again, as what drafts are compared with


@dataclass
class _Growing:
    """The draft of one request while it grows."""

    most: int
    token_ids: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    chance: float = 1.0
    is_open: bool = True

    @property
    def draft(self) -> Draft:
        """The draft so far."""
        return Draft(self.token_ids, self.kinds)


class SelfSpeculation(Speculation):
    """Speculation with a draft model.

    Args:
        draft_costs: costs of draft steps, by their number of requests; None to learn them.

    Attributes:
        model: draft model.
    """

    classes = PROBABILITIES

    def __init__(
        self, costs: StepCosts, most_tokens: int, model: DraftModel, draft_costs: StepCosts | None = None
    ) -> None:
        super().__init__(costs, most_tokens)
        self.model = model
        self._draft_costs = draft_costs or StepCosts(lambda rows: DRAFT_STEP * costs.cost(rows))
        self._without = 0  # steps since the last draft

    @classmethod
    def of(cls, runner: ProgramRunner, steps: DraftSteps) -> "SelfSpeculation":
        """Return the speculation of a runner with a draft model, whose steps are given."""
        return cls(step_costs_of(runner), runner.draft_tokens, DraftModel(runner, steps))

    def propose(self, room: StepRoom, reserve: Reserve) -> dict[Request, Sequence[int]]:
        """Run draft steps as long as they are worth their time, and return the tokens to check."""
        if not room.most or self._costs.age(room.tokens) > PLAIN_AFTER:
            return {}
        self._without += 1
        is_attempt = self._without > ATTEMPT_AFTER
        check = [self._costs.cost(room.tokens + more) for more in range(room.spare + 1)]
        growing = {request: _Growing(min(most, self._most_tokens)) for request, most in room.most.items()}
        spent, has_begun = 0.0, False
        try:
            while going_on := self._going_on(growing, room, check, spent, is_attempt):
                if not has_begun:
                    self.model.begin({request: room.known[request] for request in growing})
                    has_begun = True
                spent += self._draft(going_on, growing, reserve)
        finally:
            if has_begun:
                self.model.end()
        if not has_begun:
            return {}
        self._without = 0
        self.times.draft_seconds += spent
        drafts = {request: one.draft for request, one in growing.items() if one.token_ids}
        if is_attempt:
            return self._check(drafts, {request: len(draft.token_ids) for request, draft in drafts.items()})
        return self._check(drafts, self._worth_checking(drafts, room, 0.0, spent))

    def forget(self, request: Request) -> None:
        """Free what is known of a request."""
        super().forget(request)
        self.model.forget(request)

    def _going_on(
        self, growing: dict[Request, _Growing], room: StepRoom, check: Sequence[float], spent: float, is_attempt: bool
    ) -> list[Request]:
        """Return the requests whose drafts are worth another step."""
        drafted = sum(len(one.token_ids) for one in growing.values())
        open_ones = [item for item in growing.items() if item[1].is_open and len(item[1].token_ids) < item[1].most]
        able = sorted(open_ones, key=lambda item: -item[1].chance)[: max(0, room.spare - drafted)]
        if is_attempt and drafted < ATTEMPT_TOKENS:
            return [request for request, _ in able]
        chains = [
            Chain(one.chance, self._acceptance_of(request).share_of_all, one.most - len(one.token_ids))
            for request, one in able
        ]
        gained = room.sequences + sum(sum(self._chances(request, one.draft)) for request, one in growing.items())
        least_gain = 1.0 if drafted else LEAST_GAIN
        count = worth_drafting(chains, gained, spent, check[drafted:], self._draft_costs.cost, least_gain)
        return [request for request, _ in able[:count]]

    def _draft(self, requests: Sequence[Request], growing: dict[Request, _Growing], reserve: Reserve) -> float:
        """Run one draft step of requests, those that get the pages; return its seconds."""
        began = time.perf_counter()
        ready = [request for request in requests if reserve(request, 1 + len(growing[request].token_ids))]
        for request in set(requests).difference(ready):
            growing[request].is_open = False
        if not ready:
            return 0.0
        found = self.model.step(ready)
        for request, token in found.items():
            self._append(request, growing[request], token)
        seconds = time.perf_counter() - began
        if self.times.draft_steps:  # the first step has costs that no other has
            self._draft_costs.record(len(ready), seconds)
        self.times.draft_steps += 1
        return seconds

    def _append(self, request: Request, growing: _Growing, token: DraftToken | None) -> None:
        """Append a token to a draft; none ends it."""
        if token is None:
            growing.is_open = False
            return
        kind = self.classes.of(token.probability)
        growing.token_ids.append(token.token_id)
        growing.kinds.append(kind)
        growing.chance *= self._acceptance_of(request).share(kind)
        growing.is_open = not token.is_last
