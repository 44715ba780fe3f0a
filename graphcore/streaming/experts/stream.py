"""Movement of experts: it binds slots, locks tables in RAM, and sets up the threads or the copy queue.

                       a decode step                          a chunk of tokens
cached                 kernels fill the layer's slots         fetched into slots        tables are locked
mapped                 kernels read the table in RAM          fetched into slots        tables are locked
fetched                fetched into slots                     fetched into slots        the host waits for the router

On a CPU experts are always fetched. On a GPU, a layer whose tables could be locked is cached, or mapped if the plan has
too few slots to give each layer its own; the other layers are fetched.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphcore.checkpoint.streamed_file import ByteSource
from graphcore.config.byte_sizes import in_words
from graphcore.graph.step import FetchedExperts
from graphcore.host_pages import shared_pages
from graphcore.kernels.ops.expert_slots import ExpertSlots
from graphcore.nn.decoder import Decoder
from graphcore.nn.moe import Experts
from graphcore.streaming.device.copies import DeviceFiller, HostSlots, Transfer, flat
from graphcore.streaming.device.stream import DeviceLink
from graphcore.streaming.experts.cache import ExpertCache
from graphcore.streaming.experts.device_cache import DeviceCache, bind_layer_slots
from graphcore.streaming.experts.reading import expert_conversions
from graphcore.streaming.experts.slots import ExpertPool, allocate_pool, beside, bind_experts, expert_pools
from graphcore.streaming.fill_jobs import BUFFER_NBYTES, FillJob, copy_jobs, file_jobs
from graphcore.streaming.host_store import HostStore
from graphcore.streaming.thread_filler import THREADS, ThreadFiller
from graphcore.streaming.timeline import Lane, Timeline
from graphcore.weights.experts import PARTS, expert_layers, expert_weight
from graphcore.weights.loader import Loader
from graphcore.weights.packed_weights import packing_of
from graphcore.weights.plan import ExpertPlan, Plan

HOST_SLOTS = 4  # experts that are read from files at the same time, on their way to a device


@dataclass(frozen=True)
class ExpertStream:
    """The experts of a model that do not stay on the device, and the cache that fetches them.

    Attributes:
        cache: cache that fetches experts.
        fetched: interface of the cache for programs.
        note: message for the user about memory that could not be locked; empty if there is none.
        device_cache: slots that a device's kernels fill; None if there are none.
    """

    cache: ExpertCache[Any, Any]
    fetched: FetchedExperts
    note: str = ""
    device_cache: DeviceCache | None = None

    @property
    def hit_rate(self) -> float | None:
        """Share of the requested experts that were in a slot; None before the first request."""
        if self.device_cache is None:
            return self.cache.hit_rate
        hits, misses = self.device_cache.tallies
        return hits / (hits + misses) if hits + misses else None


@dataclass(frozen=True)
class LowerTier:
    """The tier below the device, from which experts are fetched.

    Attributes:
        store: store of the experts' tables in RAM; None if they are read from files.
        files: open files, by path.
    """

    loader: Loader
    decoder: Decoder
    store: HostStore | None
    files: Mapping[Path, ByteSource]

    def jobs(self, layer: int, expert: int, outs: Sequence[Tensor]) -> list[FillJob]:
        """Return the jobs that bring an expert into tensors in RAM; `outs` has one for each of PARTS."""
        named = {expert_weight(layer, part): out for part, out in zip(PARTS, outs, strict=True)}
        if self.store is None:
            packed = {name: (packing_of(self.decoder, name), out) for name, out in named.items()}
            return file_jobs(expert_conversions(self.loader, expert, packed))
        sources = self.sources(layer, expert)
        pairs = zip(named.items(), sources, strict=True)
        return [job for (name, out), source in pairs for job in copy_jobs(name, flat(source), flat(out))]

    def sources(self, layer: int, expert: int) -> list[Tensor]:
        """Return an expert's matrices in the store, one for each of PARTS."""
        assert self.store is not None, "nothing waits in RAM"
        return [self.store.tables[expert_weight(layer, part)][expert] for part in PARTS]

    def tables(self, layer: int) -> dict[str, Tensor]:
        """Return the matrices of all of a layer's experts in the store, by projection."""
        assert self.store is not None, "nothing waits in RAM"
        return {part: self.store.tables[expert_weight(layer, part)] for part in PARTS}


def open_experts(
    below: LowerTier,
    plan: ExpertPlan,
    groups: Mapping[int, int],
    timeline: Timeline,
    device: torch.device,
    link: DeviceLink | None,
) -> ExpertStream:
    """Set up the cache of experts and bind its slots; nothing is fetched yet.

    The cache has its own threads, which prevents a deadlock: the threads that fill layer groups may all be waiting for
    a slot that becomes free only after experts have run.

    Args:
        groups: number of the layer group, by layer.
        link: connection to a device with its own memory; None if the device is the CPU.
    """
    decoder = below.decoder
    pools = expert_pools(decoder, plan.num_slots, plan.num_layers)
    locked, note = lock_tables(below, [layer for pool in pools for layer in pool.layers], plan, link)
    cached: dict[int, ExpertSlots] = {}
    if plan.has_layer_slots:
        bound, cached, pools = bind_layer_slots(decoder, pools, {one: below.tables(one) for one in locked}, device)
        slots = {layer: expert_layers(decoder)[layer].experts for layer in bound}
    else:
        bound, slots = _bind_pools(below, pools, locked, device)

    def outs(layer: int, slot: int) -> list[Tensor]:
        return [bound[layer][part][slot] for part in PARTS]

    if link is None:
        threads = _threads(below, timeline, "copy")

        def jobs(layer: int, expert: int, slot: int) -> Sequence[FillJob]:
            return below.jobs(layer, expert, outs(layer, slot))

        own = ExpertCache(pools, jobs, groups, threads, timeline)
        return ExpertStream(own, FetchedExperts(own, slots))

    def transfer(layer: int, expert: int, slot: int) -> Transfer:
        if below.store is not None:
            return Transfer(outs(layer, slot), below.sources(layer, expert))
        return Transfer(outs(layer, slot), None, lambda host: below.jobs(layer, expert, host))

    filler = _device_filler(below, bound.values(), timeline, link)
    cache = ExpertCache(pools, transfer, groups, filler, timeline)
    device_cache = DeviceCache(cached, cache) if cached else None
    return ExpertStream(cache, FetchedExperts(device_cache or cache, slots, locked), note, device_cache)


def _bind_pools(
    below: LowerTier, pools: Sequence[ExpertPool], mapped: frozenset[int], device: torch.device
) -> tuple[dict[int, dict[str, Tensor]], dict[int, Experts]]:
    """Allocate the pools' slots and bind layers to them; bind mapped layers to their tables in RAM.

    Returns:
        The slots of each layer, by projection, and the module whose matrices are those slots.
    """
    layers = {layer: moe.experts for layer, moe in expert_layers(below.decoder).items()}
    bound: dict[int, dict[str, Tensor]] = {}
    slots: dict[int, Experts] = {}
    for pool in pools:
        views = allocate_pool(below.decoder, pool, device)
        for layer in pool.layers:
            bound[layer] = views
            bind_experts(layers[layer], below.tables(layer) if layer in mapped else views)
            slots[layer] = beside(below.decoder, layer, views) if layer in mapped else layers[layer]
    return bound, slots


def expert_ring_nbytes(plan: Plan, is_held: bool) -> int:
    """Return the bytes of RAM of the host slots for experts; 0 if the experts are stored in RAM."""
    return 0 if plan.experts is None or is_held else HOST_SLOTS * plan.experts.slot_nbytes


def lock_tables(
    below: LowerTier, layers: Sequence[int], plan: ExpertPlan, link: DeviceLink | None
) -> tuple[frozenset[int], str]:
    """Lock the tables of as many layers as the machine allows; return those layers, and a note if some are missing."""
    if link is None or link.pins is None or not plan.are_device_readable:
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
        "host fetches the chosen experts"
    )


def _threads(below: LowerTier, timeline: Timeline, lane: Lane) -> ThreadFiller:
    return ThreadFiller(below.files, THREADS, BUFFER_NBYTES if below.store is None else 0, 0, timeline, lane)


def _device_filler(
    below: LowerTier, bound: Iterable[Mapping[str, Tensor]], timeline: Timeline, link: DeviceLink
) -> DeviceFiller:
    """Return the filler that copies experts to a device, with its own host slots if they are read from files."""
    if below.store is not None:
        return DeviceFiller(link.queues, timeline)
    sizes = [max(views[part][0].nbytes for views in bound) for part in PARTS]
    host = [[shared_pages(nbytes)[:nbytes] for nbytes in sizes] for _ in range(HOST_SLOTS)]
    if link.pins is not None:  # memory that is not locked is copied through the driver's buffer
        link.pins.add(raw for slot in host for raw in slot)
    return DeviceFiller(link.queues, timeline, HostSlots(_threads(below, timeline, "read"), host))
