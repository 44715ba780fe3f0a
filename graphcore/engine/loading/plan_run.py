"""The plan of a run: from settings and a model's sizes to what fits on the device and in RAM."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache

from graphcore.arch.random_checkpoint import RandomCheckpoint
from graphcore.config.byte_sizes import parse_nbytes
from graphcore.config.settings import Settings
from graphcore.engine.loading.open_model import Model
from graphcore.engine.loading.prepare_model import PreparedModel
from graphcore.engine.loading.runtime_config import RuntimeConfig
from graphcore.errors import PlanError
from graphcore.graph.cpu.memory import ProgramSizes, programs_nbytes
from graphcore.kernels.backend import NativeBackend
from graphcore.kernels.cpu.program import widths_of
from graphcore.kernels.gpu.device_packing import DevicePacking
from graphcore.kvcache.sizes import cache_nbytes
from graphcore.nn.decoder import is_movable
from graphcore.nn.spec import ModelSpec
from graphcore.planning.costs import (
    allocated_cache_nbytes,
    loading_nbytes,
    overhead_nbytes,
    waiting_nbytes,
    workspace_nbytes,
)
from graphcore.planning.machine import Machine
from graphcore.planning.planner import Costs, PlanRequest, plan_streaming
from graphcore.planning.sizes import sizes_of
from graphcore.planning.tier import buffer_nbytes, check_host, choose_tier, ram_nbytes
from graphcore.quant.format_choice import STORED
from graphcore.streaming.experts.reading import expert_obstacle
from graphcore.streaming.policy_registry import keeps_of
from graphcore.weights.conversion import first_row
from graphcore.weights.experts import expert_linears
from graphcore.weights.matching import EMBEDDING, FEATURES
from graphcore.weights.plan import Plan, Tier


def plan_run(
    settings: Settings, model: Model, parts: PreparedModel, machine: Machine | None = None
) -> tuple[PreparedModel, Plan, Tier]:
    """Return the parts with the plan's context, the plan, and the tier that streamed weights are read from.

    Args:
        machine: the machine to plan for; None is this one, as it is now.

    Raises:
        PlanError: the model does not fit on the device or in RAM; the message has the smallest budget that works.
        ConfigError: streaming.source names a tier that the weights cannot be read from.
    """
    machine = machine or Machine.here(parts.runtime.device)
    streaming, obstacle = settings.streaming, ""
    if keeps_of(streaming) != "all":
        obstacle = disk_obstacle(settings, parts, machine)
    tier = choose_tier(streaming, parts.runtime.device, parts.loader, obstacle, machine.is_here)
    may_read_files = tier.kind == "host" and streaming.source == "auto" and not obstacle
    plan, tier = _fitting(settings, model, parts, machine, tier, has_files=not obstacle, may_read_files=may_read_files)
    return replace(parts, runtime=at_plan(parts.runtime, parts.notes, plan, tier)), plan, tier


def at_plan(runtime: RuntimeConfig, notes: list[str], plan: Plan, tier: Tier) -> RuntimeConfig:
    """Return the runtime configuration for the plan's context length, which may be smaller; add the plan's notes."""
    notes += plan.notes
    if tier.note and plan.is_streaming:
        notes.append(tier.note)
    if plan.context_length is None:
        return runtime
    return runtime.shortened(plan.context_length)


def _fitting(
    settings: Settings,
    model: Model,
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

    plan = _plan(settings, model, parts, tier, machine, layer_slots=True)
    try:
        return check(plan, tier)
    except PlanError as error:
        if plan.experts is None:
            raise
        refusal = error
    if plan.experts.has_layer_slots:
        note = f"experts of whole layers stay on the device, because RAM does not hold those of all layers: {refusal}"
        with suppress(PlanError):
            return check(_plan(settings, model, parts, tier, machine, layer_slots=False), replace(tier, note=note))
    if not may_read_files:
        raise refusal
    files = Tier("disk", is_direct=True, note=f"experts are read from files, because they do not fit in RAM: {refusal}")
    return check(_plan(settings, model, parts, files, machine, layer_slots=False), files)


def _plan(
    settings: Settings, model: Model, parts: PreparedModel, tier: Tier, machine: Machine, layer_slots: bool
) -> Plan:
    """Return the plan for weights that are streamed from the tier. Args: layer_slots: `PlanRequest.has_layer_slots`."""
    request = plan_request_of(settings, parts.runtime.context_length, maps_experts(settings, parts, tier))
    return plan_streaming(
        sizes_of(parts.decoder, parts.loader.is_tied, settings.streaming.layer_group_size),
        replace(request, has_layer_slots=layer_slots),
        costs_of(settings, model, parts, tier),
        machine.memory,
    )


def plan_request_of(settings: Settings, context_length: int, maps_experts: bool = False) -> PlanRequest:
    """Return the settings that a plan depends on.

    Args:
        context_length: tokens of KV cache for each sequence.
        maps_experts: the same field of `PlanRequest`.
    """
    streaming, keeps = settings.streaming, keeps_of(settings.streaming)
    return PlanRequest(
        policy=streaming.policy,
        keeps=keeps,
        budget=parse_nbytes("streaming.memory_budget", streaming.memory_budget),
        prefetch=None if streaming.prefetch == "auto" else streaming.prefetch,
        mode=streaming.mode,
        expert_cache=parse_nbytes("streaming.expert_cache", streaming.expert_cache),
        context_length=context_length,
        may_halve_context=settings.context_length is None and keeps != "all",
        maps_experts=maps_experts,
    )


def maps_experts(settings: Settings, parts: PreparedModel, tier: Tier) -> bool:
    """Return whether a GPU's kernels can read the experts in locked RAM, in the format that they have there.

    Matrices that have to be unpacked before a product do not qualify: unpacking copies them, and torch copies within
    one device only.
    """
    is_lockable = parts.runtime.device.type == "cuda" and tier.kind == "host" and settings.streaming.pinned_memory
    packings = [linear.packing for linear in expert_linears(parts.decoder).values()]
    return is_lockable and all(packing is None or isinstance(packing, DevicePacking) for packing in packings)


def costs_of(settings: Settings, model: Model, parts: PreparedModel, tier: Tier) -> Costs:
    """Return what the device will hold besides weights; on a GPU this includes CUDA's own memory."""
    runtime, spec = parts.runtime, model.spec
    batch, is_gpu = runtime.batch_size, runtime.device.type == "cuda"
    cached = allocated_cache_nbytes if is_gpu else cache_nbytes
    waiting, more = (further_nbytes(settings, spec, runtime.prefill_chunk, moves) for moves in (False, True))
    return Costs(
        kv_nbytes=lambda context_length: cached(spec, runtime.cache_sizes(context_length)),
        workspace_nbytes=waiting
        + workspace_nbytes(spec, batch, runtime.prefill_chunk, runtime.dtype, is_eager=runtime.prefill == "eager"),
        moving_nbytes=more - waiting,
        buffer_nbytes=0 if is_gpu else read_nbytes(parts, tier),
        loading_nbytes=loading_nbytes(parts.loader, parts.decoder, is_on_cpu=not is_gpu),
        overhead_nbytes=overhead_nbytes(spec, parts.decoder, batch, runtime.graph == "captured", runtime.dtype)
        if is_gpu
        else 0,
        program_nbytes=programs_of(parts, keeps_of(settings.streaming) != "all"),
    )


def further_nbytes(settings: Settings, spec: ModelSpec, chunk: int, is_streaming: bool) -> int:
    """Return the bytes of the chunks of prompts beyond one that may run in a pass, while they wait for each other."""
    tokens = min(settings.batching.prompt_tokens(chunk, is_streaming), chunk * settings.batching.max_sequences)
    return waiting_nbytes(spec, max(tokens - chunk, 0))


def programs_of(parts: PreparedModel, is_streaming: bool) -> Callable[[int], int]:
    """Return the function from a context length to the bytes of native decode programs; 0 where there are none."""
    runtime, backend = parts.runtime, parts.runtime.backend
    if runtime.graph != "captured" or runtime.device.type != "cpu" or not isinstance(backend, NativeBackend):
        return lambda context_length: 0
    fetches = is_streaming and bool(expert_linears(parts.decoder))
    sizes = ProgramSizes(
        widths_of(runtime.batch_size), runtime.batch_size, runtime.kv_dtype, runtime.prefill_chunk, backend, fetches
    )
    return cache(lambda context_length: programs_nbytes(parts.decoder, sizes, context_length))


def disk_obstacle(settings: Settings, parts: PreparedModel, machine: Machine) -> str:
    """Return why weights cannot stream from the checkpoint's files; empty if they can.

    In a plan for another machine random weights count as weights in a file.
    """
    loader = parts.loader
    if settings.quant.format != STORED:
        return f"quant={settings.quant.format} packs them at load, and the files do not hold that"
    if not machine.is_here and isinstance(loader.checkpoint, RandomCheckpoint):
        return ""
    if any(not loader.checkpoint.spans(source.name) for source in loader.sources.values()):
        return f"{loader.checkpoint.source} has no files"
    for name in (EMBEDDING, FEATURES):
        source = loader.sources.get(name)
        if source is None:
            continue
        packing = parts.decoder.table(name).packing
        if first_row(loader, source, loader.checkpoint.tensors[source.name], packing) is None:
            return f"the rows of tensor '{source.name}' cannot be read one by one"
    return expert_obstacle(loader, expert_linears(parts.decoder))


def read_nbytes(parts: PreparedModel, tier: Tier) -> int:
    """Return the bytes of the buffers through which the decoder's weights are read into slots."""
    loader = parts.loader
    movable = [
        loader.sources[f"layers.{index}.{name}"]
        for index, layer in enumerate(parts.decoder.layers)
        for name, tensor in layer.named_buffers()
        if is_movable(name, tensor)
    ]
    whole = [
        sum(span.nbytes for span in loader.checkpoint.spans(source.name))
        for source in movable
        if first_row(loader, source, loader.checkpoint.tensors[source.name], None) is None
    ]
    return buffer_nbytes(tier, whole, has_experts=bool(expert_linears(parts.decoder)))


def ram_of(parts: PreparedModel, plan: Plan, tier: Tier) -> int:
    """Return the bytes of RAM besides the device: weights that are kept there, and buffers on the way to a GPU."""
    return ram_nbytes(plan, tier, 0 if parts.runtime.device.type == "cpu" else read_nbytes(parts, tier))
