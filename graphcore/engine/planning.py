"""The plan of a run: what its settings and its model's sizes come to within the budget."""

from dataclasses import dataclass, replace

from graphcore.arch.random_checkpoint import RandomCheckpoint
from graphcore.checkpoint.page_cache import cached_share
from graphcore.config.byte_sizes import in_words, parse_nbytes
from graphcore.config.settings import Settings
from graphcore.engine.assembly import Assembly
from graphcore.engine.device_stream import host_ring_nbytes
from graphcore.engine.expert_stream import expert_ring_nbytes
from graphcore.engine.group_jobs import THREADS
from graphcore.engine.machine import Machine
from graphcore.engine.model import Model
from graphcore.errors import ConfigError, PlanError
from graphcore.nn.decoder import is_movable
from graphcore.nn.kv_cache import cache_nbytes
from graphcore.quant.choice import STORED
from graphcore.quant.device_packing import DevicePacking
from graphcore.streaming.jobs import BUFFER_NBYTES
from graphcore.weights.device_costs import allocated_cache_nbytes, overhead_nbytes
from graphcore.weights.expert_pieces import expert_obstacle
from graphcore.weights.expert_pools import expert_linears
from graphcore.weights.making import loading_nbytes
from graphcore.weights.matching import EMBEDDING
from graphcore.weights.pieces import PIECE_NBYTES, first_row
from graphcore.weights.plan import Plan
from graphcore.weights.plan_streaming import Costs, Wishes, plan_streaming
from graphcore.weights.weight_sizes import sizes_of
from graphcore.weights.workspace import workspace_nbytes

CACHED = 0.9  # share of the weights' pages that are in RAM, from which on they are read through the page cache


@dataclass(frozen=True)
class Tier:
    """Where streamed weights wait.

    Attributes:
        kind: "disk", the checkpoint's files; or "host", a store in RAM.
        is_direct: files are read past the page cache.
        note: what is worth saying about it.
    """

    kind: str
    is_direct: bool = False
    note: str = ""


def plan_run(
    settings: Settings, model: Model, parts: Assembly, machine: Machine | None = None
) -> tuple[Assembly, Plan, Tier]:
    """Return the plan, where streamed weights wait, and the parts as the plan has changed them (a smaller context).

    Args:
        machine: that it is for; None is this one, as it is now.

    Raises:
        PlanError: it does not fit, on the device or in RAM; the message has the smallest budget that works.
        ConfigError: the weights cannot wait where they were asked to.
    """
    choices, machine = parts.choices, machine or Machine.here(parts.choices.device)
    tier = choose_tier(settings, parts, machine)
    plan = _plan(settings, model, parts, tier, machine)
    try:
        check_host(settings, parts, plan, tier, machine)
    except PlanError as error:
        if plan.experts is None or tier.kind == "disk" or settings.streaming.source != "auto":
            raise
        if disk_obstacle(settings, parts, machine):
            raise
        tier = Tier(
            "disk", is_direct=True, note=f"experts are read from files, because they do not fit in RAM: {error}"
        )
        plan = _plan(settings, model, parts, tier, machine)
        check_host(settings, parts, plan, tier, machine)
    notes = (*choices.notes, *plan.notes, *([tier.note] if tier.note and plan.is_streaming else []))
    context = plan.context or choices.context
    changed = replace(choices, context=context, prefill_chunk=min(choices.prefill_chunk, context), notes=notes)
    return replace(parts, choices=changed), plan, tier


def _plan(settings: Settings, model: Model, parts: Assembly, tier: Tier, machine: Machine) -> Plan:
    """Return the plan for weights that wait in that tier of the machine."""
    choices, streaming = parts.choices, settings.streaming
    return plan_streaming(
        sizes_of(parts.decoder, parts.loader.is_tied, streaming.layer_group_size),
        Wishes(
            policy=streaming.policy,
            budget=parse_nbytes("streaming.memory_budget", streaming.memory_budget),
            prefetch=None if streaming.prefetch == "auto" else streaming.prefetch,
            mode=streaming.mode,
            expert_cache=parse_nbytes("streaming.expert_cache", streaming.expert_cache),
            context=choices.context,
            may_halve_context=settings.context_length is None and streaming.policy != "off",
            maps_experts=maps_experts(settings, parts, tier),
        ),
        costs_of(model, parts, tier),
        machine.memory,
    )


def maps_experts(settings: Settings, parts: Assembly, tier: Tier) -> bool:
    """Return whether experts wait where the device's kernels can read them, in a form that they read.

    Whoever unpacks matrices before a product copies them first, and torch copies within one device only.
    """
    is_lockable = parts.choices.device.type == "cuda" and tier.kind == "host" and settings.streaming.pinned_memory
    packings = [linear.packing for linear in expert_linears(parts.decoder).values()]
    return is_lockable and all(packing is None or isinstance(packing, DevicePacking) for packing in packings)


def costs_of(model: Model, parts: Assembly, tier: Tier) -> Costs:
    """Return what the device will hold besides weights; a GPU also what CUDA itself takes."""
    choices, spec = parts.choices, model.spec
    batch, is_gpu = choices.batch_size, choices.device.type == "cuda"
    cached = allocated_cache_nbytes if is_gpu else cache_nbytes
    return Costs(
        kv_nbytes=lambda tokens: cached(spec, batch, tokens, choices.kv_dtype),
        workspace_nbytes=workspace_nbytes(
            spec, batch, choices.prefill_chunk, choices.dtype, is_eager=choices.prefill == "eager"
        ),
        buffer_nbytes=0 if is_gpu else buffer_nbytes(parts, tier),
        loading_nbytes=loading_nbytes(parts.loader, parts.decoder, is_on_cpu=not is_gpu),
        overhead_nbytes=overhead_nbytes(spec, parts.decoder, batch, choices.graph == "captured", choices.dtype)
        if is_gpu
        else 0,
    )


def choose_tier(settings: Settings, parts: Assembly, machine: Machine) -> Tier:
    """Return where streamed weights will wait.

    Raises:
        ConfigError: they were to be read from files that do not hold them as they are run.
    """
    if settings.streaming.policy == "off":
        return Tier("disk")
    asked, obstacle = settings.streaming.source, disk_obstacle(settings, parts, machine)
    if obstacle and asked == "disk":
        raise ConfigError(f"streaming.source=disk is not possible: {obstacle}; use streaming.source=host")
    if obstacle or asked == "host" or (asked == "auto" and parts.choices.device.type == "cuda"):
        return Tier("host", note=f"streamed weights wait in RAM: {obstacle}" if obstacle else "")
    if not machine.is_here:
        return Tier("disk", is_direct=True)
    checkpoint = parts.loader.checkpoint
    share = cached_share(span for one in parts.loader.sources.values() for span in checkpoint.spans(one.name))
    if share >= CACHED:
        note = f"{share:.0%} of the weights are in the page cache: streaming reads them from there"
        return Tier("disk", is_direct=False, note=note)
    return Tier("disk", is_direct=True)


def disk_obstacle(settings: Settings, parts: Assembly, machine: Machine) -> str:
    """Return why weights cannot stream from the checkpoint's files; empty if they can.

    In the plan for another machine random weights stand for a file of theirs.
    """
    loader = parts.loader
    if settings.quant.format != STORED:
        return f"quant={settings.quant.format} packs them at load, and the files do not hold that"
    if not machine.is_here and isinstance(loader.checkpoint, RandomCheckpoint):
        return ""
    if any(not loader.checkpoint.spans(source.name) for source in loader.sources.values()):
        return f"{loader.checkpoint.source} has no files"
    source = loader.sources[EMBEDDING]
    embedding = parts.decoder.embed_tokens
    if first_row(loader, source, loader.checkpoint.tensors[source.name], embedding.packing) is None:
        return f"the rows of tensor '{source.name}' cannot be read one by one"
    return expert_obstacle(loader, expert_linears(parts.decoder))


def buffer_nbytes(parts: Assembly, tier: Tier) -> int:
    """Return the bytes that reads land in on their way to a slot, and what is made of them there."""
    if tier.kind == "host":
        return 0
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
    largest = max((nbytes for nbytes in whole if nbytes > BUFFER_NBYTES), default=0)
    of_experts = THREADS * (BUFFER_NBYTES + 2 * PIECE_NBYTES) if expert_linears(parts.decoder) else 0
    return (THREADS + 1) * BUFFER_NBYTES + 3 * largest + of_experts


def check_host(settings: Settings, parts: Assembly, plan: Plan, tier: Tier, machine: Machine) -> None:
    """Return if what waits in RAM, or goes through it to a device, fits there; nothing does where nothing streams.

    Raises:
        PlanError: it does not; the message has what it needs.
    """
    budget = parse_nbytes("streaming.host_memory_budget", settings.streaming.host_memory_budget)
    cpu = parts.choices.device.type == "cpu"
    if not plan.is_streaming or (cpu and tier.kind == "disk"):
        return
    free = machine.ram_nbytes - (plan.peak_nbytes if cpu else 0)
    is_held = tier.kind == "host"
    needed = ram_nbytes(parts, plan, tier)
    most = free if budget is None else min(budget, free)
    if needed > most:
        has = f"streaming.host_memory_budget is {in_words(budget)}" if budget is not None and budget < free else ""
        what = "the weights that wait there" if is_held else "weights on their way to the device"
        rather = "a smaller layer_group_size"
        if is_held:
            has_files = not disk_obstacle(settings, parts, machine)
            rather = "streaming.source=disk" if has_files else "a file packed by task=pack"
        more = "a larger streaming.memory_budget" if settings.streaming.policy == "auto" else "streaming=auto"
        # Where no host budget but the RAM itself is too small, a CPU's device is the same RAM.
        keep = "" if cpu and not has else f"keep more on the device with {more}, or "
        raise PlanError(
            f"streaming.source={tier.kind} needs {in_words(needed)} of RAM for {what}, "
            f"{has or f'{in_words(max(free, 0))} are free'}; {needed} bytes would do; {keep}use {rather}"
        )


def ram_nbytes(parts: Assembly, plan: Plan, tier: Tier) -> int:
    """Return the bytes of RAM beside the device: of weights that wait there, or go through it to a GPU."""
    is_held, cpu = tier.kind == "host", parts.choices.device.type == "cpu"
    if not plan.is_streaming:
        return 0
    # A store that cannot be locked goes through host slots as well.
    ring = 0 if cpu else host_ring_nbytes(plan) + expert_ring_nbytes(plan, is_held) + buffer_nbytes(parts, tier)
    return ring + (host_nbytes(plan) if is_held else 0)


def host_nbytes(plan: Plan) -> int:
    """Return the bytes of weights that wait in RAM."""
    table = 0 if plan.is_embedding_resident or (plan.group_nbytes[-1] == 0 and plan.streamed) else plan.group_nbytes[0]
    experts = 0 if plan.experts is None else plan.experts.num_experts * plan.experts.slot_nbytes
    return plan.streamed_nbytes + table + experts
