"""The capacity of a rank, and the requirement of layers: bytes and rates from which shares of the layers follow."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from graphcore.config.settings import Keeps

SAME_RATE = 0.85  # share of the fastest rank's rate from which on a rank counts as equally fast
LEAST_RATE = 1.0  # bytes per second; a measured rate may be 0


@dataclass(frozen=True)
class Requirement:
    """The memory, and the bytes read for each token, that layers (or embedding and head) require.

    Attributes:
        held_nbytes: bytes that stay in memory if nothing streams: weights and caches.
        read_nbytes: bytes of weights that one token reads.
        kept_nbytes: bytes of `held_nbytes` that stay in memory if all weights stream.
        draft_nbytes: bytes of a draft model's copies, which stay beside if all weights stream.
        expert_nbytes: bytes of `held_nbytes` that are experts.
        expert_read_nbytes: bytes of `read_nbytes` that are experts.
    """

    held_nbytes: float
    read_nbytes: float
    kept_nbytes: float = 0
    draft_nbytes: float = 0
    expert_nbytes: float = 0
    expert_read_nbytes: float = 0

    def times(self, count: float) -> "Requirement":
        """Return the requirement of so many times as much."""
        return Requirement(*(count * nbytes for nbytes in vars(self).values()))

    @classmethod
    def sum(cls, requirements: Iterable[Self]) -> "Requirement":
        """Return the sum of requirements."""
        columns = [*zip(*(vars(one).values() for one in requirements), strict=True)]
        return Requirement(*map(sum, columns)) if columns else Requirement(0, 0)


@dataclass(frozen=True)
class RankCapacity:
    """What a rank's machine has for its share of the layers.

    Attributes:
        room_nbytes: bytes for weights, caches and a draft model's copies.
        streaming_nbytes: bytes of them that slots and buffers take if weights stream.
        least_nbytes: the same with one slot, with which a rank runs if there is no room for more.
        disk: bytes per second at which weights that do not stay arrive; None if unknown.
        memory: bytes per second at which memory is read; None if unknown.
        layers: layers whose weights are in its files; None for all.
        expert_cache_nbytes: most bytes of experts in memory (`streaming.expert_cache`); None for no limit.
    """

    room_nbytes: int
    streaming_nbytes: int = 0
    least_nbytes: int = 0
    disk: float | None = None
    memory: float | None = None
    layers: Sequence[int] | None = None
    expert_cache_nbytes: int | None = None

    def has_files_of(self, layers: Iterable[int]) -> bool:
        """Return whether the rank's files hold these layers."""
        return self.layers is None or set(layers) <= set(self.layers)

    def without_room(self, needed: Requirement, keeps: Keeps) -> tuple[float, float]:
        """Return the bytes that have no room, whatever streams, and the bytes of weights that stream for a token."""
        cache = self.expert_cache_nbytes
        if cache is None or needed.expert_nbytes <= cache or keeps == "all":
            return self._without_room(needed, keeps)
        missed = (1 - cache / needed.expert_nbytes) * needed.expert_read_nbytes
        others = replace(
            needed,
            held_nbytes=needed.held_nbytes - needed.expert_nbytes + cache,
            kept_nbytes=needed.kept_nbytes + cache,
            read_nbytes=needed.read_nbytes - needed.expert_read_nbytes,
        )
        lacks, reads = self._without_room(others, keeps)
        return lacks, reads + missed

    def _without_room(self, needed: Requirement, keeps: Keeps) -> tuple[float, float]:
        if keeps == "all" or (keeps == "most" and needed.held_nbytes <= self.room_nbytes):
            return max(0.0, needed.held_nbytes - self.room_nbytes), 0.0
        weights, least = needed.held_nbytes - needed.kept_nbytes, needed.kept_nbytes + needed.draft_nbytes
        more = self.room_nbytes - self.streaming_nbytes - least  # for weights that are kept in place of their copies
        kept = weights - needed.draft_nbytes
        away = 1.0 if keeps == "nothing" or more <= 0 else max(0.0, 1 - more / kept)
        return max(0.0, least + self.least_nbytes - self.room_nbytes), away * needed.read_nbytes


def leveled(rates: Sequence[float | None]) -> list[float]:
    """Return rates, of which those that are nearly the fastest are that, because measurements vary; 1 if unknown."""
    known = [rate for rate in rates if rate is not None]
    if len(known) < len(rates):
        return [1.0] * len(rates)
    return [max(LEAST_RATE, max(known) if rate >= SAME_RATE * max(known) else rate) for rate in known]
