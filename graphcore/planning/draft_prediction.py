"""A prediction of decode speed with a draft model, from acceptance that was measured by the format of its matrices.

draft    = (copies + resident weights that a step reads) / memory                        for each draft token
check    = a step of 1 + k tokens, whose first groups are read while the drafts run      (planning/prediction.py)
tokens   = 1 + p + p^2 + ... + p^k                                                       p = acceptance
speed    = tokens / (k x draft + check),  for the best k
"""

from dataclasses import dataclass

from graphcore.planning.prediction import Rates, predict
from graphcore.weights.plan import Plan

# Share of accepted draft tokens by the format of the copies, given that those before were: of the first four, over
# SmolLM2 135M and stories15M (docs/lab/speculation.md). Larger models lose less to quantisation.
ACCEPTANCE = {"q2_k": 0.7, "q3_k": 0.8, "q4_0": 0.85, "q4_k": 0.9}


@dataclass(frozen=True)
class DraftPrediction:
    """The predicted speed of one sequence with a draft model.

    Attributes:
        draft_format: format of the copies.
        acceptance: expected share of accepted draft tokens.
        draft_tokens: draft tokens of a step, with which it is fastest; 0 if none pay.
        draft_seconds: time of one draft token.
        check_seconds: time of the step that checks them.
        tokens_per_step: expected new tokens of a step.
        tokens_per_second_without: decode speed of the plan for the same budget that has no draft model.
    """

    draft_format: str
    acceptance: float
    draft_tokens: int
    draft_seconds: float
    check_seconds: float
    tokens_per_step: float
    tokens_per_second_without: float

    @property
    def tokens_per_second(self) -> float:
        """Decode speed of one sequence."""
        return self.tokens_per_step / (self.draft_tokens * self.draft_seconds + self.check_seconds)


def predict_drafts(
    plan: Plan, plain: Plan, rates: Rates, draft_format: str, most_tokens: int
) -> DraftPrediction | None:
    """Predict the decode speed under a plan with a draft model; None if the format's acceptance is not known.

    It is None, too, if nothing streams: what the copies then save follows from nothing in a plan.

    Args:
        plain: plan for the same budget without a draft model.
        most_tokens: most draft tokens of a step.
    """
    acceptance = ACCEPTANCE.get(draft_format)
    if acceptance is None or not plan.groups.streamed:
        return None
    kept_nbytes = plan.read_nbytes - plan.groups.streamed_nbytes
    draft_seconds = (plan.draft_nbytes + kept_nbytes) / rates.memory
    without = predict(plain, rates).tokens_per_second

    def with_tokens(count: int) -> DraftPrediction:
        ahead = min(count * draft_seconds, plan.groups.slots_nbytes / rates.link)
        check = predict(plan, rates, 1 + count, seconds_ahead=ahead)
        tokens = sum(acceptance**at for at in range(1 + count))
        return DraftPrediction(draft_format, acceptance, count, draft_seconds, check.seconds, tokens, without)

    return max(map(with_tokens, range(1 + most_tokens)), key=lambda one: one.tokens_per_second)
