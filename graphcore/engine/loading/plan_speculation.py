"""The plan of a run with speculation=auto: without a draft model, or with one in the format that promises most.

nothing streams        lookup: it costs nothing, and a draft model would take memory for little
experts stream         off: each further token of a step reads further experts
on a ring              lookup: N ranks read N times as fast, but run a draft model's layers one after another
else                   a plan without a draft model, and one with copies in each format that fits beside it;
                       the fastest of them by prediction, if it is clearly faster than none; else lookup
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from graphcore.config.byte_sizes import in_words
from graphcore.config.settings import Settings
from graphcore.engine.loading.plan_run import plan_run
from graphcore.engine.loading.prepare_model import draft_of
from graphcore.engine.loading.prepared_decoder import PreparedDecoder
from graphcore.errors import ConfigError, PlanError
from graphcore.planning.draft_prediction import ACCEPTANCE, DraftPrediction, predict_drafts
from graphcore.planning.machine import Machine
from graphcore.planning.prediction import Rates, speed_in_words
from graphcore.weights.plan import Plan, Tier

# Predicted speed, relative to a plan without a draft model, that is worth its memory and the time to load it.
CLEARLY_FASTER = 1.15

Planned = tuple[PreparedDecoder, Plan, Tier]
MeasureRates = Callable[[PreparedDecoder, Plan, Tier], Rates | None]


def plan_with_speculation(
    settings: Settings, parts: PreparedDecoder, measure: MeasureRates, machine: Machine | None = None
) -> Planned:
    """Return what `plan_run` does; with speculation=auto, for the kind of speculation that promises most.

    Args:
        measure: function that returns the rates of a plan; None if they are not known.

    Raises:
        PlanError, ConfigError: as `plan_run`.
    """
    asked = settings.speculation.draft_format
    if settings.speculation.kind == "auto" and asked is not None and asked not in ACCEPTANCE:
        raise ConfigError(
            f"speculation.draft_format={asked} does not work with speculation=auto, which predicts copies in "
            f"{', '.join(ACCEPTANCE)}; leave it out, or use speculation=self"
        )
    if settings.speculation.kind != "auto" or parts.runtime.speculation == "off":
        return plan_run(settings, parts, machine)
    plain = plan_run(settings, replace(parts, notes=[*parts.notes]), machine)
    plan = plain[1]
    if plan.experts is not None:
        return _without_drafts(settings, parts, machine)
    if not plan.groups.streamed:
        return _noted(plain, "lookup, because nothing streams")
    rates = measure(*plain)
    if rates is None:
        return _noted(
            plain, "lookup here, because no rates are known to predict a draft model's speed; a run measures them"
        )
    candidates = [*_candidates(settings, parts, plan, rates, machine)]
    if not candidates:
        return _noted(plain, "lookup, because no draft model fits in the budget")
    best, predicted = max(candidates, key=lambda one: one[1].tokens_per_second)
    speed, plain_speed = predicted.tokens_per_second, predicted.tokens_per_second_without
    copies = f"copies in {predicted.draft_format}"
    told = f"predicted {speed_in_words(speed)} tokens/s with {copies}, {speed_in_words(plain_speed)} without"
    if speed < CLEARLY_FASTER * plain_speed:
        return _noted(plain, f"lookup ({told})")
    return _noted(best, f"self, a draft model of {in_words(best[1].draft_nbytes)} ({told})")


def predict_speculation(
    settings: Settings, parts: PreparedDecoder, plan: Plan, rates: Rates, machine: Machine | None = None
) -> DraftPrediction | None:
    """Return the predicted speed of a plan with a draft model; None without one, or if it cannot be predicted."""
    if parts.draft is None or not plan.draft_nbytes:
        return None
    try:
        _, plain, _ = plan_run(settings, replace(parts, draft=None, notes=[]), machine)
    except PlanError:
        return None
    return predict_drafts(plan, plain, rates, parts.runtime.draft_format, parts.runtime.draft_tokens)


def without_model(settings: Settings, planned: Planned, has_experts: bool, machine: Machine) -> Planned:
    """Return the plan of one rank with speculation=auto, which on a ring is prompt lookup, or off if experts stream.

    Args:
        has_experts: True if experts stream on any rank.
    """
    if has_experts:
        return _without_drafts(settings, planned[0], machine)
    return _noted(planned, "lookup, because a draft model's steps go round the ring one after another")


def _without_drafts(settings: Settings, parts: PreparedDecoder, machine: Machine | None) -> Planned:
    without = replace(parts, runtime=replace(parts.runtime, speculation="off", draft_tokens=0))
    found = plan_run(settings, without, machine)
    found[0].notes[:] = dict.fromkeys(found[0].notes)  # those of an earlier plan come again
    return _noted(found, "off, because experts stream: each draft token reads further ones")


def _noted(planned: Planned, said: str) -> Planned:
    planned[0].notes.append(f"speculation=auto: {said}")
    return planned


def _candidates(
    settings: Settings, parts: PreparedDecoder, plain: Plan, rates: Rates, machine: Machine | None
) -> Iterator[tuple[Planned, DraftPrediction]]:
    """Yield the plans with a draft model that fit, one for each format whose acceptance is known."""
    asked = settings.speculation.draft_format
    for draft_format in [asked] if asked is not None else ACCEPTANCE:
        runtime = replace(parts.runtime, speculation="self", draft_format=draft_format)
        try:
            draft = draft_of(runtime, parts.decoder, parts.loader)
            planned = plan_run(settings, replace(parts, runtime=runtime, notes=[*parts.notes], draft=draft), machine)
        except (PlanError, ConfigError):
            continue
        predicted = predict_drafts(planned[1], plain, rates, draft_format, parts.runtime.draft_tokens)
        if planned[1].groups.streamed and predicted is not None:
            yield planned, predicted
