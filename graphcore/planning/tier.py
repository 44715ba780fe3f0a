"""The tier where streamed weights wait: the checkpoint's files or RAM. Chooses it and counts the RAM it needs."""

from collections.abc import Iterable

import torch

from graphcore.checkpoint.page_cache import cached_share
from graphcore.config.byte_sizes import enough_in_words, in_words, parse_nbytes
from graphcore.config.settings import StreamingSettings
from graphcore.errors import ConfigError, PlanError
from graphcore.planning.machine import Machine
from graphcore.streaming.device.stream import host_ring_nbytes
from graphcore.streaming.experts.stream import expert_ring_nbytes
from graphcore.streaming.fill_jobs import ALIGNMENT, BUFFER_NBYTES, ROOM
from graphcore.streaming.thread_filler import THREADS
from graphcore.weights.conversion import CONVERSION_NBYTES
from graphcore.weights.loader import Loader
from graphcore.weights.plan import Plan, Tier

BUFFER_PARTS = 20  # read buffers take one of so many parts of a plan's other memory
LEAST_JOB_NBYTES = 128 << 10  # bytes; a floor for tiny models, whose buffers take a larger part
CACHED = 0.9  # share of the weights' pages in RAM at and above which reads use the page cache


def choose_tier(
    streaming: StreamingSettings, device: torch.device, loader: Loader, obstacle: str = "", is_here: bool = True
) -> Tier:
    """Return the tier where streamed weights will wait.

    Args:
        obstacle: reason why the weights cannot stream from the checkpoint's files; empty if they can.
        is_here: True if the plan is for this machine, so that its page cache can be queried.

    Raises:
        ConfigError: streaming.source=disk was asked for, but the weights cannot stream from the files.
    """
    if streaming.keeps == "all":
        return Tier("disk")
    asked = streaming.source
    if obstacle and asked == "disk":
        raise ConfigError(f"streaming.source=disk is not possible: {obstacle}; use streaming.source=host")
    if obstacle or asked == "host" or (asked == "auto" and device.type == "cuda"):
        return Tier("host", note=f"streamed weights wait in RAM: {obstacle}" if obstacle else "")
    if not is_here:
        return Tier("disk", is_direct=True)
    share = cached_share(span for one in loader.sources.values() for span in loader.checkpoint.spans(one.name))
    if share >= CACHED:
        note = f"{share:.0%} of the weights are in the page cache: streaming reads them from there"
        return Tier("disk", is_direct=False, note=note)
    return Tier("disk", is_direct=True)


def job_nbytes_beside(nbytes: int, least: int) -> int:
    """Return the bytes of a read of rows for which all buffers take at most a twentieth of a plan's memory.

    From 266 MB on they have the size with which a disk reaches its full speed (`CONVERSION_NBYTES`); below, memory
    counts more.

    Args:
        nbytes: bytes of the plan without read buffers.
        least: bytes of the smallest reads that the weights allow.
    """
    fitting = (nbytes // BUFFER_PARTS // (THREADS + 1) - ROOM) // ALIGNMENT * ALIGNMENT
    return min(max(fitting, LEAST_JOB_NBYTES, least), CONVERSION_NBYTES)


def buffer_nbytes(
    tier: Tier, whole: Iterable[int], has_experts: bool = False, job_nbytes: int = CONVERSION_NBYTES
) -> int:
    """Return the bytes of the threads' buffers for reads from files and for conversions.

    Args:
        whole: bytes of each stored tensor that is not read row by row.
        job_nbytes: most bytes of a read of rows.
        has_experts: True if experts move too, which are read by separate threads.
    """
    if tier.kind == "host":
        return 0
    own = job_nbytes + ROOM
    largest = max((nbytes for nbytes in whole if nbytes > own - ROOM), default=0)
    of_experts = THREADS * (BUFFER_NBYTES + 2 * CONVERSION_NBYTES) if has_experts else 0
    return (THREADS + 1) * own + 3 * largest + of_experts


def host_nbytes(plan: Plan) -> int:
    """Return the bytes of weights that a store in RAM holds under a plan."""
    table = (
        0
        if plan.groups.is_embedding_resident or (plan.groups.group_nbytes[-1] == 0 and plan.groups.streamed)
        else plan.groups.group_nbytes[0]
    )
    experts = 0 if plan.experts is None else plan.experts.num_experts * plan.experts.slot_nbytes
    features = 0 if plan.groups.are_features_resident else plan.groups.features_nbytes
    return plan.groups.streamed_nbytes + table + features + experts


def ram_nbytes(plan: Plan, tier: Tier, reads: int) -> int:
    """Return the bytes of RAM that streaming needs besides the device: the store, and host slots on the way to a GPU.

    Args:
        reads: bytes of the threads' buffers, from `buffer_nbytes`.
    """
    is_held = tier.kind == "host"
    if not plan.is_streaming:
        return 0
    # Weights of a store that cannot be locked go through host slots, too.
    ring = 0 if plan.device == "cpu" else host_ring_nbytes(plan) + expert_ring_nbytes(plan, is_held) + reads
    return ring + (host_nbytes(plan) if is_held else 0)


def check_host(
    streaming: StreamingSettings, plan: Plan, tier: Tier, machine: Machine, needed: int, has_files: bool = True
) -> None:
    """Check that streaming has enough RAM: the store, and host slots on the way to a GPU.

    Args:
        needed: bytes of RAM, from `ram_nbytes`.
        has_files: True if the weights could stream from the checkpoint's files.

    Raises:
        PlanError: too little RAM is free or allowed; the message says how much is needed.
    """
    budget = parse_nbytes("streaming.host_memory_budget", streaming.host_memory_budget)
    cpu, is_held = machine.device.type == "cpu", tier.kind == "host"
    if not plan.is_streaming or (cpu and not is_held):
        return
    free = machine.ram_nbytes - (plan.peak_nbytes if cpu else 0)
    most = free if budget is None else min(budget, free)
    if needed > most:
        has = f"streaming.host_memory_budget is {in_words(budget)}" if budget is not None and budget < free else ""
        what = "the weights that wait there" if is_held else "weights on their way to the device"
        rather = "a smaller layer_group_size"
        if is_held:
            rather = "streaming.source=disk" if has_files else "a file packed by task=pack"
        more = "a larger streaming.memory_budget" if streaming.keeps == "most" else "streaming=auto"
        # On a CPU without a host budget, keeping more on the device does not help: it is the same RAM.
        keep = "" if cpu and not has else f"keep more on the device with {more}, or "
        raise PlanError(
            f"streaming.source={tier.kind} needs {in_words(needed)} of RAM for {what}, "
            f"{has or f'{in_words(max(free, 0))} are free'}; {enough_in_words(needed)} would do; {keep}use {rather}"
        )
