"""How fast this machine moves and reads weights, measured in a second or two, for predictions.

A probe moves at most 256 MB of the weights that will stream, all the way into memory laid out as a slot is, and reads
as much memory as fast as products can. To a GPU as many bytes are copied from locked memory, timed by the device; what
comes from files comes by both ways, and the slower one counts.
"""

from collections.abc import Callable

import torch

from graphcore.engine.assembly import Assembly
from graphcore.engine.device_stream import DeviceLink
from graphcore.engine.group_jobs import THREADS
from graphcore.engine.machine import PRODUCT_SHARE, Machine, Speeds
from graphcore.engine.movement import movement_of
from graphcore.engine.planning import Tier
from graphcore.engine.weight_stream import open_files
from graphcore.kernels.bandwidth import measure_read_bandwidth
from graphcore.memory_limit import affordable_nbytes
from graphcore.streaming.link import PROBE_NBYTES, measure_copies, measure_jobs, scratch_copies, scratch_jobs
from graphcore.streaming.pages import private_pages
from graphcore.weights.groups import split_layers
from graphcore.weights.plan import Plan
from graphcore.weights.prediction import Rates

COPIES = 3
LinkTo = Callable[[], DeviceLink] | None


def moves_weights(plan: Plan, tier: Tier) -> bool:
    """Return whether a decode step waits for weights whose rate a probe can measure."""
    return bool(plan.streamed) or (plan.experts is not None and tier.kind == "host")


def measure_rates(
    parts: Assembly, plan: Plan, tier: Tier, layer_group_size: int, given: Speeds, link_to: LinkTo = None
) -> Rates | None:
    """Return the rates that a plan's decode steps depend on; what is given is not measured.

    Args:
        link_to: makes the way to the device, if it has memory of its own (`way_to`).

    Returns:
        None where too little memory is free to measure its rate.

    Raises:
        CheckpointError: a file changed, or cannot be read.
    """
    device, library = parts.choices.device, parts.choices.packing.library
    read = given.bandwidth
    if read is None:
        found = measure_read_bandwidth(device, library, PROBE_NBYTES, repeats=3)
        if found is None:
            return None
        read = found.best
    link = given.arrival(Machine.here(device), tier.kind) if moves_weights(plan, tier) else float("inf")
    return Rates(_link(parts, plan, tier, layer_group_size, link_to) if link is None else link, PRODUCT_SHARE * read)


def _link(parts: Assembly, plan: Plan, tier: Tier, layer_group_size: int, link_to: LinkTo) -> float:
    """Return the bytes/s at which groups arrive in their slots when nothing else runs."""
    if link_to is None:
        return _to_ram(parts, plan, tier, layer_group_size)
    copied = device_link(link_to(), parts.choices.device)
    return copied if tier.kind == "host" else min(copied, _to_ram(parts, plan, tier, layer_group_size))


@torch.inference_mode()
def device_link(link: DeviceLink, device: torch.device) -> float:
    """Return the bytes/s at which a device copies from RAM, locked if the link locks it, by the best of some copies.

    The link is closed.
    """
    source = private_pages(affordable_nbytes(PROBE_NBYTES))
    source.zero_()  # memory is there when it has been written to
    target = torch.empty_like(source, device=device)
    try:
        if link.pins is not None:
            link.pins.add([source])  # where that is refused, the driver's own way is the link
        rates = [measure_copies(link.lanes, [(source, target)]).bytes_per_second for _ in range(COPIES)]
    finally:
        link.close()
    return max(rates)


def _to_ram(parts: Assembly, plan: Plan, tier: Tier, layer_group_size: int) -> float:
    """Return the bytes/s at which threads bring groups into slots in RAM."""
    if tier.kind == "host":
        copies = scratch_copies(affordable_nbytes(PROBE_NBYTES) // 2) * 2
        return measure_jobs(copies, {}, THREADS).bytes_per_second
    layers = split_layers(len(parts.decoder.layers), layer_group_size)
    movement = movement_of(parts.decoder, plan, layers)
    files = open_files(parts.loader, sorted(movement.moved), tier.is_direct)
    try:
        with torch.inference_mode():
            most = affordable_nbytes(PROBE_NBYTES)
            jobs = scratch_jobs(parts.loader, movement.groups, is_cached=not tier.is_direct, most_nbytes=most)
            return measure_jobs(jobs, files, THREADS).bytes_per_second
    finally:
        for source in files.values():
            source.close()
