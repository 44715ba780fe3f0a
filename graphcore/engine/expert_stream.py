"""What moves experts: slots bound, tables locked, threads or a copy lane to fetch with.

                       a decode step                          a chunk of tokens
mapped                 kernels read the table in RAM          fetched into slots        tables are locked
fetched                fetched into slots, as for a chunk                               the host waits for the router

On a CPU experts are always fetched. On a GPU those of a layer are mapped if its tables could be locked.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphcore.checkpoint.byte_source import ByteSource
from graphcore.config.byte_sizes import in_words
from graphcore.engine.device_stream import DeviceLink
from graphcore.engine.group_jobs import THREADS
from graphcore.nn.decoder import Decoder
from graphcore.nn.moe import Experts
from graphcore.streaming.expert_cache import ExpertCache
from graphcore.streaming.expert_copies import Copies, ExpertCopies
from graphcore.streaming.filler import Filler
from graphcore.streaming.host_store import HostStore
from graphcore.streaming.jobs import BUFFER_NBYTES, Job, copy_jobs, file_jobs
from graphcore.streaming.pages import shared_pages
from graphcore.streaming.timeline import Lane, Timeline
from graphcore.weights.expert_pieces import expert_pieces
from graphcore.weights.expert_pools import (
    PARTS,
    allocate_pool,
    beside,
    bind_experts,
    expert_layers,
    expert_pools,
    expert_weight,
)
from graphcore.weights.loader import Loader
from graphcore.weights.packed_weights import packing_of
from graphcore.weights.plan import ExpertPlan, Plan

HOST_SLOTS = 4  # experts that are read from files at once, on their way to a device


@dataclass(frozen=True)
class ExpertStream:
    """Experts that do not stay.

    Attributes:
        cache: fetches them.
        slots: by layer, the module whose matrices are the slots.
        mapped: layers whose own module has its matrices in RAM, for a decode step.
        note: what did not go as one might expect; empty if nothing did.
    """

    cache: ExpertCache[Any, Any]
    slots: Mapping[int, Experts]
    mapped: frozenset[int] = field(default_factory=frozenset)
    note: str = ""


@dataclass(frozen=True)
class Below:
    """The tier that experts come from.

    Attributes:
        store: in RAM; None reads the files.
    """

    loader: Loader
    decoder: Decoder
    store: HostStore | None
    files: Mapping[Path, ByteSource]

    def jobs(self, layer: int, expert: int, outs: Sequence[Tensor]) -> list[Job]:
        """Return the jobs that bring an expert to tensors in RAM, one for each of PARTS."""
        named = {expert_weight(layer, part): out for part, out in zip(PARTS, outs, strict=True)}
        if self.store is None:
            packed = {name: (packing_of(self.decoder, name), out) for name, out in named.items()}
            return file_jobs(expert_pieces(self.loader, expert, packed))
        sources = self.sources(layer, expert)
        pairs = zip(named.items(), sources, strict=True)
        return [job for (name, out), source in pairs for job in copy_jobs(name, flat(source), flat(out))]

    def sources(self, layer: int, expert: int) -> list[Tensor]:
        """Return where an expert's matrices lie in RAM."""
        assert self.store is not None, "nothing waits in RAM"
        return [self.store.tables[expert_weight(layer, part)][expert] for part in PARTS]

    def tables(self, layer: int) -> dict[str, Tensor]:
        """Return a layer's matrices in RAM, by projection."""
        assert self.store is not None, "nothing waits in RAM"
        return {part: self.store.tables[expert_weight(layer, part)] for part in PARTS}


def open_experts(
    below: Below,
    plan: ExpertPlan,
    groups: Mapping[int, int],
    timeline: Timeline,
    device: torch.device,
    link: DeviceLink | None,
) -> ExpertStream:
    """Return what moves experts, slots bound; nothing has been fetched yet.

    It has threads of its own: those of the groups may all wait for a slot that is free only when experts have run.

    Args:
        groups: the layer group that each layer belongs to.
        link: to a device with memory of its own; None where the device is RAM.
    """
    decoder = below.decoder
    pools = expert_pools(decoder, plan.num_slots, plan.num_layers)
    layers = {layer: moe.experts for layer, moe in expert_layers(decoder).items()}
    mapped, note = lock_tables(below, [layer for pool in pools for layer in pool.layers], plan, link)
    bound: dict[int, dict[str, Tensor]] = {}
    slots: dict[int, Experts] = {}
    for pool in pools:
        views = allocate_pool(decoder, pool, device)
        for layer in pool.layers:
            bound[layer] = views
            bind_experts(layers[layer], below.tables(layer) if layer in mapped else views)
            slots[layer] = beside(decoder, layer, views) if layer in mapped else layers[layer]

    def outs(layer: int, slot: int) -> list[Tensor]:
        return [bound[layer][part][slot] for part in PARTS]

    if link is None:
        filler = _threads(below, timeline, "copy")
        cache = ExpertCache(
            pools, lambda layer, one, slot: below.jobs(layer, one, outs(layer, slot)), groups, filler, timeline
        )
        return ExpertStream(cache, slots)

    def copies(layer: int, expert: int, slot: int) -> list[Copies]:
        if below.store is not None:
            return [Copies(outs(layer, slot), below.sources(layer, expert))]
        return [Copies(outs(layer, slot), None, lambda host: below.jobs(layer, expert, host))]

    carrier = _copies(below, bound.values(), timeline, link)
    return ExpertStream(ExpertCache(pools, copies, groups, carrier, timeline), slots, mapped, note)


def expert_ring_nbytes(plan: Plan, is_held: bool) -> int:
    """Return the bytes of RAM that experts go through on their way to a device; none where they wait in RAM."""
    return 0 if plan.experts is None or is_held else HOST_SLOTS * plan.experts.slot_nbytes


def lock_tables(
    below: Below, layers: Sequence[int], plan: ExpertPlan, link: DeviceLink | None
) -> tuple[frozenset[int], str]:
    """Lock the tables of layers that are to be mapped, as many as the machine allows; return which, and why not all."""
    if link is None or link.pins is None or not plan.are_mapped:
        return frozenset(), ""
    locked: list[int] = []
    obstacle = ""
    for layer in layers:
        tables = list(below.tables(layer).values())
        obstacle = link.pins.add(tables)
        if not obstacle and not all(link.pins.is_readable_by_kernels(table) for table in tables):
            obstacle = "kernels cannot read it where it lies"
        if obstacle:
            break
        locked.append(layer)
    left = [table for layer in layers if layer not in locked for table in below.tables(layer).values()]
    if not left:
        return frozenset(locked), ""
    nbytes = in_words(sum(table.nbytes for table in left))
    return frozenset(locked), (
        f"{nbytes} of experts in RAM could not be locked ({obstacle}): in their layers, which are not captured, the "
        "host fetches what the router chose"
    )


def flat(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor's bytes, uint8."""
    return tensor.view(-1).view(torch.uint8)


def _threads(below: Below, timeline: Timeline, lane: Lane) -> Filler:
    return Filler(below.files, THREADS, BUFFER_NBYTES if below.store is None else 0, 0, timeline, lane)


def _copies(below: Below, bound: Iterable[Mapping[str, Tensor]], timeline: Timeline, link: DeviceLink) -> ExpertCopies:
    """Return what copies experts to a device, through host slots of its own where they are read from files."""
    if below.store is not None:
        return ExpertCopies(link.lanes, timeline)
    sizes = [max(views[part][0].nbytes for views in bound) for part in PARTS]
    host = [[shared_pages(nbytes)[:nbytes] for nbytes in sizes] for _ in range(HOST_SLOTS)]
    if link.pins is not None:  # what is not locked is copied by way of the driver's memory
        link.pins.add(raw for slot in host for raw in slot)
    return ExpertCopies(link.lanes, timeline, _threads(below, timeline, "read"), host)
