"""What each rank of a ring has, and how long its part of a pass takes, as every rank tells the others now and then.

a rank's part      its time in a pass without the waiting for other ranks: computing, and waiting for weights
hand-overs         rank 0's time in a pass that is no rank's part
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from graphcore.engine.loading.prepared_decoder import PreparedDecoder
from graphcore.parallel.process_group import ProcessGroup
from graphcore.weights.plan import Plan, expected_bytes_per_token

INTERVAL = 1.0  # seconds between two exchanges of times, while passes run


class RankShare(NamedTuple):
    """What a rank has of the model.

    Attributes:
        layers: number of its layers.
        weight_nbytes: bytes of weights in its memory.
        streamed_nbytes: bytes that it reads for each pass.
    """

    layers: int
    weight_nbytes: int
    streamed_nbytes: int


class PassTimes(NamedTuple):
    """Times of a rank's passes since the last exchange.

    Attributes:
        passes: number of passes.
        seconds: time in them.
        own_seconds: the rank's part of it.
    """

    passes: int
    seconds: float
    own_seconds: float


class PassClock:
    """Measures the passes of a rank, and tells the other ranks.

    Attributes:
        times: times of all ranks, in order, as of the last exchange; none before the first.
    """

    def __init__(self, ranks: ProcessGroup) -> None:
        self._ranks = ranks
        self._passes, self._seconds, self._own_seconds = 0, 0.0, 0.0
        self._exchanged = -INTERVAL
        self.times: Sequence[PassTimes] = ()

    @property
    def is_due(self) -> bool:
        """Whether the last exchange was some time ago."""
        return time.monotonic() - self._exchanged >= INTERVAL

    @contextmanager
    def measured(self, *, exchanges: bool) -> Iterator[None]:
        """Measure a pass.

        Args:
            exchanges: True to exchange the times of all ranks after it, which all of them do then.
        """
        began, waited = time.perf_counter(), self._ranks.waited
        yield
        seconds = time.perf_counter() - began
        self._passes += 1
        self._seconds += seconds
        self._own_seconds += max(0.0, seconds - (self._ranks.waited - waited))
        if exchanges:
            said = self._ranks.all_say([self._passes, self._seconds, self._own_seconds])
            self.times = [PassTimes(*one) for one in said]
            self._passes, self._seconds, self._own_seconds = 0, 0.0, 0.0
            self._exchanged = time.monotonic()


def rank_shares(ranks: ProcessGroup, parts: PreparedDecoder, plan: Plan) -> Sequence[RankShare]:
    """Return what each rank has, in order; all ranks call it."""
    layers = sum(1 for _ in parts.decoder.blocks())
    said = ranks.all_say([layers, plan.weight_nbytes, round(expected_bytes_per_token(plan))])
    return [RankShare(*one) for one in said]
