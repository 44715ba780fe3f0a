"""task=plan: say what would lie where, in bytes, whether it fits and how fast it would be; no weight is read."""

from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import MISSING

from graphcore.checkpoint.model_config import ModelConfig
from graphcore.config.settings import Settings
from graphcore.device import find_cpp_compiler, resolve_device
from graphcore.engine.assembly import Choices, choose_graph, prepare
from graphcore.engine.model import open_model
from graphcore.engine.planning import plan_run
from graphcore.engine.rates import measure_rates
from graphcore.engine.transformers_model import open_transformers
from graphcore.engine.weight_stream import way_to
from graphcore.errors import ConfigError, PlanError
from graphcore.progress import Progress
from graphcore.tasks.plan_report import (
    group_rows,
    memory_record,
    movement_line,
    planned_groups,
    prediction_record,
    streaming_record,
    tier_rows,
)
from graphcore.tasks.running import group_note, name_of, refuse_without_effect
from graphcore.tasks.task import Context, Record, Task
from graphcore.weights.plan import Plan, free_nbytes, in_words
from graphcore.weights.prediction import Rates, predict
from graphcore.weights.weight_sizes import sizes_of


@dataclass
class PlanSettings:
    """conf/task/plan.yaml."""

    name: str = MISSING
    link_gb_per_second: float | None = MISSING
    memory_gb_per_second: float | None = MISSING


@dataclass(frozen=True)
class Outcome:
    """What planning came to.

    Attributes:
        source: where streamed weights wait, "disk" or "host"; empty if the plan does not fit.
        expert_nbytes: of all experts.
        rates: given or measured; None where they are not known.
        error: why it does not fit, or None.
    """

    config: ModelConfig
    choices: Choices
    plan: Plan
    source: str
    expert_nbytes: int = 0
    rates: Rates | None = None
    error: PlanError | None = None


def run(context: Context, task: PlanSettings) -> Record:
    """Print the plan; what cannot fit is a failure."""
    settings, console = context.settings, context.console
    refuse_without_effect(settings, "plan", ("prompt", "prompt_file", "prompt_ids", "system", "stop"))
    rates = rates_of(task)
    device = resolve_device(settings.device)
    choose_graph(settings.graph.kind, device, find_cpp_compiler() is not None)
    free = free_nbytes(device)  # before rates are measured, which takes some
    outcome = planned(settings, rates, console.progress)
    config, choices, plan = outcome.config, outcome.choices, outcome.plan
    predicted = predict(plan, outcome.rates) if outcome.rates and outcome.error is None else None
    for note in (*choices.notes, *group_note(settings, config.model_type)):
        console.note(note)
    groups = planned_groups(plan, config.num_hidden_layers, settings.streaming.layer_group_size, outcome.expert_nbytes)
    title = f"{name_of(settings.model)} ({config.model_type}) on {plan.device}, streaming={plan.policy}"
    for heading, rows in ((f"{title}: weights", group_rows(groups)), (f"{title}: device", tier_rows(plan, free))):
        cells = [[name, f"{nbytes:,}", in_words(nbytes), where] for name, nbytes, where in rows]
        console.table(heading, ("", "bytes", "", "where"), cells)
    if outcome.error is None:
        console.line(movement_line(plan, outcome.source, predicted))
    return {
        **_fit(outcome),
        **_ran(settings, config, choices),
        "streaming": streaming_record(plan, outcome.source),
        "groups": [{"name": one.name, "bytes": one.nbytes, "place": one.place} for one in groups],
        "memory": memory_record(plan),
        "predicted": prediction_record(predicted),
        "budget_bytes": plan.budget,
        "free_bytes": free,
    }


def rates_of(task: PlanSettings) -> Rates | None:
    """Return the rates that were given, or None.

    Raises:
        ConfigError: one is not positive, or given without the other.
    """
    given = {"link_gb_per_second": task.link_gb_per_second, "memory_gb_per_second": task.memory_gb_per_second}
    for key, value in given.items():
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"task.{key}={value} must be more than 0")
    if task.link_gb_per_second is None and task.memory_gb_per_second is None:
        return None
    if task.link_gb_per_second is None or task.memory_gb_per_second is None:
        raise ConfigError("task.link_gb_per_second and task.memory_gb_per_second are needed both; give the other, too")
    return Rates(task.link_gb_per_second * 1e9, task.memory_gb_per_second * 1e9)


def planned(settings: Settings, rates: Rates | None, on_progress: Progress) -> Outcome:
    """Return the plan, or the smallest one where none fits.

    Args:
        rates: as given; None measures them, for graphcore's own models.

    Raises:
        GraphcoreError: as for a load.
    """
    if settings.model.fallback is not None:
        model, parts, plan, tier = open_transformers(settings, on_progress)
        return Outcome(model.config, parts.choices, plan, tier.kind, rates=rates)
    own = open_model(settings.model, settings.seed, Path(settings.cache_dir).expanduser(), on_progress)
    assembly = prepare(settings, own)
    experts = sizes_of(assembly.decoder, assembly.loader.is_tied, 1).experts
    expert_nbytes = 0 if experts is None else experts.total_nbytes
    try:
        assembly, plan, tier = plan_run(settings, own, assembly)
    except PlanError as error:
        if not isinstance(error.smallest, Plan):
            raise
        return Outcome(own.config, assembly.choices, error.smallest, "", expert_nbytes, rates, error)
    if rates is None:
        on_progress("measure", None, 0, 0)
        link_to = way_to(assembly.choices.device, settings.streaming.pinned_memory)
        rates = measure_rates(assembly, plan, tier, settings.streaming.layer_group_size, link_to)
    return Outcome(own.config, assembly.choices, plan, tier.kind, expert_nbytes, rates)


def _fit(outcome: Outcome) -> Record:
    """Return the status that the plan comes to."""
    if outcome.error is not None:
        return {"status": "failed", "error": f"PlanError: {outcome.error}", "fits": False}
    return {"fits": True}


def _ran(settings: Settings, config: ModelConfig, choices: Choices) -> Record:
    return {
        "model": {
            "source": settings.model.checkpoint,
            "model_type": config.model_type,
            "num_hidden_layers": config.num_hidden_layers,
        },
        "device": str(choices.device),
        "dtype": str(choices.dtype).removeprefix("torch."),
        "kv_dtype": str(choices.kv_dtype).removeprefix("torch."),
        "graph": {"kind": choices.graph},
        "context_length": choices.context,
        "threads": torch.get_num_threads(),
        "notes": list(choices.notes),
    }


PLAN = Task("plan", PlanSettings, run)
