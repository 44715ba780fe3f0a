"""task=plan with parallel=ring: what ranks on described machines would get, and the speed that they would have.

One process prepares every rank's share, one after another, as the ranks themselves would.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from graphcore.config.byte_sizes import in_words
from graphcore.config.settings import Settings
from graphcore.device import resolve_device
from graphcore.engine.loading.decoder_share import check_partitionable, with_share
from graphcore.engine.loading.layer_shares import capacity_of, interleavings, share_layers
from graphcore.engine.loading.open_model import Model
from graphcore.engine.loading.plan_run import plan_run, plan_shorter
from graphcore.engine.loading.plan_speculation import Planned, without_model
from graphcore.engine.loading.prepare_model import prepare_model
from graphcore.engine.loading.prepared_decoder import PreparedDecoder
from graphcore.engine.loading.runtime_config import ComputeTarget
from graphcore.errors import ConfigError, PlanError
from graphcore.nn.spec import ModelSpec
from graphcore.parallel.share import Share, num_hand_overs
from graphcore.planning.machine import CPU, Machine, Speeds
from graphcore.planning.prediction import Rates, speed_in_words
from graphcore.planning.rates import moved_bytes_per_stored_byte, moves_weights
from graphcore.planning.ring_prediction import Network, RankPlan, RingPrediction, predict_ring, turns_of
from graphcore.streaming.moving_weights import find_moving
from graphcore.tasks.plan_machine import machine_of, rate_of, speeds_of, target_on
from graphcore.tasks.task import Record
from graphcore.weights.plan import Plan, expected_bytes_per_token

FLOAT_NBYTES = 4  # bytes of a number of the residual stream, and of per-layer features: float32
USUAL_NETWORK = "125MB"  # bytes per second: 1 Gbit/s
USUAL_LATENCY = 0.0002  # seconds


@dataclass(frozen=True)
class RankMachine:
    """The machine of one rank, and its known rates."""

    machine: Machine
    speeds: Speeds


@dataclass(frozen=True)
class PlannedRank:
    """The plan of one rank of a ring.

    Attributes:
        rates: rates of its machine; None where the prediction needs one that was not given.
        missing: names of those that were not given.
    """

    share: Share
    parts: PreparedDecoder
    plan: Plan
    on: RankMachine
    rates: Rates | None
    missing: Sequence[str]


@dataclass(frozen=True)
class PlannedRing:
    """What all ranks get.

    Attributes:
        predictions: speeds for numbers of sequences; empty where a rate is not known.
    """

    ranks: Sequence[PlannedRank]
    predictions: Sequence[RingPrediction]

    @property
    def missing(self) -> Sequence[str]:
        """Names of the rates that a prediction needs and that were not given."""
        return sorted({name for rank in self.ranks for name in rank.missing})


def machines_of(settings: Settings, ranks: Any, ram: Any, disk: Any, bandwidth: Any, memory: Any) -> list[RankMachine]:
    """Return the machines of the ranks.

    Args:
        ranks: number of ranks.
        ram, disk, bandwidth, memory: as for `machine_of` and `speeds_of`, or a list with one of each rank.

    Raises:
        ConfigError: the number of ranks is missing, the ranks would run on a GPU, a list has another length, or a size
            is invalid.
    """
    if not isinstance(ranks, int) or ranks < 2:
        raise ConfigError(
            f"task.ranks={ranks}: a plan with parallel=ring is for a number of ranks of 2 or more; give task.ranks=4, "
            "and what each has: task.ram=16GiB task.disk=3GB task.bandwidth=50GB"
        )
    # First of all, because others advise keys that describe a GPU, which a ring does not take.
    is_described = None not in (ram if isinstance(ram, list) else [ram])
    device = CPU if is_described and settings.device == "auto" else resolve_device(settings.device)
    if device.type != "cpu":
        raise ConfigError(f"task=plan parallel=ring plans ranks on CPUs, not on {device}; set device=cpu")
    given = {"ram": ram, "disk": disk, "bandwidth": bandwidth, "memory": memory}
    for name, value in given.items():
        if isinstance(value, list) and len(value) != ranks:
            raise ConfigError(f"task.{name} has {len(value)} values, and task.ranks={ranks}; give one for each rank")
    found = []
    for rank in range(ranks):
        own = {name: value[rank] if isinstance(value, list) else value for name, value in given.items()}
        here = machine_of(settings, None, own["ram"])
        described = Machine(here.device, here.memory, here.ram_nbytes, is_here=False)  # no rank runs here
        speeds = speeds_of(described, None, own["disk"], own["bandwidth"], own["memory"])
        found.append(RankMachine(described, speeds))
    return found


def network_of(rate: Any, latency: float | None) -> Network:
    """Return the network that the task's settings describe; a usual one for what is not given.

    Raises:
        ConfigError: the rate is no rate, or the latency no time.
    """
    seconds = USUAL_LATENCY if latency is None else latency
    if not 0 <= seconds < math.inf:
        raise ConfigError(f"task.latency={latency} must be a number of seconds, such as {USUAL_LATENCY}")
    return Network(rate_of("task.network", USUAL_NETWORK if rate is None else rate), seconds)


def plan_ring(
    settings: Settings, model: Model, machines: Sequence[RankMachine], network: Network, sequences: Sequence[int]
) -> PlannedRing:
    """Return what each rank gets.

    Args:
        sequences: numbers of sequences whose speed is predicted.

    Raises:
        PlanError: a rank's share does not fit; the message says which rank, and what would do.
        ConfigError: the model's layers cannot be split among so many ranks, or a setting is for GPUs.
    """
    if settings.parallel.transport == "nccl":
        raise ConfigError(
            "parallel.transport=nccl has no effect with task=plan: it plans ranks on CPUs; leave it out for the plan"
        )
    for is_interleaved in interleavings(settings.streaming):
        shares, planned = _planned_shares(settings, model, machines, is_interleaved)
        if not any(plan.is_streaming for _, plan, _ in planned):
            break
    planned = _agreed(settings, planned, machines)
    ranks = [_with_rates(settings, *one) for one in zip(shares, planned, machines, strict=True)]
    return PlannedRing(ranks, _predicted(settings, model.spec, ranks, network, sequences))


def _planned_shares(
    settings: Settings, model: Model, machines: Sequence[RankMachine], is_interleaved: bool
) -> tuple[Sequence[Share], Sequence[Planned]]:
    """Return the share and the plan of each rank."""
    target = target_on(machines[0].machine, settings)
    whole = prepare_model(settings, model, target)
    check_partitionable(whole)
    capacities = tuple(capacity_of(settings, whole, one.machine, one.speeds, is_interleaved) for one in machines)
    owners = share_layers(settings, whole, capacities, is_interleaved)
    shares = [Share(rank, owners, capacities) for rank in range(len(machines))]
    return shares, [_planned(settings, model, target, share, machines[share.rank]) for share in shares]


def _planned(settings: Settings, model: Model, target: ComputeTarget | None, share: Share, on: RankMachine) -> Planned:
    try:
        return plan_run(settings, with_share(prepare_model(settings, model, target), share), on.machine)
    except PlanError as error:
        raise PlanError(f"rank {share.rank} of {len(share.capacities)}: {error}") from error


def _agreed(settings: Settings, planned: Sequence[Planned], machines: Sequence[RankMachine]) -> Sequence[Planned]:
    """Return the plans with what all ranks have alike: the shortest context, and no draft model that one chose."""
    shortest = min(parts.runtime.context_length for parts, _, _ in planned)
    planned = [plan_shorter(settings, one, shortest, on.machine) for one, on in zip(planned, machines, strict=True)]
    if settings.speculation.kind != "auto":
        return planned
    has_experts = any(plan.experts is not None for _, plan, _ in planned)
    return [without_model(settings, one, has_experts, on.machine) for one, on in zip(planned, machines, strict=True)]


def _predicted(
    settings: Settings, spec: ModelSpec, ranks: Sequence[PlannedRank], network: Network, sequences: Sequence[int]
) -> Sequence[RingPrediction]:
    """Return the speed of each number of sequences; nothing if a rate is not known."""
    plans = [
        RankPlan(rank.plan, rank.parts.layer_groups(settings.streaming), rank.rates)
        for rank in ranks
        if rank.rates is not None
    ]
    if len(plans) < len(ranks):
        return ()
    owners, slots = ranks[0].share.owners, [plan.plan.groups.num_slots for plan in plans]
    features = 0 if spec.per_layer is None else len(spec.blocks) * spec.per_layer.width * FLOAT_NBYTES
    found = []
    for count in sequences:
        hand_over = network.seconds(count * spec.dim * FLOAT_NBYTES)
        sent = network.seconds((len(ranks) - 1) * count * features) if features else 0.0
        found.append(predict_ring(turns_of(owners, plans, count), slots, hand_over, count, feature_seconds=sent))
    return found


def _with_rates(settings: Settings, share: Share, planned: Planned, on: RankMachine) -> PlannedRank:
    parts, plan, tier = planned
    moves = moves_weights(plan)
    moving = find_moving(parts.decoder, plan, parts.layer_groups(settings.streaming))
    per_stored = moved_bytes_per_stored_byte(parts.loader, moving, tier)
    rates = on.speeds.rates(on.machine, tier.kind, moves, per_stored)
    return PlannedRank(share, parts, plan, on, rates, on.speeds.missing(on.machine, tier.kind, moves))


def drafts_note(ring: PlannedRing) -> str:
    """Return a line about the draft model of speculation=self; empty without one."""
    if ring.ranks[0].parts.draft is None:
        return ""
    copied = sum(rank.plan.draft_nbytes for rank in ring.ranks)
    if not copied:
        return ring.ranks[0].parts.note_without_copies()
    return f"speculation=self: memory has {in_words(copied)} of copies; speeds are predicted without drafts"


def rank_rows(ring: PlannedRing) -> Iterator[Sequence[str]]:
    """Yield the table's rows: one for each rank."""
    predicted = ring.predictions[0] if ring.predictions else None
    for rank, one in enumerate(ring.ranks):
        streamed = expected_bytes_per_token(one.plan)
        layers = f"{len(one.share.layers)}{' and the head' if one.share.has_ends else ''}"
        yield (
            str(rank),
            layers,
            in_words(one.plan.groups.resident_nbytes + one.plan.resident_expert_nbytes),
            in_words(int(streamed)),
            f"{in_words(one.plan.peak_nbytes)} of {in_words(one.on.machine.memory.free_nbytes)}",
            "" if predicted is None else f"{predicted.copy_seconds[rank]:.3g} s",
            "" if predicted is None else f"{predicted.compute_seconds[rank]:.3g} s",
        )


def ring_line(ring: PlannedRing) -> str:
    """Return a line about hand-overs and speeds."""
    owners = ring.ranks[0].share.owners
    handed = f"{num_hand_overs(owners)} hand-overs a pass"
    if not ring.predictions:
        return handed
    first, *others = ring.predictions
    together = ", ".join(f"{speed_in_words(each.tokens_per_second)} with {each.sequences}" for each in others)
    share = first.hand_over_seconds / first.seconds
    return (
        f"{handed}, {first.hand_over_seconds:.3g} s ({share:.1%}); predicted "
        f"{speed_in_words(first.tokens_per_second)} tokens/s, {first.seconds:.3g} s a token; "
        f"in all {together} sequences"
    )


def ring_record(ring: PlannedRing, network: Network) -> Record:
    """Return the entries of result.json for the ranks and their speeds."""
    predicted = ring.predictions[0] if ring.predictions else None
    return {
        "ranks": [_rank_record(rank, one, predicted) for rank, one in enumerate(ring.ranks)],
        "network": {"bytes_per_second": network.bytes_per_second, "latency_seconds": network.latency},
        "hand_overs": num_hand_overs(ring.ranks[0].share.owners),
        "predicted": {
            "tokens_per_second": None if predicted is None else predicted.tokens_per_second,
            "tokens_per_second_of": {str(one.sequences): one.tokens_per_second for one in ring.predictions},
            "seconds": None if predicted is None else predicted.seconds,
            "hand_over_seconds": None if predicted is None else predicted.hand_over_seconds,
        },
    }


def _rank_record(rank: int, one: PlannedRank, predicted: RingPrediction | None) -> Record:
    plan = one.plan
    return {
        "rank": rank,
        "layers": sorted(one.share.layers),
        "has_head": one.share.has_ends,
        "streamed_groups": len(plan.groups.streamed),
        "slots": plan.groups.num_slots,
        "resident_bytes": plan.groups.resident_nbytes + plan.resident_expert_nbytes,
        "expected_bytes_per_token": expected_bytes_per_token(plan),
        "draft_bytes": plan.draft_nbytes,
        "total_bytes": plan.total_nbytes,
        "budget_bytes": plan.budget,
        "ram_bytes": one.on.machine.ram_nbytes,
        "disk_bytes_per_second": one.on.speeds.disk,
        "bandwidth_bytes_per_second": one.on.speeds.bandwidth,
        "copy_seconds": None if predicted is None else predicted.copy_seconds[rank],
        "compute_seconds": None if predicted is None else predicted.compute_seconds[rank],
    }
