"""task=plan: say what would lie where, in bytes, and whether it fits; no weight is read."""

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from omegaconf import MISSING

from graphcore.checkpoint.model_config import ModelConfig
from graphcore.config.settings import Settings
from graphcore.device import find_cpp_compiler, resolve_device
from graphcore.engine.assembly import Choices, choose_graph, prepare
from graphcore.engine.model import Progress, open_model
from graphcore.engine.planning import plan_run
from graphcore.engine.transformers_model import open_transformers
from graphcore.errors import PlanError
from graphcore.tasks.running import group_note, refuse_without_effect
from graphcore.tasks.task import Context, Record, Task
from graphcore.weights.groups import split_layers
from graphcore.weights.plan import Plan, free_nbytes, gib


@dataclass
class PlanSettings:
    """conf/task/plan.yaml."""

    name: str = MISSING


def run(context: Context, _task: PlanSettings) -> Record:
    """Print the plan; what cannot fit is a failure."""
    settings, console = context.settings, context.console
    refuse_without_effect(settings, "plan", ("prompt", "prompt_file", "prompt_ids", "system", "stop"))
    choose_graph(settings.graph.kind, resolve_device(settings.device), find_cpp_compiler() is not None)
    config, choices, plan = plan_of(settings, console.progress)
    for note in (*choices.notes, *group_note(settings, config.model_type)):
        console.note(note)
    names = group_names(config.num_hidden_layers, settings.streaming.layer_group_size)
    free = free_nbytes(choices.device)
    console.table(
        f"{settings.model.name} ({config.model_type}) on {plan.device}, streaming={settings.streaming.policy}",
        ("", "bytes", ""),
        [[name, f"{nbytes:,}", gib(nbytes)] for name, nbytes in table_rows(names, plan, free)],
    )
    return {**_fit(plan, free), **_record(context, config, choices, plan, names), "free_bytes": free}


def plan_of(settings: Settings, on_progress: Progress) -> tuple[ModelConfig, Choices, Plan]:
    """Return the model's config, what the settings come to, and the plan.

    Raises:
        GraphcoreError: as for a load.
    """
    if settings.model.fallback is not None:
        transformers_model, transformers_parts, plan, _ = open_transformers(settings, on_progress)
        return transformers_model.config, transformers_parts.choices, plan
    model = open_model(settings.model, settings.seed, Path(settings.cache_dir).expanduser(), on_progress)
    parts, plan, _ = plan_run(settings, model, prepare(settings, model))
    return model.config, parts.choices, plan


def group_names(num_layers: int, layer_group_size: int) -> list[str]:
    """Return what the plan's groups are called: the embedding, layer groups, the head."""
    groups = split_layers(num_layers, layer_group_size)
    layers = [f"layers.{group[0]}" + (f"-{group[-1]}" if len(group) > 1 else "") for group in groups]
    return ["embed_tokens", *layers, "head"]


def table_rows(names: list[str], plan: Plan, free: int) -> list[tuple[str, int]]:
    """Return the rows of the table; neighbouring groups of one size share a row."""
    rows = []
    for nbytes, run_of in groupby(zip(names, plan.group_nbytes, strict=True), key=lambda pair: pair[1]):
        same = [name for name, _ in run_of]
        label = same[0] if len(same) == 1 else f"{same[0]} ... {same[-1]} (each)"
        rows.append((label, nbytes))
    return [
        *rows,
        ("weights", plan.weight_nbytes),
        ("kv cache", plan.kv_nbytes),
        ("total", plan.total_nbytes),
        ("free", free),
    ]


def _fit(plan: Plan, free: int) -> Record:
    """Return the status that the plan comes to."""
    try:
        plan.check_fits(free)
    except PlanError as error:
        return {"status": "failed", "error": f"PlanError: {error}", "fits": False}
    return {"fits": True}


def _record(context: Context, config: ModelConfig, choices: Choices, plan: Plan, names: list[str]) -> Record:
    settings = context.settings
    return {
        "model": {
            "source": settings.model.checkpoint,
            "model_type": config.model_type,
            "num_hidden_layers": config.num_hidden_layers,
        },
        "device": plan.device,
        "dtype": str(choices.dtype).removeprefix("torch."),
        "kv_dtype": str(choices.kv_dtype).removeprefix("torch."),
        "graph": {"kind": choices.graph},
        "streaming": {"policy": settings.streaming.policy},
        "context_length": choices.context,
        "threads": torch.get_num_threads(),
        "notes": list(choices.notes),
        "groups": [{"name": name, "bytes": nbytes} for name, nbytes in zip(names, plan.group_nbytes, strict=True)],
        "memory": {
            "weight_bytes": plan.weight_nbytes,
            "kv_bytes": plan.kv_nbytes,
            "total_bytes": plan.total_nbytes,
        },
    }


PLAN = Task("plan", PlanSettings, run)
