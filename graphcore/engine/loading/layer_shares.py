"""The shares of a model's layers that ranks get (graphcore/parallel/deal.py), from what they say of their machines.

decoder, machine  --offer_of-->  Offer of each rank  --share_layers-->  rank of each layer, the same on all ranks
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from graphcore.config.byte_sizes import in_words, rate_in_words
from graphcore.config.settings import Keeps, Settings, StreamingSettings
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
    holders_of,
    split_counts,
    with_lenders,
)
from graphcore.planning.machine import PRODUCT_SHARE, Machine, Speeds
from graphcore.planning.planner import TURNS, budget_of
from graphcore.planning.rates import measure_rates, measure_reading
from graphcore.planning.sizes import WeightSizes, draft_sizes_of, sizes_of
from graphcore.planning.tier import choose_tier
from graphcore.streaming.moving_weights import MovingWeights
from graphcore.weights.groups import LayerGroup, movable_groups, split_layers
from graphcore.weights.loader import Loader
from graphcore.weights.matching import HEAD
from graphcore.weights.plan import GroupPlan, Plan, Tier

PROBED_SLOTS = 2


def ways_to_deal(streaming: StreamingSettings) -> tuple[bool, ...]:
    """Return the ways to split layers, in the order to try: False for contiguous layers, True for layers in turn.

    With streaming=auto, contiguous layers are kept if nothing then streams.
    """
    return {"all": (False,), "nothing": (True,), "most": (False, True)}[streaming.keeps]


def offer_of(
    settings: Settings,
    parts: PreparedDecoder,
    machine: Machine,
    speeds: Speeds,
    in_turn: bool,
    is_one_machine: bool = False,
) -> Offer:
    """Return what a rank brings to the deal of a decoder, of which nothing was dropped yet.

    Args:
        machine: the rank's machine, or its part of one.
        speeds: known rates; others that the deal depends on are measured on this machine.
        in_turn: True if weights will stream, so that the disk counts.
        is_one_machine: True if all ranks are on one machine, so that its memory is as fast for each.

    Raises:
        PlanError: the budget is more than what is free.
        CheckpointError: a file changed, or cannot be read.
    """
    streaming = settings.streaming
    obstacle = "" if streaming.keeps == "all" else parts.disk_obstacle(settings, machine)
    absent, names = absent_weights(parts.loader), parts.loader.sources.keys()
    tier = choose_tier(streaming, parts.runtime.device, parts.loader.kept(names - absent), obstacle, machine.is_here)
    layers = [layer for layer in range(len(parts.decoder.layers)) if not _of_layer(absent, layer)]
    disk, memory = speeds.disk, None if speeds.bandwidth is None else PRODUCT_SHARE * speeds.bandwidth
    if machine.is_here and settings.parallel.split is None:
        if in_turn and layers:
            moving = _probed(parts, layers)
            rates = measure_rates(parts.loader, moving, tier, machine, speeds, parts.runtime.backend)
            disk, memory = (None, None) if rates is None else (rates.link, rates.memory)
        elif memory is None and not in_turn and not is_one_machine:
            read = measure_reading(machine.device, parts.runtime.backend)
            memory = None if read is None else PRODUCT_SHARE * read
    return Offer(*_room(settings, parts, machine, tier), disk, memory, layers if absent else None)


def _room(settings: Settings, parts: PreparedDecoder, machine: Machine, tier: Tier) -> tuple[int, int, int]:
    """Return room, streaming_nbytes and least_nbytes of an offer."""
    whole_layers = replace(settings, streaming=replace(settings.streaming, layer_group_size=1))
    costs, sizes = parts.costs(whole_layers, tier), _sizes(parts)
    free = budget_of(plan_request(settings, parts, tier), machine.memory)
    taken = costs.workspace_nbytes + costs.attention_nbytes(parts.runtime.context_length) + costs.overhead_nbytes
    moved, besides = parts.sizes(settings), costs.moving_nbytes + costs.buffer_nbytes
    if sizes.experts is not None:
        besides += sizes.experts.min_slots * sizes.experts.slot_nbytes
    slots = TURNS * settings.streaming.layers_per_group * max(sizes.groups)
    return max(0, free - taken), besides + slots, besides + max(*moved.groups, *moved.head_slices)


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
        ConfigError: the files of ranks hold too few groups of layers for one on each, or not all; or there are not as
            many proportions as ranks.
    """
    layers, together = len(parts.decoder.layers), settings.streaming.layers_per_group
    split, cache_layers = settings.parallel.split, parts.decoder.spec.cache_layers
    if split is not None and len(split) != len(offers):
        raise ConfigError(f"parallel.split={split} is for {len(split)} ranks, and there are {len(offers)}")
    holders = holders_of(cache_layers, together, offers)
    if split is None:
        keeps = settings.streaming.keeps
        ends, all_layers = needs_of(parts, keeps)
        counts = fair_counts(holders, offers, all_layers.times(1 / len(holders)), ends, keeps)
    else:
        counts = split_counts(holders, split)
    if not in_turn and all(offer.layers is None for offer in offers):
        counts = counts_with_lenders(counts, cache_layers, together)
    owners = deal(layers, together, holders, counts, is_contiguous=not in_turn)
    return with_lenders(owners, cache_layers)


def shares_note(share: Share, read_nbytes: Sequence[float]) -> str:
    """Return a line about what each rank has and reads.

    Args:
        read_nbytes: by rank, bytes that stream for a token.
    """
    if not any(read_nbytes):
        rates = [rate_in_words(offer.memory) for offer in share.offers if offer.memory is not None]
        read = f", and memory is read at {', '.join(rates)}" if len(rates) == len(share.offers) else ""
        return f"{described(share.owners)}; nothing streams{read}"
    reads = []
    for rank, nbytes in enumerate(read_nbytes):
        disk = share.offers[rank].disk
        reads.append(f"rank {rank} reads {in_words(int(nbytes))}" + (f" at {rate_in_words(disk)}" if disk else ""))
    return f"{described(share.owners)}; for a token {', '.join(reads)}"


def needs_of(parts: PreparedDecoder, keeps: Keeps) -> tuple[Needs, Needs]:
    """Return what embedding and head, and what all layers together need.

    Args:
        keeps: weights that stay in memory. A draft model's copies do, too, of weights that do not; of all, if nothing
            may stream.
    """
    sizes = _sizes(parts)
    experts = 0 if sizes.experts is None else sizes.experts.total_nbytes
    kept = cache_nbytes(parts.decoder.spec, parts.runtime.cache_sizes(parts.runtime.context_length)) + sizes.always
    ends = Needs(sizes.head + (0 if sizes.is_tied else sizes.embedding), sizes.head)
    layers = Needs(sum(sizes.groups) + experts + kept, sizes.read_nbytes - sizes.head, kept)
    if parts.draft is None:
        return ends, layers
    copies = draft_sizes_of(parts.draft, _each_layer(parts))
    if keeps == "all":
        head = copies.head if HEAD in parts.draft.smaller else 0
        return ends.plus(Needs(head, 0)), layers.plus(Needs(copies.smaller - head, 0))
    return replace(ends, draft_nbytes=copies.head), replace(layers, draft_nbytes=sum(copies.groups))


def _sizes(parts: PreparedDecoder) -> WeightSizes:
    return sizes_of(parts.decoder, parts.loader.is_tied, _each_layer(parts))


def _each_layer(parts: PreparedDecoder) -> Sequence[LayerGroup]:
    return split_layers(len(parts.decoder.layers), 1)


def _probed(parts: PreparedDecoder, layers: Sequence[int]) -> MovingWeights:
    """Return the weights whose reading is timed: layers whose files are here, as if all of them streamed."""
    each = [LayerGroup(range(layer, layer + 1)) for layer in layers]
    groups = movable_groups(parts.decoder, each, [])
    sizes = [group.layout.nbytes for group in groups]
    placed = GroupPlan(
        (0, *sizes, 0), streamed=tuple(range(1, len(sizes) + 1)), num_slots=PROBED_SLOTS, slot_nbytes=max(sizes)
    )
    return MovingWeights(Plan(placed, 0, str(parts.runtime.device)), groups, layer_groups=each)
