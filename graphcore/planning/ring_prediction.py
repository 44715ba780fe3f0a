"""A prediction of the decode speed of several processes that run one model's layers (graphcore/parallel).

    rank 0   read 0 |read 2 |read head       |read 0 ...      each disk reads ahead, as far as the rank has slots
    rank 1   read 1 |read 3 |read 1 ...
    stream          0 1     2 3              head             groups compute one after another, when they are there

One process is a sum or a maximum (prediction.py); of several, each waits for the others at every hand-over, so a pass
is followed group by group until passes repeat.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

PASSES = 6  # simulated; the first ones fill the slots


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
        hand_over_seconds: time of all hand-overs.
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


def predict_ring(
    turns: Sequence[Turn], slots: Sequence[int], hand_over_seconds: float, sequences: int = 1
) -> RingPrediction:
    """Predict the times of a decode step.

    Args:
        turns: groups in the order of a pass; the first follows the last one of the pass before.
        slots: number of slots of each rank.
        hand_over_seconds: time of one hand-over.
    """
    ends, at = [], 0.0
    free = [0.0] * len(slots)  # when each rank's disk has read what it has begun
    used: list[deque[float]] = [deque([0.0] * count, maxlen=max(count, 1)) for count in slots]
    for _ in range(PASSES):
        before = turns[-1].rank
        for turn in turns:
            if turn.rank != before:
                at += hand_over_seconds
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
        changes * hand_over_seconds,
    )
