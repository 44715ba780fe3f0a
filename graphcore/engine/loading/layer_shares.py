"""The shares of a model's layers that ranks get (graphcore/parallel), from the capacities of their machines.

decoder, machine  --capacity_of-->  RankCapacity of each  --share_layers-->  rank of each layer, the same on all ranks
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from graphcore.config.byte_sizes import in_words, parse_nbytes, rate_in_words
from graphcore.config.settings import Keeps, Settings, StreamingSettings
from graphcore.engine.loading.plan_run import plan_request
from graphcore.engine.loading.prepared_decoder import PreparedDecoder
from graphcore.errors import CheckpointNotFoundError, ConfigError
from graphcore.kvcache.sizes import cache_nbytes
from graphcore.parallel.capacity import RankCapacity, Requirement
from graphcore.parallel.layer_partition import partition_by_capacity, partition_by_split
from graphcore.parallel.layer_units import units_of
from graphcore.parallel.share import Share, described
from graphcore.planning.machine import PRODUCT_SHARE, Machine, Speeds
from graphcore.planning.planner import TURNS, budget_of
from graphcore.planning.rates import measure_rates, measure_reading
from graphcore.planning.sizes import WeightSizes, draft_sizes_of, sizes_of
from graphcore.planning.tier import choose_tier
from graphcore.streaming.moving_weights import MovingWeights
from graphcore.weights.conversion import CONVERSION_NBYTES
from graphcore.weights.groups import LayerGroup, movable_groups, split_layers
from graphcore.weights.loader import Loader
from graphcore.weights.matching import HEAD
from graphcore.weights.plan import GroupPlan, Plan, Tier

PROBED_SLOTS = 2


def interleavings(streaming: StreamingSettings) -> tuple[bool, ...]:
    """Return the partitions of layers to try, in order: False for contiguous layers, True for interleaved ones.

    With streaming=auto, contiguous layers are kept if nothing then streams.
    """
    return {"all": (False,), "nothing": (True,), "most": (False, True)}[streaming.keeps]


def capacity_of(
    settings: Settings,
    parts: PreparedDecoder,
    machine: Machine,
    speeds: Speeds,
    is_interleaved: bool,
    is_one_machine: bool = False,
) -> RankCapacity:
    """Return the capacity of a rank for the layers of a decoder, of which nothing was dropped yet.

    Args:
        machine: the rank's machine, or its part of one.
        speeds: known rates; others that shares depend on are measured on this machine.
        is_interleaved: True if weights will stream, so that the disk counts.
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
        if is_interleaved and layers:
            moving = _probed(parts, layers)
            rates = measure_rates(parts.loader, moving, tier, machine, speeds, parts.runtime.backend)
            disk, memory = (None, None) if rates is None else (rates.link, rates.memory)
        elif memory is None and not is_interleaved and not is_one_machine:
            read = measure_reading(machine.device, parts.runtime.backend)
            memory = None if read is None else PRODUCT_SHARE * read
    room = _room(settings, parts, machine, tier)
    return RankCapacity(*room, disk, memory, layers if absent else None, _expert_cache(settings, parts))


def _room(settings: Settings, parts: PreparedDecoder, machine: Machine, tier: Tier) -> tuple[int, int, int]:
    """Return room, streaming_nbytes and least_nbytes of a capacity."""
    whole_layers = replace(settings, streaming=replace(settings.streaming, layer_group_size=1))
    costs, sizes = parts.costs(whole_layers, tier), _sizes(parts)
    free = budget_of(plan_request(settings, parts, tier), machine.memory)
    taken = costs.workspace_nbytes + costs.attention_nbytes(parts.runtime.context_length) + costs.overhead_nbytes
    moved, besides = parts.sizes(settings), costs.moving_nbytes + costs.buffer_nbytes(CONVERSION_NBYTES)
    if sizes.experts is not None and _expert_cache(settings, parts) is None:
        besides += sizes.experts.min_slots * sizes.experts.slot_nbytes
    slots = TURNS * settings.streaming.layers_per_group * max(sizes.groups)
    return max(0, free - taken), besides + slots, besides + max(*moved.groups, *moved.head_slices)


def _expert_cache(settings: Settings, parts: PreparedDecoder) -> int | None:
    """Return the bytes of `streaming.expert_cache`, or of the fewest slots; None if it follows from the budget."""
    nbytes, experts = parse_nbytes("streaming.expert_cache", settings.streaming.expert_cache), _sizes(parts).experts
    return None if nbytes is None or experts is None else max(nbytes, experts.min_slots * experts.slot_nbytes)


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


def share_layers(
    settings: Settings, parts: PreparedDecoder, capacities: Sequence[RankCapacity], is_interleaved: bool
) -> tuple[int, ...]:
    """Return the rank of each layer; every rank that has the same capacities returns the same.

    Raises:
        ConfigError: the files of ranks hold too few groups of layers for one on each, or not all; or `parallel.split`
            has not as many proportions as there are ranks, or cannot be kept.
    """
    split, keeps = settings.parallel.split, settings.streaming.keeps
    if split is not None and len(split) != len(capacities):
        raise ConfigError(f"parallel.split={split} is for {len(split)} ranks, and there are {len(capacities)}")
    group_size, is_contiguous = settings.streaming.layers_per_group, not is_interleaved
    units = units_of(parts.decoder.spec.cache_layers, group_size, capacities)
    if split is not None:
        return partition_by_split(units, split, group_size, is_contiguous=is_contiguous)
    ends, layers = requirements_of(parts, keeps)
    return partition_by_capacity(units, capacities, layers, ends, keeps, is_contiguous=is_contiguous)


def shares_note(share: Share, read_nbytes: Sequence[float]) -> str:
    """Return a line about what each rank has and reads.

    Args:
        read_nbytes: by rank, bytes that stream for a token.
    """
    if not any(read_nbytes):
        rates = [rate_in_words(one.memory) for one in share.capacities if one.memory is not None]
        read = f", and memory is read at {', '.join(rates)}" if len(rates) == len(share.capacities) else ""
        return f"{described(share.owners)}; nothing streams{read}"
    reads = []
    for rank, nbytes in enumerate(read_nbytes):
        disk = share.capacities[rank].disk
        reads.append(f"rank {rank} reads {in_words(int(nbytes))}" + (f" at {rate_in_words(disk)}" if disk else ""))
    return f"{described(share.owners)}; for a token {', '.join(reads)}"


def requirements_of(parts: PreparedDecoder, keeps: Keeps) -> tuple[Requirement, Sequence[Requirement]]:
    """Return the requirement of embedding and head, and that of each layer.

    Experts, and weights that never stream, count as if all layers had as many.

    Args:
        keeps: weights that stay in memory. A draft model's copies do, too, of weights that do not; of all, if nothing
            may stream.
    """
    sizes, count = _sizes(parts), len(parts.decoder.layers)
    ends = Requirement(sizes.head + (0 if sizes.is_tied else sizes.embedding), sizes.head)
    experts = 0.0 if sizes.experts is None else sizes.experts.total_nbytes / count
    routed = 0.0 if sizes.experts is None else sizes.experts.top_k * sum(sizes.experts.expert_nbytes_by_layer) / count
    copies = None if parts.draft is None else draft_sizes_of(parts.draft, _each_layer(parts))
    copied, drafts = 0.0, [0] * count
    if copies is not None and parts.draft is not None and keeps == "all":
        head = copies.head if HEAD in parts.draft.smaller else 0
        ends, copied = replace(ends, held_nbytes=ends.held_nbytes + head), (copies.smaller - head) / count
    elif copies is not None:
        ends, drafts = replace(ends, draft_nbytes=copies.head), [*copies.groups]
    layers = []
    for matrices, cache, draft in zip(sizes.groups, _caches_by_layer(parts), drafts, strict=True):
        kept, read = cache + sizes.always / count, matrices + sizes.always / count + routed
        layers.append(Requirement(matrices + experts + kept + copied, read, kept, draft, experts, routed))
    return ends, layers


def _caches_by_layer(parts: PreparedDecoder) -> list[int]:
    """Return the bytes of each layer's cache; 0 for a layer that uses another one's."""
    spec, sizes = parts.decoder.spec, parts.runtime.cache_sizes(parts.runtime.context_length)
    own = [layer == lender for layer, lender in enumerate(spec.cache_layers)]
    return [cache_nbytes(spec, replace(sizes, layers=(at,))) if has_own else 0 for at, has_own in enumerate(own)]


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
