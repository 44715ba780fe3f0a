"""task=plan: print the placement of weights and caches, whether they fit, and predicted speeds; reads no weights."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from omegaconf import MISSING

from graphcore.arch.config.model_config import ModelConfig
from graphcore.checkpoint.sources.hub import stored_model
from graphcore.checkpoint.sources.remote_headers import fetch_headers
from graphcore.checkpoint.sources.source import HubSource, parse_source
from graphcore.config.byte_sizes import in_words
from graphcore.config.settings import ModelSettings, Settings
from graphcore.config.validate import PROMPT_KEYS, refuse_unused_settings
from graphcore.device import use_threads
from graphcore.engine.fallback.transformers_loader import TransformersLoader
from graphcore.engine.loading.open_model import open_model
from graphcore.engine.loading.plan_run import plan_run, ram_of
from graphcore.engine.loading.plan_speculation import plan_with_speculation, predict_speculation
from graphcore.engine.loading.prepare_model import prepare_model
from graphcore.engine.loading.prepared_decoder import PreparedDecoder
from graphcore.engine.loading.runtime_config import RuntimeConfig
from graphcore.errors import CheckpointNotFoundError, ConfigError, GraphcoreError, PlanError
from graphcore.planning.draft_prediction import DraftPrediction
from graphcore.planning.machine import Machine, Speeds
from graphcore.planning.plan_record import (
    drafts_record,
    group_records,
    memory_record,
    planned_groups,
    planned_streaming_record,
    prediction_record,
)
from graphcore.planning.prediction import Rates, predict
from graphcore.planning.rates import measure_rates, moved_bytes_per_stored_byte, moves_weights
from graphcore.planning.sizes import sizes_of
from graphcore.progress import Progress, ignore_progress
from graphcore.quant.format_choice import STORED
from graphcore.registry import nearest
from graphcore.streaming.moving_weights import find_moving
from graphcore.streaming.weight_stream import link_opener
from graphcore.tasks.plan_machine import GPUS, machine_of, named, speeds_of, target_on
from graphcore.tasks.plan_ring import (
    drafts_note,
    machines_of,
    network_of,
    plan_ring,
    rank_rows,
    ring_line,
    ring_record,
)
from graphcore.tasks.report.plan_report import (
    drafts_line,
    fit_words,
    group_rows,
    movement_line,
    ram_rows,
    tier_rows,
    verdict_line,
)
from graphcore.tasks.task import Context, Record, Task
from graphcore.tasks.task_engine import group_note
from graphcore.weights.groups import LayerGroup
from graphcore.weights.plan import Plan, Tier

PREDICTED_SEQUENCES = (1, 8, 32)  # batch sizes whose speeds are predicted
SMALLER = ("q8_0", "q6_k", "q4_k", "q2_k")  # formats that are tried where the stored weights do not fit
RING_KEYS = ("ranks", "network", "latency")  # of the task, for a ring only
GPU_KEYS = ("gpu", "device_memory", "link")
ROWS = ("folded", "all")
LEAST_ALIKE = 0.8  # ratio of two sizes of the same weights: Q4_K_M has up to a quarter more than q4_k


@dataclass
class PlanSettings:
    """The keys of conf/task/plan.yaml."""

    name: str = MISSING
    gpu: str | None = MISSING
    device_memory: Any = MISSING  # a size for `byte_sizes.parse_nbytes`, or None; likewise the next four
    ram: Any = MISSING
    link: Any = MISSING
    disk: Any = MISSING
    bandwidth: Any = MISSING
    memory: Any = MISSING  # a name, or a list with one for each rank
    ranks: int | None = MISSING
    network: Any = MISSING
    latency: float | None = MISSING
    rows: str = MISSING


@dataclass(frozen=True)
class Outcome:
    """A plan with its source, its rates, and the error if it does not fit.

    Attributes:
        notes: lines about what graphcore chose or what may surprise.
        source: tier that streamed weights are read from, "disk" or "host"; empty if the plan does not fit.
        ram_nbytes: bytes in RAM besides those on the device.
        layer_groups: layers, or matrices of a layer, of each layer group.
        expert_nbytes: bytes of all experts.
        rates: given or measured rates; None where they are not known.
        drafts: predicted speed with the plan's draft model; None without one, and where it cannot be predicted.
        error: reason why the plan does not fit, or None.
        note: reason why there are no rates; empty if there are.
    """

    config: ModelConfig
    runtime: RuntimeConfig
    notes: Sequence[str]
    plan: Plan
    source: str
    layer_groups: Sequence[LayerGroup]
    ram_nbytes: int = 0
    expert_nbytes: int = 0
    rates: Rates | None = None
    drafts: DraftPrediction | None = None
    error: PlanError | None = None
    note: str = ""


def run(context: Context, task: PlanSettings) -> Record:
    """Print the plan; the status is "failed" if it does not fit."""
    settings, console = context.settings, context.console
    _refuse_unused_keys(settings, task)
    use_threads(settings.threads)
    if settings.parallel.kind == "ring":
        return _run_ring(context, task)
    gpu = named("task.gpu", task.gpu, GPUS)
    machine = machine_of(settings, task.device_memory, task.ram, gpu)
    speeds = speeds_of(machine, task.link, task.disk, task.bandwidth, task.memory, gpu)
    alternatives: list[tuple[str, Outcome]] = []
    with model_to_plan(settings, console.progress) as (model, note):  # its headers are read once
        here = replace(settings, model=model)
        outcome = _planned(here, machine, speeds, console.progress, note)
        if outcome.error is not None:
            alternatives.extend(_alternatives(here, machine, speeds, console.progress, note))
    config, plan = outcome.config, outcome.plan
    rates = outcome.rates if outcome.error is None else None
    predicted = [] if rates is None else [predict(plan, rates, sequences) for sequences in PREDICTED_SEQUENCES]
    for note in (*outcome.notes, *group_note(context, config.model_type), outcome.note):
        if note:
            console.note(note)
    console.line(verdict_line(plan, outcome.source, predicted, fits=outcome.error is None))
    for words, other in alternatives:
        console.line(f"{words} would fit: {fit_words(other.plan, other.source)}")
    groups = planned_groups(plan, outcome.layer_groups, outcome.expert_nbytes)
    free = machine.memory.free_nbytes
    title = f"{settings.model.display_name} ({config.model_type}) on {plan.device}, streaming={plan.policy}"
    tiers = [("weights", group_rows(groups, is_folded=task.rows != "all")), ("device", tier_rows(plan, free))]
    if outcome.ram_nbytes:
        tiers.append(("RAM", ram_rows(outcome.ram_nbytes, machine.ram_nbytes)))
    for name, rows in tiers:
        cells = [[name, f"{nbytes:,}", in_words(nbytes), where] for name, nbytes, where in rows]
        console.table(f"{title}: {name}", ("", "bytes", "", "where"), cells)
    if outcome.error is None:
        console.line(movement_line(plan, outcome.source, predicted))
    if outcome.drafts is not None:
        console.line(drafts_line(outcome.drafts))
    return {
        **_fit(outcome),
        **_what_ran(settings, config, outcome.runtime, outcome.notes),
        "streaming": planned_streaming_record(plan, outcome.source),
        "groups": group_records(groups),
        "memory": {
            **memory_record(plan),
            "ram_bytes": outcome.ram_nbytes,
            "offloaded_kv_bytes": 0 if plan.offloaded_kv is None else plan.offloaded_kv.nbytes,
        },
        "planned_for": machine_record(machine, speeds),
        "predicted": {**prediction_record(predicted), "drafts": drafts_record(outcome.drafts)},
        "budget_bytes": plan.budget,
        "free_bytes": free,
    }


def _alternatives(
    settings: Settings, machine: Machine, speeds: Speeds, on_progress: Progress, note: str
) -> Iterator[tuple[str, Outcome]]:
    """Yield what would fit where the plan does not: weights that stream, or smaller ones."""
    streaming, quant = settings.streaming, settings.quant
    tried: dict[str, Settings] = {}
    if streaming.policy == "off":
        tried["streaming=auto"] = replace(settings, streaming=replace(streaming, policy="auto"))
    for name in SMALLER if quant.format == STORED and settings.model.fallback is None else ():
        tried[f"quant={name}"] = replace(settings, quant=replace(quant, format=name))
    for words, asked in tried.items():
        with suppress(GraphcoreError):
            outcome = _planned(asked, machine, speeds, on_progress, note)
            if outcome.error is None:
                yield words, outcome
                if words.startswith("quant"):
                    return  # the largest that fits


def _refuse_unused_keys(settings: Settings, task: PlanSettings) -> None:
    """Check that no key is given that a plan does not use, for one process or for a ring, and the choice of rows."""
    if task.rows not in ROWS:
        raise ConfigError(f"task.rows={task.rows} must be folded or all{nearest(task.rows, ROWS)}", is_unknown=True)
    refuse_unused_settings(settings, "plan", PROMPT_KEYS)
    kind = settings.parallel.kind
    keys = GPU_KEYS if kind == "ring" else RING_KEYS
    advice = "leave it out: rings are planned on CPUs only" if kind == "ring" else "add parallel=ring, or leave it out"
    given = next((key for key in keys if vars(task)[key] is not None), None)
    if given is not None:
        raise ConfigError(f"task.{given} has no effect with parallel={kind}; {advice}")


def _run_ring(context: Context, task: PlanSettings) -> Record:
    """Print the plan of the ranks of a ring, a row for each."""
    settings, console = context.settings, context.console
    machines = machines_of(settings, task.ranks, task.ram, task.disk, task.bandwidth, task.memory)
    network = network_of(task.network, task.latency)
    with model_to_plan(settings, console.progress) as (model, note):
        opened = open_model(model, settings.seed, settings.cache_folder, console.progress)
        ring = plan_ring(settings, opened, machines, network, PREDICTED_SEQUENCES)
    runtime, config = ring.ranks[0].parts.runtime, opened.config
    keys = " and ".join(f"task.{name}" for name in ring.missing)
    notes = [*ring.ranks[0].parts.notes, drafts_note(ring), note, f"tokens/s are left out: give {keys}" if keys else ""]
    for line in filter(None, notes):
        console.note(line)
    title = f"{settings.model.display_name} ({config.model_type}) on {len(ring.ranks)} ranks"
    columns = ("rank", "layers", "resident", "read for a token", "memory", "reading", "computing")
    console.table(f"{title}, streaming={settings.streaming.policy}", columns, list(rank_rows(ring)))
    console.line(ring_line(ring))
    return {**_what_ran(settings, config, runtime, notes), **ring_record(ring, network)}


def _planned(settings: Settings, machine: Machine, speeds: Speeds, on_progress: Progress, note: str) -> Outcome:
    """Return the plan, or the smallest one where none fits.

    Args:
        speeds: the given rates; others are measured on this machine, for graphcore's own models.
        note: line that says that the files have headers only; empty if they have weights.

    Raises:
        GraphcoreError: a setting, the checkpoint or the machine rules out any plan.
    """
    if settings.model.fallback is None:
        return _planned_own(settings, machine, speeds, on_progress, note)
    backend = TransformersLoader()
    opened = backend.open(settings, on_progress)
    parts, plan, tier = plan_run(settings, backend.prepare(settings, opened, on_progress))
    rates = speeds.rates(machine, tier.kind, plan.is_streaming)
    groups = parts.weights.layer_groups
    return Outcome(opened.config, parts.runtime, parts.notes, plan, tier.kind, groups, rates=rates, note=note)


@contextmanager
def model_to_plan(settings: Settings, on_progress: Progress) -> Iterator[tuple[ModelSettings, str]]:
    """Provide model settings whose checkpoint needs no download, and a note if only its headers are there.

    A repository's model that no cache holds is planned from its headers (checkpoint/sources/remote_headers.py), and a
    model group's from its shapes if the Hub gives none.

    Raises:
        CheckpointError: the repository has no such model, or the Hub cannot be reached.
    """
    source = parse_source(settings.model.checkpoint)
    if not isinstance(source, HubSource):
        yield settings.model, ""
        return
    stored = stored_model(source)
    if stored is not None:
        yield replace(settings.model, checkpoint=str(stored)), ""
        return
    with TemporaryDirectory(prefix="graphcore-headers-") as folder:
        try:
            headers = fetch_headers(source, Path(folder), on_progress)
            read, total = in_words(headers.read_nbytes), in_words(headers.nbytes)
            note = f"planned from headers: {read} of {total} were read from the Hub, and nothing was downloaded"
            model = replace(settings.model, checkpoint=str(headers.path), sha256=None)
        except CheckpointNotFoundError as error:
            model, note = model_of_shapes(settings, error)
        yield model, note


def model_of_shapes(settings: Settings, error: CheckpointNotFoundError) -> tuple[ModelSettings, str]:
    """Return settings of random weights that are as large as a published checkpoint that cannot be read, and a note.

    Raises:
        CheckpointNotFoundError: the error that was given, where the checkpoint is no model group's; where its files
            are much smaller or larger than random weights, with these as a cure.
    """
    model = settings.model
    if model.checkpoint != model.published.checkpoint or model.fallback is not None:
        raise error
    stored_as = "" if model.precision == "full" else "q4_0" if "Q4_0" in model.checkpoint else "q4_k"
    same = replace(model, checkpoint=f"random:{stored_as}", sha256=None)
    whole = open_model(replace(same, num_hidden_layers=None), settings.seed, settings.cache_folder, ignore_progress)
    nbytes, published = sum(info.nbytes for info in whole.checkpoint.tensors.values()), model.published.nbytes
    if not LEAST_ALIKE < nbytes / published < 1 / LEAST_ALIKE:
        cure = f"or plan its shapes with model.checkpoint={same.checkpoint}"
        sizes = f"whose weights take {in_words(nbytes)}, not the {in_words(published)} of the files"
        raise CheckpointNotFoundError(f"{error}; {cure}, {sizes}") from error
    sizes = f"{in_words(nbytes)} as {same.checkpoint} for the {in_words(published)} of {model.name}"
    return same, f"planned from the shapes in conf/, {sizes}: {error}"


def _planned_own(settings: Settings, machine: Machine, speeds: Speeds, on_progress: Progress, note: str) -> Outcome:
    """Return the plan of one of graphcore's own models; a note says that its files have headers only."""
    own = open_model(settings.model, settings.seed, settings.cache_folder, on_progress)
    parts = prepare_model(settings, own, target_on(machine, settings), source_note=note)
    experts = sizes_of(parts.decoder, parts.loader.is_tied).experts
    expert_nbytes = 0 if experts is None else experts.total_nbytes
    groups = parts.layer_groups(settings.streaming)

    def measure(parts: PreparedDecoder, plan: Plan, tier: Tier) -> Rates | None:
        return known_rates(settings, parts, plan, tier, machine, speeds, on_progress, has_weights=not note)[0]

    try:
        parts, plan, tier = plan_with_speculation(settings, parts, measure, machine)
    except PlanError as error:
        if not isinstance(error.smallest, Plan):
            raise
        return Outcome(
            own.config, parts.runtime, parts.notes, error.smallest, "", groups, 0, expert_nbytes, error=error
        )
    rates, missing = known_rates(settings, parts, plan, tier, machine, speeds, on_progress, has_weights=not note)
    held = ram_of(parts, plan, tier)
    made = parts.runtime, parts.notes, plan, tier.kind, groups, held
    drafts = None if rates is None else predict_speculation(settings, parts, plan, rates, machine)
    return Outcome(own.config, *made, expert_nbytes, rates, drafts, note=missing)


def known_rates(
    settings: Settings,
    parts: PreparedDecoder,
    plan: Plan,
    tier: Tier,
    machine: Machine,
    speeds: Speeds,
    on_progress: Progress,
    has_weights: bool = True,
) -> tuple[Rates | None, str]:
    """Return the given or measured rates and an empty note, or None and a note that says why there are none.

    Args:
        has_weights: True if the files hold weights, so that reading them can be timed.
    """
    moves = moves_weights(plan)
    moving = find_moving(parts.decoder, plan, parts.layer_groups(settings.streaming))
    per_stored = moved_bytes_per_stored_byte(parts.loader, moving, tier)
    offloads = plan.offloaded_kv is not None
    rates = speeds.rates(machine, tier.kind, moves, per_stored, offloads)
    missing = speeds.missing(machine, tier.kind, moves, offloads)
    has_weights = has_weights and bool(parts.loader.checkpoint.files)
    can_be_timed = machine.is_here and (has_weights or not moves or tier.kind == "host")
    if rates is not None or not can_be_timed:
        keys = " and ".join(f"task.{name}" for name in missing)
        return rates, f"tokens/s are left out: give {keys}" if missing else ""
    on_progress("measure", None, 0, 0)
    link_to = link_opener(parts.runtime.device, settings.streaming.pinned_memory)
    folder = settings.swap_folder
    rates = measure_rates(parts.loader, moving, tier, machine, speeds, parts.runtime.backend, link_to, folder)
    low = "tokens/s are left out: too little memory is free to measure its rate; give task.bandwidth"
    return rates, "" if rates else low


def _fit(outcome: Outcome) -> Record:
    """Return whether the plan fits, and if not, status "failed" and the error."""
    if outcome.error is not None:
        return {"status": "failed", "error": f"PlanError: {outcome.error}", "fits": False}
    return {"fits": True}


def _what_ran(settings: Settings, config: ModelConfig, runtime: RuntimeConfig, notes: Sequence[str]) -> Record:
    return {
        "model": {
            "source": settings.model.checkpoint,
            "model_type": config.model_type,
            "num_hidden_layers": config.num_hidden_layers,
        },
        "device": str(runtime.device),
        "dtype": str(runtime.dtype).removeprefix("torch."),
        "kv_dtype": str(runtime.kv_dtype),
        "graph": {"kind": runtime.graph, "blocks": runtime.blocks, "prefill": runtime.prefill},
        "context_length": runtime.context_length,
        "threads": torch.get_num_threads(),
        "notes": [*filter(None, notes)],
    }


def machine_record(machine: Machine, speeds: Speeds) -> Record:
    """Return the entry of result.json for the machine that was planned for and the given rates."""
    return {
        "this_machine": machine.is_here,
        "device_memory_bytes": None if machine.device.type == "cpu" else machine.memory.free_nbytes,
        "ram_bytes": machine.ram_nbytes,
        "link_bytes_per_second": speeds.link,
        "disk_bytes_per_second": speeds.disk,
        "bandwidth_bytes_per_second": speeds.bandwidth,
    }


PLAN = Task("plan", PlanSettings, run)
