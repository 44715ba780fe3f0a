"""A prediction of the decode speed of several processes that run one model's layers (graphcore/parallel).

    rank 0   read 0 |read 2 |read head       |read 0 ...      each disk reads ahead, as far as the rank has slots
    rank 1   read 1 |read 3 |read 1 ...
    stream          0 1     2 3              head             groups compute one after another, when they are there

One process is a sum or a maximum (prediction.py); of several, each waits for the others at every hand-over, so a pass
is followed group by group until passes repeat.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from graphcore.parallel.share import ENDS
from graphcore.planning.prediction import Rates, predict
from graphcore.weights.groups import LayerGroup
from graphcore.weights.plan import Plan

PASSES = 6  # simulated; the first ones fill the slots


@dataclass(frozen=True)
class RankPlan:
    """The plan of one rank, with the rates of its machine.

    Attributes:
        layer_groups: layers, or matrices of a layer, of each of its layer groups.
        rates: rates of its machine.
    """

    plan: Plan
    layer_groups: Sequence[LayerGroup]
    rates: Rates


@dataclass(frozen=True)
class Network:
    """What the ranks hand the residual stream over.

    Attributes:
        bytes_per_second: rate of a connection.
        latency: seconds until the first byte arrives.
    """

    bytes_per_second: float
    latency: float

    def seconds(self, nbytes: int) -> float:
        """Return the time of one hand-over."""
        return self.latency + nbytes / self.bytes_per_second


@dataclass(frozen=True)
class Turn:
    """A layer group, or a part of the head, in the order of a pass.

    Attributes:
        rank: rank that runs it.
        copy_seconds: time in which its bytes arrive; 0 if it is resident.
        compute_seconds: time of its products.
    """

    rank: int
    copy_seconds: float
    compute_seconds: float


@dataclass(frozen=True)
class RingPrediction:
    """The predicted times of one decode step of several ranks.

    Attributes:
        sequences: number of sequences that the step serves.
        seconds: time of the whole step.
        copy_seconds: by rank, time in which its weights arrive.
        compute_seconds: by rank, time of its products.
        hand_over_seconds: time of all hand-overs, those of per-layer features included.
    """

    sequences: int
    seconds: float
    copy_seconds: Sequence[float]
    compute_seconds: Sequence[float]
    hand_over_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Decode speed of all sequences together."""
        return self.sequences / self.seconds


def turns_of(owners: Sequence[int], ranks: Sequence[RankPlan], sequences: int = 1) -> list[Turn]:
    """Return the groups of a pass in their order.

    Args:
        owners: rank of each layer.
        ranks: plan of each rank, for its own layers.
    """
    of_rank = [list(_turns_of_rank(rank, own, sequences)) for rank, own in enumerate(ranks)]
    found: list[Turn] = []
    for layer, rank in enumerate(owners):
        own = zip(ranks[rank].layer_groups, of_rank[rank], strict=False)  # slices of the head follow the groups
        found += [turn for group, turn in own if group.layers.start == layer]
    return [*found, *of_rank[ENDS][len(ranks[ENDS].layer_groups) :]]


def _turns_of_rank(rank: int, own: RankPlan, sequences: int) -> Iterator[Turn]:
    """Yield the layer groups and head slices of a rank in order; compute time is shared out by their bytes."""
    groups, whole = own.plan.groups, predict(own.plan, own.rates, sequences)
    first_slice = groups.num_layer_groups + 1
    numbers = range(1, first_slice + len(groups.head_slices))
    nbytes = [groups.nbytes_of(number) for number in numbers]
    fetched = whole.fetch_seconds / groups.num_layer_groups
    for number, size in zip(numbers, nbytes, strict=True):
        copied = size / own.rates.link if number in groups.streamed else 0.0
        computed = whole.compute_seconds * size / sum(nbytes) + (fetched if number < first_slice else 0.0)
        yield Turn(rank, copied, computed + copied * own.rates.link_busy)


def predict_ring(
    turns: Sequence[Turn],
    slots: Sequence[int],
    hand_over_seconds: float,
    sequences: int = 1,
    feature_seconds: float = 0.0,
) -> RingPrediction:
    """Predict the times of a decode step.

    Args:
        turns: groups in the order of a pass; the first follows the last one of the pass before.
        slots: number of slots of each rank.
        hand_over_seconds: time of one hand-over.
        feature_seconds: time in which per-layer features go from rank 0 to all others, at the beginning of a pass;
            the first hand-over of the stream follows them on the same connection.
    """
    ends, at = [], 0.0
    free = [0.0] * len(slots)  # when each rank's disk has read what it has begun
    used: list[deque[float]] = [deque([0.0] * count, maxlen=max(count, 1)) for count in slots]
    for _ in range(PASSES):
        before, behind = turns[-1].rank, feature_seconds
        for turn in turns:
            if turn.rank != before:
                at += hand_over_seconds + (behind if before == ENDS else 0.0)
                behind = 0.0 if before == ENDS else behind
            if turn.copy_seconds:
                free[turn.rank] = max(free[turn.rank], used[turn.rank][0]) + turn.copy_seconds
                at = max(at, free[turn.rank])
            at += turn.compute_seconds
            if turn.copy_seconds:
                used[turn.rank].append(at)
            before = turn.rank
        ends.append(at)
    ranks = range(len(slots))
    changes = sum(one.rank != other.rank for one, other in zip(turns, (turns[-1], *turns), strict=False))
    return RingPrediction(
        sequences,
        (ends[-1] - ends[1]) / (PASSES - 2),
        [sum(turn.copy_seconds for turn in turns if turn.rank == rank) for rank in ranks],
        [sum(turn.compute_seconds for turn in turns if turn.rank == rank) for rank in ranks],
        changes * hand_over_seconds + feature_seconds,
    )
