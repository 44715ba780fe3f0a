"""Experts in slots: those that a token was routed to are fetched when that is known, and hot ones stay.

    router says 3 17 21 9     3 and 21 are there, 17 and 9 take the slots of the coldest; both are read at once
    more than there are slots (many tokens)         in waves: while one is computed with, the next is read

An expert that is computed with, or whose wave comes next, is pinned: its slot is nobody else's until it is released.
"""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from graphcore.streaming.expert_heat import ExpertHeat
from graphcore.streaming.timeline import Event, Timeline
from graphcore.weights.expert_pools import ExpertPool

Key = tuple[int, int]  # layer, expert
WorkT = TypeVar("WorkT")
WorkT_contra = TypeVar("WorkT_contra", contravariant=True)


class Filling(Protocol):
    """An expert on its way into its slot."""

    @property
    def left(self) -> int:
        """What is to be done until it is there; 0 when it is."""

    @property
    def fault(self) -> BaseException | None:
        """Why it will not be there; None if nothing failed."""


FillingT = TypeVar("FillingT", bound=Filling)


class ExpertCarrier(Protocol[WorkT_contra, FillingT]):
    """What brings experts into slots: threads (filler.py), or a device's copy lane (expert_copies.py)."""

    def begin(self, group: int, work: Sequence[WorkT_contra], after: None, /) -> FillingT:
        """Start filling a slot that nothing will read any more but what has been enqueued to compute."""

    def wait(self, filling: FillingT, /) -> None:
        """Return when what computes may read the slot, or will read it late enough.

        Raises:
            CheckpointError: a file changed, or cannot be read.
            StreamingError: no thread can read any more.
        """

    def cancel(self, fillings: Sequence[FillingT], /) -> None:
        """Give up what was not waited for."""

    def close(self) -> None:
        """End what runs by itself."""


@dataclass(frozen=True)
class Fetch(Generic[FillingT]):
    """Experts of one layer that are pinned, some of them perhaps still on their way.

    Attributes:
        tickets: of those that are being read.
    """

    layer: int
    experts: tuple[int, ...]
    tickets: dict[int, FillingT]


@dataclass
class Slots:
    """Which experts the slots of one pool hold.

    Attributes:
        held: slot of each expert.
        pinned: how many fetches each expert is part of; those of none are not named.
    """

    pool: ExpertPool
    heat: ExpertHeat
    free: list[int]
    held: dict[Key, int] = field(default_factory=dict)
    pinned: dict[Key, int] = field(default_factory=dict)

    @classmethod
    def of(cls, pool: ExpertPool) -> "Slots":
        """Return the empty slots of a pool."""
        return cls(pool, ExpertHeat(len(pool.layers)), list(reversed(range(pool.num_slots))))

    def take(self, key: Key) -> int:
        """Return a slot for an expert that is not there: a free one, or that of the coldest which is not pinned."""
        if not self.free:
            victim = min((other for other in self.held if other not in self.pinned), key=self.heat)
            self.free.append(self.held.pop(victim))
        self.held[key] = self.free.pop()
        return self.held[key]

    def drop(self, key: Key) -> None:
        """Forget an expert; its slot is free."""
        self.free.append(self.held.pop(key))

    def pin(self, key: Key) -> None:
        """Keep an expert where it is until it is unpinned as often as pinned."""
        self.pinned[key] = self.pinned.get(key, 0) + 1

    def unpin(self, key: Key) -> None:
        """Take one pin away."""
        self.pinned[key] -= 1
        if not self.pinned[key]:
            del self.pinned[key]


@dataclass
class ExpertCache(Generic[WorkT, FillingT]):
    """Fetches experts.

    Attributes:
        pools: every layer with experts is in one.
        jobs: what fills a slot with an expert: layer, expert and slot.
        groups: the layer group that each layer belongs to, for the timeline.
        hits, misses: experts that were there when they were asked for, and experts that were not.
    """

    pools: Sequence[ExpertPool]
    jobs: Callable[[int, int, int], Sequence[WorkT]]
    groups: Mapping[int, int]
    filler: ExpertCarrier[WorkT, FillingT]
    timeline: Timeline
    hits: int = 0
    misses: int = 0

    def __post_init__(self) -> None:
        slots = [Slots.of(pool) for pool in self.pools]
        self._slots = {layer: one for one in slots for layer in one.pool.layers}

    @property
    def hit_rate(self) -> float | None:
        """Share of the experts asked for that were there; None before the first."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else None

    def waves(self, layer: int, experts: Sequence[int]) -> Generator[list[int]]:
        """Yield where experts lie, until each was there once; what is yielded holds until the next is asked for.

        Args:
            experts: distinct, of the layer.

        Yields:
            For each of the layer's experts its place in the pool's tensors, or -1.

        Raises:
            CheckpointError: a file changed, or cannot be read.
            StreamingError: no thread can read any more.
        """
        slots = self._slots[layer]
        waves = self._cut(slots, layer, experts)
        slots.heat.add(layer, list(experts))
        reads_ahead = len(waves) > 1 and 2 * len(waves[0]) <= slots.pool.num_slots
        ahead: list[Fetch[FillingT]] = []
        try:
            for number, wave in enumerate(waves):
                fetch = ahead.pop() if ahead else self._begin(slots, layer, wave)
                try:
                    self._wait(fetch)
                    if reads_ahead and number + 1 < len(waves):
                        ahead.append(self._begin(slots, layer, waves[number + 1]))
                    yield self._places(slots, fetch)
                finally:
                    self._release(slots, fetch)
        finally:
            for fetch in ahead:
                self._release(slots, fetch)

    def _cut(self, slots: Slots, layer: int, experts: Sequence[int]) -> list[Sequence[int]]:
        """Return the experts in waves, those that are there first; two waves fit if there is more than one."""
        most = slots.pool.num_slots
        if len(experts) <= most:
            return [experts] if experts else []
        size = max(most // 2, 1)
        order = sorted(experts, key=lambda expert: (layer, expert) not in slots.held)
        return [order[begin : begin + size] for begin in range(0, len(order), size)]

    def _begin(self, slots: Slots, layer: int, experts: Sequence[int]) -> Fetch[FillingT]:
        """Pin experts and begin to read those that are not there, all of them at once."""
        missing = [expert for expert in experts if (layer, expert) not in slots.held]
        self.hits, self.misses = self.hits + len(experts) - len(missing), self.misses + len(missing)
        for expert in experts:
            slots.pin((layer, expert))
        fetch: Fetch[FillingT] = Fetch(layer, tuple(experts), {})
        for expert in missing:
            jobs = self.jobs(layer, expert, slots.take((layer, expert)))
            fetch.tickets[expert] = self.filler.begin(self.groups[layer], jobs, None)
        return fetch

    def _wait(self, fetch: Fetch[FillingT]) -> None:
        """Return when all of a fetch's experts are there."""
        began = time.perf_counter()
        for ticket in fetch.tickets.values():
            self.filler.wait(ticket)
        if fetch.tickets:
            self.timeline.add(Event("stall", self.groups[fetch.layer], began, time.perf_counter()))

    def _release(self, slots: Slots, fetch: Fetch[FillingT]) -> None:
        """Unpin a fetch's experts; those that did not arrive are forgotten, and no thread is at them any more."""
        failed = [expert for expert, ticket in fetch.tickets.items() if ticket.left or ticket.fault is not None]
        self.filler.cancel([fetch.tickets[expert] for expert in failed])
        for expert in fetch.experts:
            slots.unpin((fetch.layer, expert))
        for expert in failed:
            slots.drop((fetch.layer, expert))

    def _places(self, slots: Slots, fetch: Fetch[FillingT]) -> list[int]:
        places = [-1] * slots.pool.num_experts
        for expert in fetch.experts:
            places[expert] = slots.held[fetch.layer, expert]
        return places
