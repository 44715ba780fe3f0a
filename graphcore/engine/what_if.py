"""Memory plans of a loaded model for other budgets, without reloading: placement and predicted decode speed.

Sizes come from the decoder that runs, so a plan takes milliseconds. Context and sequences are those that run, or others
that are asked for; weights keep the formats that they were loaded in.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from graphcore.config.settings import Settings
from graphcore.engine.engine import Engine
from graphcore.engine.loading.load_model import LoadedModel
from graphcore.engine.loading.plan_run import plan_run
from graphcore.engine.loading.prepared_decoder import PreparedDecoder
from graphcore.engine.loading.runtime_config import choose_context_length, choose_snapshots
from graphcore.engine.program_runner import ProgramRunner
from graphcore.errors import ConfigError, PlanError
from graphcore.planning.machine import RESERVE_NBYTES, Machine, Memory, Speeds
from graphcore.planning.plan_record import group_records, memory_record, planned_groups, planned_streaming_record
from graphcore.planning.prediction import Prediction, Rates, predict
from graphcore.planning.rates import measure_rates, moves_weights
from graphcore.streaming.moving_weights import find_moving
from graphcore.streaming.weight_stream import link_opener
from graphcore.weights.groups import LayerGroup, split_layers
from graphcore.weights.plan import Plan, Tier

TOO_SMALL = "1kB"  # a budget that no model fits in: its refusal has the smallest plan
MOST_KNOWN = 100  # sizes whose smallest budget is remembered


@dataclass(frozen=True)
class Sizes:
    """The sizes of a what-if besides its budget; None is that of the engine that runs.

    Attributes:
        context_length: most tokens of a sequence.
        max_sequences: most sequences that run at once.
    """

    context_length: int | None = None
    max_sequences: int | None = None


@dataclass(frozen=True)
class BudgetPlan:
    """The plan for a budget, or the smallest plan if none fits.

    Attributes:
        tier: tier that streamed weights would be read from; None if the plan does not fit.
        error: reason why no plan fits; None if one does.
    """

    plan: Plan
    tier: Tier | None
    error: str | None = None


AS_IT_RUNS = Sizes()


class WhatIf:
    """Plans an engine's model for other memory budgets and sizes, with streaming=auto.

    Args:
        engine: the engine; it may be rebuilt meanwhile.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._lock = engine, threading.Lock()
        self._smallest: tuple[LoadedModel, dict[Sizes, int]] | None = None
        self._rates: dict[tuple[str, bool, bool, bool], Rates | None] = {}

    def plan(self, memory_budget: Any, sizes: Sizes = AS_IT_RUNS) -> BudgetPlan:
        """Return the plan for a budget: a size for `byte_sizes.parse_nbytes`, such as "8GB", or "auto".

        Raises:
            ConfigError: the budget is no size, the context is longer than the model's, the model runs through
                transformers' own class, or other ranks share it.
        """
        if self._engine.loaded.ranks is not None:
            raise ConfigError(
                "memory_budget: plans for other budgets are made for one process, and here layers would be split "
                "among the ranks anew; use task=plan parallel=ring, with task.ranks and streaming.memory_budget"
            )
        return self._planned(memory_budget, sizes)

    def _planned(self, memory_budget: Any, sizes: Sizes) -> BudgetPlan:
        """Return the plan for a budget, on a ring of this rank's layers."""
        loaded = self._engine.loaded
        parts, settings = resized(parts_of(loaded), loaded.settings, sizes)
        streaming = replace(settings.streaming, policy="auto", memory_budget=memory_budget)
        try:
            _, plan, tier = plan_run(replace(settings, streaming=streaming), parts, unloaded_machine(loaded))
        except PlanError as error:
            smallest = error.smallest if isinstance(error.smallest, Plan) else loaded.plan
            return BudgetPlan(smallest, None, str(error))
        return BudgetPlan(plan, tier)

    def smallest_nbytes(self, sizes: Sizes = AS_IT_RUNS) -> int:
        """Return the smallest budget that works, in bytes; on a ring for this rank's layers.

        Raises:
            ConfigError: the context is longer than the model's, or the model runs through transformers' own class.
        """
        loaded = self._engine.loaded
        if self._smallest is None or self._smallest[0] is not loaded:
            self._smallest = loaded, {}
        known = self._smallest[1]
        if sizes not in known:
            if len(known) == MOST_KNOWN:
                known.clear()
            known[sizes] = self._planned(TOO_SMALL, sizes).plan.peak_nbytes
        return known[sizes]

    def predict(self, planned: BudgetPlan) -> Prediction | None:
        """Return the predicted decode speed of one sequence; None if the plan does not fit.

        It is None, too, if too little memory is free to measure its rate. The first call measures that, and the rate of
        reading weights if the plan moves any, between two passes, within a second or two.
        """
        if planned.tier is None:
            return None
        tier = planned.tier
        key = tier.kind, tier.is_direct, moves_weights(planned.plan), planned.plan.offloaded_kv is not None
        with self._lock:
            if key not in self._rates:
                self._rates[key] = self._engine.between_passes(lambda: self._measured(planned.plan, tier))
            rates = self._rates[key]
        return None if rates is None else predict(planned.plan, rates)

    def _measured(self, plan: Plan, tier: Tier) -> Rates | None:
        loaded = self._engine.loaded
        parts, streaming = parts_of(loaded), loaded.settings.streaming
        device = parts.runtime.device
        known = next((rates for rates in self._rates.values() if rates is not None), None)
        moving = find_moving(parts.decoder, plan, parts.layer_groups(replace(streaming, policy="auto")))
        link_to = link_opener(device, streaming.pinned_memory)
        here, folder = Machine.here(device), loaded.settings.swap_folder
        rates = measure_rates(parts.loader, moving, tier, here, Speeds(), parts.runtime.backend, link_to, folder)
        return rates if rates is None or known is None else replace(rates, memory=known.memory)


def parts_of(loaded: LoadedModel) -> PreparedDecoder:
    """Return the inputs of the planner for a loaded model.

    Raises:
        ConfigError: the model runs through transformers' own class, or the engine is closed.
    """
    if not isinstance(loaded.runner, ProgramRunner):
        raise ConfigError("plans for other budgets need graphcore's own programs; leave out model.fallback")
    return PreparedDecoder(loaded.runtime, [], loaded.loader, loaded.runner.builder.decoder, loaded.draft)


def resized(parts: PreparedDecoder, settings: Settings, sizes: Sizes) -> tuple[PreparedDecoder, Settings]:
    """Return the inputs of the planner and the settings, both with the sizes.

    Raises:
        ConfigError: the context is longer than the model's, or than batching.cache_tokens.
    """
    runtime, batching = parts.runtime, settings.batching
    context, sequences = sizes.context_length or runtime.context_length, sizes.max_sequences or batching.max_sequences
    settings = replace(settings, context_length=context, batching=replace(batching, max_sequences=sequences))
    if sizes == AS_IT_RUNS:
        return parts, settings
    spec = parts.decoder.spec
    runtime = replace(
        runtime,
        context_length=choose_context_length(settings, spec.context),
        prefill_chunk=min(settings.prefill_chunk, context),
        batch_size=sequences,
        snapshots=choose_snapshots(settings, spec),
    )
    return replace(parts, runtime=runtime), settings


def unloaded_machine(loaded: LoadedModel) -> Machine:
    """Return this machine with the memory that was free before the model was loaded, or would be after unloading it.

    On a ring it is this rank's part of the machine.
    """
    here, plan, ranks = Machine.here(loaded.runtime.device), loaded.plan, loaded.ranks
    ranks_here, sharers = (1, 1) if ranks is None else (ranks.launch.local_world_size, ranks.sharers)
    here = here.shared(ranks_here, sharers)
    waiting = loaded.weight_stream.host_nbytes
    if loaded.free_memory is not None:
        memory = replace(here.memory, free_nbytes=loaded.free_memory.before // sharers)
        return replace(here, memory=memory, ram_nbytes=here.ram_nbytes + waiting)
    most = max(here.memory.free_nbytes, (here.memory.physical_nbytes - RESERVE_NBYTES) // ranks_here)
    free = min(here.memory.free_nbytes + plan.total_nbytes + waiting, most)
    return replace(here, memory=Memory(here.memory.device, free, here.memory.physical_nbytes), ram_nbytes=free)


def plan_record(engine: Engine, planned: BudgetPlan, link: float | None) -> dict[str, Any]:
    """Return a plan of an engine's model as a record: for GET /plan, and for the page of a traced run.

    Args:
        link: bytes/s at which weights arrive in slots when nothing else runs; None if not measured.
    """
    plan, num_layers = planned.plan, engine.config.num_hidden_layers
    groups = planned_groups(plan, layer_groups_of(engine, plan), expert_nbytes_of(engine))
    return {
        "model_type": engine.config.model_type,
        "device": str(engine.choices.device),
        "num_layers": num_layers,
        "budget_bytes": plan.budget,
        "is_streaming": plan.is_streaming,
        "memory": memory_record(plan),
        "groups": group_records(groups),
        "streaming": planned_streaming_record(plan, "" if planned.tier is None else planned.tier.kind),
        "link_bytes_per_second": link,
    }


def expert_nbytes_of(engine: Engine) -> int:
    """Return the bytes of all experts of an engine's model."""
    try:
        parts = parts_of(engine.loaded)
    except ConfigError:
        return 0
    experts = parts.sizes(engine.settings).experts
    return 0 if experts is None else experts.total_nbytes


def layer_groups_of(engine: Engine, plan: Plan) -> Sequence[LayerGroup]:
    """Return the layer groups that a plan of an engine's model is about."""
    streaming = replace(engine.settings.streaming, policy=plan.policy)
    if not isinstance(engine.runner, ProgramRunner):
        return split_layers(engine.config.num_hidden_layers, streaming.layers_per_group)
    return parts_of(engine.loaded).layer_groups(streaming)
