"""The shares of a model's layers that ranks get (graphcore/parallel/deal.py), from what they say of their machines.

decoder, machine  --offer_of-->  Offer of each rank  --share_layers-->  rank of each layer, the same on all ranks
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from graphcore.config.byte_sizes import in_words, rate_in_words
from graphcore.config.settings import Settings, StreamingSettings
from graphcore.engine.loading.plan_run import plan_request
from graphcore.engine.loading.prepared_decoder import PreparedDecoder
from graphcore.errors import CheckpointNotFoundError, ConfigError
from graphcore.kvcache.sizes import cache_nbytes
from graphcore.parallel.deal import (
    Needs,
    Offer,
    Share,
    counts_with_lenders,
    deal,
    described,
    fair_counts,
    split_counts,
    with_lenders,
)
from graphcore.planning.machine import Machine, Speeds
from graphcore.planning.planner import budget_of
from graphcore.planning.rates import measure_rates
from graphcore.planning.sizes import WeightSizes, sizes_of
from graphcore.planning.tier import choose_tier
from graphcore.streaming.moving_weights import MovingWeights
from graphcore.weights.groups import LayerGroup, movable_groups, split_layers
from graphcore.weights.loader import Loader
from graphcore.weights.plan import GroupPlan, Plan

PROBED_SLOTS = 2


def ways_to_deal(streaming: StreamingSettings) -> tuple[bool, ...]:
    """Return the ways to split layers, in the order to try: False for contiguous layers, True for layers in turn.

    With streaming=auto, contiguous layers are kept if nothing then streams.
    """
    return {"all": (False,), "nothing": (True,), "most": (False, True)}[streaming.keeps]


def offer_of(settings: Settings, parts: PreparedDecoder, machine: Machine, speeds: Speeds, in_turn: bool) -> Offer:
    """Return what a rank brings to the deal of a decoder, of which nothing was dropped yet.

    Args:
        machine: the rank's machine, or its part of one.
        speeds: known rates; the disk's is measured on this machine if layers are dealt in turn and it is not known.
        in_turn: True if weights will stream, so that the disk counts.

    Raises:
        PlanError: the budget is more than what is free.
        CheckpointError: a file changed, or cannot be read.
    """
    streaming = settings.streaming
    obstacle = "" if streaming.keeps == "all" else parts.disk_obstacle(settings, machine)
    absent, names = absent_weights(parts.loader), parts.loader.sources.keys()
    tier = choose_tier(streaming, parts.runtime.device, parts.loader.kept(names - absent), obstacle, machine.is_here)
    layers = [layer for layer in range(len(parts.decoder.layers)) if not _of_layer(absent, layer)]
    room = 0
    if streaming.keeps != "nothing":
        whole_layers = replace(settings, streaming=replace(streaming, layer_group_size=1))
        costs, context = parts.costs(whole_layers, tier), parts.runtime.context_length
        free = budget_of(plan_request(settings, parts, tier), machine.memory)
        taken = costs.workspace_nbytes + costs.moving_nbytes + costs.attention_nbytes(context) + costs.buffer_nbytes
        room = max(0, free - taken)
    rates = None
    if in_turn and layers and machine.is_here and settings.parallel.split is None:
        moving = _probed(parts, layers)
        rates = measure_rates(parts.loader, moving, tier, machine, speeds, parts.runtime.backend)
    known = speeds if rates is None else Speeds(disk=rates.link, bandwidth=rates.memory)
    return Offer(room, known.disk, known.bandwidth, layers if absent else None)


def absent_weights(loader: Loader) -> frozenset[str]:
    """Return the names of the weights whose files are not here."""
    checkpoint = loader.checkpoint
    return frozenset(
        name
        for name, source in loader.sources.items()
        if any(span.file not in checkpoint.files for span in checkpoint.spans(source.name))
    )


def check_ends(loader: Loader) -> None:
    """Check that the files of embedding and head are here, which rank 0 needs.

    Raises:
        CheckpointNotFoundError: one is not.
    """
    for name in sorted(absent_weights(loader)):
        if not name.startswith("layers."):
            file = loader.checkpoint.spans(loader.sources[name].name)[0].file
            raise CheckpointNotFoundError(
                f"{file}: rank 0 has embedding and head, and needs this file for {name}; put it on its machine"
            )


def _of_layer(weights: Collection[str], layer: int) -> list[str]:
    return [name for name in weights if name.startswith(f"layers.{layer}.")]


def share_layers(settings: Settings, parts: PreparedDecoder, offers: Sequence[Offer], in_turn: bool) -> tuple[int, ...]:
    """Return the rank of each layer; every rank that has the same offers returns the same.

    Raises:
        ConfigError: there are fewer groups of layers than ranks, or not as many proportions as ranks.
    """
    layers, together = len(parts.decoder.layers), settings.streaming.layers_per_group
    groups, split = -(-layers // together), settings.parallel.split
    if split is not None and len(split) != len(offers):
        raise ConfigError(f"parallel.split={split} is for {len(split)} ranks, and there are {len(offers)}")
    if split is None:
        ends, all_layers = needs_of(parts)
        each = Needs(all_layers.held_nbytes / groups, all_layers.read_nbytes / groups)
        counts = fair_counts(groups, offers, each, ends)
    else:
        counts = split_counts(groups, split)
    cache_layers = parts.decoder.spec.cache_layers
    counts = counts if in_turn else counts_with_lenders(counts, cache_layers, together)
    owners = deal(layers, together, counts, is_contiguous=not in_turn, offers=offers)
    return with_lenders(owners, cache_layers, offers)


def shares_note(share: Share, read_nbytes: Sequence[float]) -> str:
    """Return a line about what each rank has and reads.

    Args:
        read_nbytes: by rank, bytes that stream for a token.
    """
    if not any(read_nbytes):
        return f"{described(share.owners)}; nothing streams"
    reads = []
    for rank, nbytes in enumerate(read_nbytes):
        disk = share.offers[rank].disk
        reads.append(f"rank {rank} reads {in_words(int(nbytes))}" + (f" at {rate_in_words(disk)}" if disk else ""))
    return f"{described(share.owners)}; for a token {', '.join(reads)}"


def needs_of(parts: PreparedDecoder) -> tuple[Needs, Needs]:
    """Return what embedding and head, and what all layers together need."""
    sizes = _sizes(parts)
    experts = 0 if sizes.experts is None else sizes.experts.total_nbytes
    kept = cache_nbytes(parts.decoder.spec, parts.runtime.cache_sizes(parts.runtime.context_length))
    held = sum(sizes.groups) + sizes.always + experts + kept
    ends = Needs(sizes.head + (0 if sizes.is_tied else sizes.embedding), sizes.head)
    return ends, Needs(held, sizes.read_nbytes - sizes.head)


def _sizes(parts: PreparedDecoder) -> WeightSizes:
    return sizes_of(parts.decoder, parts.loader.is_tied, split_layers(len(parts.decoder.layers), 1))


def _probed(parts: PreparedDecoder, layers: Sequence[int]) -> MovingWeights:
    """Return the weights whose reading is timed: layers whose files are here, as if all of them streamed."""
    each = [LayerGroup(range(layer, layer + 1)) for layer in layers]
    groups = movable_groups(parts.decoder, each, [])
    sizes = [group.layout.nbytes for group in groups]
    placed = GroupPlan(
        (0, *sizes, 0), streamed=tuple(range(1, len(sizes) + 1)), num_slots=PROBED_SLOTS, slot_nbytes=max(sizes)
    )
    return MovingWeights(Plan(placed, 0, str(parts.runtime.device)), groups, layer_groups=each)
