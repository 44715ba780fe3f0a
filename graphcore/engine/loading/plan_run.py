"""The plan of a run: from settings and a prepared model to what fits on the device and in RAM.

    tier -> sizes, costs and request -> plan -> RAM is checked -> the runtime configuration takes the plan's context

Both kinds of model are planned here; what differs is behind `PreparedModel`.
"""

import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from graphcore.config.byte_sizes import in_words, parse_nbytes
from graphcore.config.settings import Settings
from graphcore.engine.loading.model_loader import P, PreparedModel
from graphcore.engine.loading.runtime_config import DEFAULT_CONTEXT
from graphcore.errors import PlanError
from graphcore.host_pages import is_in_ram
from graphcore.planning.machine import Machine
from graphcore.planning.planner import PlanRequest, plan_streaming
from graphcore.planning.tier import check_host, choose_tier, ram_nbytes
from graphcore.weights.plan import OffloadedKV, Plan, Tier


def plan_run(settings: Settings, parts: P, machine: Machine | None = None) -> tuple[P, Plan, Tier]:
    """Return the parts with the plan's context, the plan, and the tier that streamed weights are read from.

    Args:
        machine: the machine to plan for; None is this one, as it is now.

    Raises:
        PlanError: the model does not fit on the device, in RAM or on the disk of offloaded keys and values; the message
            has the smallest budget that works.
        ConfigError: streaming.source names a tier that the weights cannot be read from.
    """
    machine = machine or Machine.here(parts.runtime.device)
    streaming, obstacle = settings.streaming, ""
    if streaming.keeps != "all":
        obstacle = parts.disk_obstacle(settings, machine)
    tier = choose_tier(streaming, parts.runtime.device, parts.loader, obstacle, machine.is_here)
    may_read_files = tier.kind == "host" and streaming.source == "auto" and not obstacle
    plan, tier = _fitting(settings, parts, machine, tier, has_files=not obstacle, may_read_files=may_read_files)
    if machine.is_here and plan.offloaded_kv is not None:
        _check_disk(plan.offloaded_kv, settings.swap_folder)
    parts.notes.extend((*plan.notes, *parts.notes_on(plan)))
    if tier.note and plan.is_streaming:
        parts.notes.append(tier.note)
    assert plan.context_length is not None, "a plan is for a context"
    return replace(parts, runtime=parts.runtime.shortened(plan.context_length)), plan, tier


def _check_disk(offloaded: OffloadedKV, folder: Path) -> None:
    """Check that offloaded keys and values have room on a disk, before weights are loaded.

    Raises:
        PlanError: the disk has less room than they take, or is memory itself.
    """
    existing = next(one for one in (folder, *folder.parents) if one.exists())
    free = shutil.disk_usage(existing).free
    if offloaded.nbytes > free:
        raise no_room_for(offloaded, folder, f"{in_words(free)} are free there")
    if is_in_ram(existing):
        raise no_room_for(offloaded, folder, "that is a file system in RAM")


def no_room_for(offloaded: OffloadedKV, folder: Path, found: str) -> PlanError:
    """Return the error that offloaded keys and values cannot be stored. Args: found: what is wrong with the folder."""
    return PlanError(
        f"the KV cache needs {in_words(offloaded.nbytes)} in files in {folder}, and {found}; set "
        "cache_dir to a folder on a larger disk, or a smaller context_length or kv_dtype"
    )


def plan_shorter(
    settings: Settings, planned: tuple[P, Plan, Tier], context_length: int, machine: Machine
) -> tuple[P, Plan, Tier]:
    """Return the plan of a rank for the context of the ranks of a ring, as it is if it has no longer one.

    Args:
        context_length: tokens; the shortest context of all ranks, whose default may have been halved to fit.

    Raises:
        PlanError, ConfigError: as `plan_run`.
    """
    parts, plan, _ = planned
    if plan.context_length == context_length:
        return planned
    note = f"context_length={context_length}, because the KV cache of {plan.context_length} tokens does not fit on all"
    shorter = replace(parts, runtime=parts.runtime.shortened(context_length), notes=[f"{note} ranks"])
    found = plan_run(settings, shorter, machine)
    found[0].notes[:] = dict.fromkeys((*parts.notes, *found[0].notes))  # those of the first plan come again
    return found


def _fitting(
    settings: Settings,
    parts: PreparedModel,
    machine: Machine,
    tier: Tier,
    has_files: bool,
    may_read_files: bool,
) -> tuple[Plan, Tier]:
    """Return the best plan whose waiting weights fit in RAM, and the tier where they wait, with a note on what did not.

    Slots that kernels fill need the experts of all layers in RAM; whole layers on the device, those of the others.
    """

    def check(plan: Plan, tier: Tier) -> tuple[Plan, Tier]:
        check_host(settings.streaming, plan, tier, machine, ram_of(parts, plan, tier), has_files)
        return plan, tier

    plan = _plan(settings, parts, tier, machine, layer_slots=True)
    try:
        return check(plan, tier)
    except PlanError as error:
        refusal = error
    if plan.experts is not None and plan.experts.has_layer_slots:
        note = f"experts of whole layers stay on the device, because RAM does not hold those of all layers: {refusal}"
        with suppress(PlanError):
            return check(_plan(settings, parts, tier, machine, layer_slots=False), replace(tier, note=note))
    if not may_read_files:
        raise refusal
    lacking = str(refusal).partition("; ")[0]  # what follows is advice, which is taken here
    note = f"streamed weights are read from files, because they do not fit in RAM: {lacking}"
    files = Tier("disk", is_direct=True, note=note)
    return check(_plan(settings, parts, files, machine, layer_slots=False), files)


def _plan(settings: Settings, parts: PreparedModel, tier: Tier, machine: Machine, layer_slots: bool) -> Plan:
    """Return the plan for weights that are streamed from the tier. Args: layer_slots: `PlanRequest.has_layer_slots`."""
    request = plan_request(settings, parts, tier, layer_slots)
    return plan_streaming(parts.sizes(settings), request, parts.costs(settings, tier), machine.memory)


def plan_request(settings: Settings, parts: PreparedModel, tier: Tier, layer_slots: bool = True) -> PlanRequest:
    """Return what the settings ask of the plan of a model. Args: layer_slots: `PlanRequest.has_layer_slots`."""
    streaming, keeps = settings.streaming, settings.streaming.keeps
    return PlanRequest(
        policy=streaming.policy,
        keeps=keeps,
        budget=parse_nbytes("streaming.memory_budget", streaming.memory_budget),
        prefetch=None if streaming.prefetch == "auto" else streaming.prefetch,
        mode=streaming.mode,
        expert_cache=parse_nbytes("streaming.expert_cache", streaming.expert_cache),
        context_length=settings.context_length or min(parts.runtime.context_length, DEFAULT_CONTEXT),
        may_halve_context=settings.context_length is None and keeps != "all",
        longer_contexts=tuple(longer_contexts(parts.longest_context(settings))),
        has_device_readable_experts=parts.has_device_readable_experts(settings, tier),
        has_layer_slots=layer_slots,
        groups_of_turn=parts.groups_of_turn(settings),
        kv_budget=parse_nbytes("streaming.kv_memory_budget", streaming.kv_memory_budget),
        kv_obstacle=parts.offload_obstacle(),
    )


def longer_contexts(longest: int) -> Iterator[int]:
    """Yield the contexts above the default that a plan may try, longest first, each half of the one before."""
    while longest > DEFAULT_CONTEXT:
        yield longest
        longest //= 2


def ram_of(parts: PreparedModel, plan: Plan, tier: Tier) -> int:
    """Return the bytes of RAM besides the device: weights that are kept there, and buffers on the way to a GPU."""
    return ram_nbytes(plan, tier, parts.read_nbytes(tier))
