"""A cache of experts in slots: experts are fetched once the router has chosen them, and the most used ones stay.

    router chooses 3 17 21 9      3 and 21 are in slots; 17 and 9 replace the coldest experts and are read together
    more experts than slots       they are fetched in waves (batches): while one wave computes, the next is read

An expert that is in use, or in the next wave, is pinned in the cache (not page-locked): its slot is not reused until it
is released.

The cache evicts the expert with the lowest decayed use count, half-life 64 lookups of the layer. On recorded routing of
three models (benchmarks/expert_routes.py) a cache for a quarter of all experts hits 77 to 83 %, within 2 points of
least recently used (LRU) and 10 to 12 below the optimum. A cache smaller than one token's experts, where LRU never
hits, still keeps the hottest ones (27 %).
"""

import heapq
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from graphcore.streaming.experts.slots import ExpertPool
from graphcore.streaming.filler import Filler, SlotFillT
from graphcore.streaming.timeline import Event, Timeline

HALF_LIFE = 64  # lookups of a layer
LARGEST = 2.0**40  # weight of a lookup at which all counts are scaled back

Key = tuple[int, int]  # layer, expert
WorkT = TypeVar("WorkT")


@dataclass(frozen=True)
class Fetch(Generic[SlotFillT]):
    """A request for experts of one layer, which are pinned; some may still be loading.

    Attributes:
        loads: pending loads, by expert.
    """

    layer: int
    experts: tuple[int, ...]
    loads: dict[int, SlotFillT]


@dataclass
class Slots:
    """The state of one pool's slots: the expert that each holds.

    Attributes:
        held: slot of an expert, by (layer, expert).
        pinned: number of fetches that an expert is part of, by (layer, expert): while there are any, it is pinned in
            the cache (not page-locked); experts in no fetch are absent.
    """

    pool: ExpertPool
    heat: "ExpertHeat"
    free: list[int]
    held: dict[Key, int] = field(default_factory=dict)
    pinned: dict[Key, int] = field(default_factory=dict)
    # A heap of use count, number of the load, and expert. Entries are not removed when an expert's count changes or it
    # leaves; they are recognised when they come up, because they differ from what `_loads` and `heat` say.
    _order: list[tuple[float, int, Key]] = field(default_factory=list)
    _loads: dict[Key, int] = field(default_factory=dict)  # number of the load that has brought an expert in `held`
    _changed: set[Key] = field(default_factory=set)  # experts whose counts may be in no entry
    _num_loads: int = 0
    _num_scalings: int = 0  # of the counts in the heap

    @classmethod
    def of(cls, pool: ExpertPool) -> "Slots":
        """Return the empty slots of a pool."""
        return cls(pool, ExpertHeat(len(pool.layers)), list(reversed(range(pool.num_slots))))

    def take(self, key: Key) -> int:
        """Return a slot for an expert that has none: a free slot, or that of the coldest expert that is not pinned."""
        if not self.free:
            self.drop(self._coldest())
        self.held[key] = self.free.pop()
        self._num_loads += 1
        self._loads[key] = self._num_loads
        self._changed.add(key)
        return self.held[key]

    def _coldest(self) -> Key:
        """Return the coldest expert that is not pinned; of equally cold ones that which was loaded first.

        With n slots it costs O(log n) for each expert that was asked for or loaded since the last call, and for each
        pinned expert that is colder.
        """
        # Scaling keeps the order of counts, but those in the heap are not comparable with new ones.
        if self._num_scalings != self.heat.num_scalings or len(self._order) > 4 * len(self.held):
            self._num_scalings = self.heat.num_scalings
            self._order = [(self.heat(key), number, key) for key, number in self._loads.items()]
            heapq.heapify(self._order)
        else:
            for key in self._changed & self.held.keys():
                heapq.heappush(self._order, (self.heat(key), self._loads[key], key))
        self._changed.clear()
        pinned = []
        while True:
            entry = heapq.heappop(self._order)
            count, number, key = entry
            if self._loads.get(key) != number or self.heat(key) != count:
                continue
            if key not in self.pinned:
                break
            pinned.append(entry)
        for entry in pinned:
            heapq.heappush(self._order, entry)
        return key

    def drop(self, key: Key) -> None:
        """Remove an expert and free its slot."""
        self.free.append(self.held.pop(key))
        del self._loads[key]

    def count(self, layer: int, experts: Sequence[int]) -> None:
        """Count a lookup of experts, whether they have slots or not."""
        self.heat.add(layer, list(experts))
        self._changed.update((layer, expert) for expert in experts)

    def pin(self, key: Key) -> None:
        """Keep an expert in its slot until it has been unpinned as often as pinned."""
        self.pinned[key] = self.pinned.get(key, 0) + 1

    def unpin(self, key: Key) -> None:
        """Remove one pin of an expert."""
        self.pinned[key] -= 1
        if not self.pinned[key]:
            del self.pinned[key]


@dataclass
class ExpertCache(Generic[WorkT, SlotFillT]):
    """A cache that fetches experts into slots on request.

    Attributes:
        pools: pools of slots; every layer whose experts move is in exactly one.
        make_job: given layer, expert and slot, returns the copy job that loads the expert into the slot.
        groups: number of the layer group, by layer, for the timeline.
        hits, misses: number of requested experts that were in a slot, and that were not.
    """

    pools: Sequence[ExpertPool]
    make_job: Callable[[int, int, int], WorkT]
    groups: Mapping[int, int]
    filler: Filler[WorkT, SlotFillT]
    timeline: Timeline
    hits: int = 0
    misses: int = 0

    def __post_init__(self) -> None:
        slots = [Slots.of(pool) for pool in self.pools]
        self._slots = {layer: one for one in slots for layer in one.pool.layers}

    @property
    def hit_rate(self) -> float | None:
        """Share of the requested experts that were in a slot; None before the first request."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else None

    def waves(self, layer: int, experts: Sequence[int]) -> Generator[list[int]]:
        """Fetch experts in waves and yield their slots; each wave is valid until the next is requested.

        Args:
            experts: distinct experts of the layer.

        Yields:
            The slot, an index in the pool's tensors, of each of the layer's experts; -1 for experts outside the wave.

        Raises:
            CheckpointError: a file changed, or cannot be read.
            StreamingError: the reading threads have died, or the device has failed.
        """
        slots = self._slots[layer]
        waves = self._cut(slots, layer, experts)
        slots.count(layer, experts)
        reads_ahead = len(waves) > 1 and 2 * len(waves[0]) <= slots.pool.num_slots
        ahead: list[Fetch[SlotFillT]] = []
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
        """Split experts into waves, cached ones first.

        With several waves, each takes at most half of the slots (at least one), so that the next can be read while one
        computes; this needs at least two slots.
        """
        most = slots.pool.num_slots
        if len(experts) <= most:
            return [experts] if experts else []
        size = max(most // 2, 1)
        order = sorted(experts, key=lambda expert: (layer, expert) not in slots.held)
        return [order[begin : begin + size] for begin in range(0, len(order), size)]

    def _begin(self, slots: Slots, layer: int, experts: Sequence[int]) -> Fetch[SlotFillT]:
        """Pin experts and begin to read all missing ones together."""
        missing = [expert for expert in experts if (layer, expert) not in slots.held]
        self.hits, self.misses = self.hits + len(experts) - len(missing), self.misses + len(missing)
        for expert in experts:
            slots.pin((layer, expert))
        fetch: Fetch[SlotFillT] = Fetch(layer, tuple(experts), {})
        for expert in missing:
            job = self.make_job(layer, expert, slots.take((layer, expert)))
            fetch.loads[expert] = self.filler.begin(self.groups[layer], job, None)
        return fetch

    def _wait(self, fetch: Fetch[SlotFillT]) -> None:
        """Wait until all experts of a fetch are in their slots."""
        began = time.perf_counter()
        for load in fetch.loads.values():
            self.filler.wait(load)
        if fetch.loads:
            self.timeline.add(Event("stall", self.groups[fetch.layer], began, time.perf_counter()))

    def _release(self, slots: Slots, fetch: Fetch[SlotFillT]) -> None:
        """Unpin the experts of a fetch. Experts that did not arrive are cancelled and lose their slots."""
        failed = [expert for expert, load in fetch.loads.items() if not load.is_full]
        self.filler.cancel([fetch.loads[expert] for expert in failed])
        for expert in fetch.experts:
            slots.unpin((fetch.layer, expert))
        for expert in failed:
            slots.drop((fetch.layer, expert))

    def _places(self, slots: Slots, fetch: Fetch[SlotFillT]) -> list[int]:
        places = [-1] * slots.pool.num_experts
        for expert in fetch.experts:
            places[expert] = slots.held[fetch.layer, expert]
        return places


@dataclass
class ExpertHeat:
    """Decaying use counts of the experts of all layers that share slots.

    Attributes:
        num_layers: number of layers that share the slots.
        num_scalings: times that all counts have been divided by the same number. Otherwise a lookup changes only the
            counts of its own experts.
    """

    num_layers: int
    num_scalings: int = 0
    _counts: defaultdict[tuple[int, int], float] = field(default_factory=lambda: defaultdict(float))
    _weight: float = 1.0

    def add(self, layer: int, experts: list[int]) -> None:
        """Count a lookup. Each weighs more than the one before, which has the same effect as decay of older counts."""
        self._weight *= 2 ** (1 / (HALF_LIFE * self.num_layers))
        for expert in experts:
            self._counts[layer, expert] += self._weight
        if self._weight > LARGEST:
            for key in self._counts:
                self._counts[key] /= self._weight
            self._weight = 1.0
            self.num_scalings += 1

    def __call__(self, key: tuple[int, int]) -> float:
        """Return the use count of an expert, (layer, expert). Only comparisons between counts are meaningful."""
        return self._counts[key]
