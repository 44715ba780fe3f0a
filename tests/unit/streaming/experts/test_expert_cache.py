"""What the cache fetches, keeps and gives up, against a fake that fills slots late and in any order."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from graphcore.errors import CheckpointError
from graphcore.streaming.experts.cache import ExpertCache
from graphcore.streaming.experts.slots import ExpertPool
from graphcore.streaming.read_ticket import ReadTicket
from graphcore.streaming.timeline import Timeline

LAYERS, EXPERTS = 3, 8


@dataclass
class LateFiller:
    """Fills a slot when it is waited for; until then the slot holds nothing.

    Attributes:
        memory: what each slot holds, by pool's first layer.
        log: what happened.
        failing: experts that cannot be read.
    """

    memory: dict[int, str] = field(default_factory=dict)
    log: list[tuple[str, str]] = field(default_factory=list)
    failing: set[str] = field(default_factory=set)
    jobs: dict[int, tuple[str, int]] = field(default_factory=dict)

    def begin(self, group: int, jobs: Sequence[tuple[str, int]], after: ReadTicket | None) -> ReadTicket:
        (job,) = jobs
        ticket = ReadTicket(group, after, 1, 1)
        self.jobs[id(ticket)] = job
        self.log.append(("begin", job[0]))
        self.memory[job[1]] = "nothing"
        return ticket

    def wait(self, ticket: ReadTicket) -> None:
        name, slot = self.jobs[id(ticket)]
        self.log.append(("wait", name))
        if name in self.failing:
            ticket.fault = CheckpointError(f"{name} cannot be read")
            raise ticket.fault
        ticket.left = ticket.unwritten = 0
        self.memory[slot] = name

    def cancel(self, tickets: Sequence[ReadTicket]) -> None:
        self.log.extend(("cancel", self.jobs[id(ticket)][0]) for ticket in tickets)


def cache_of(num_slots: int) -> tuple[ExpertCache, LateFiller]:
    filler = LateFiller()
    pool = ExpertPool(tuple(range(LAYERS)), num_slots, EXPERTS)
    groups = {layer: layer + 1 for layer in range(LAYERS)}
    cache = ExpertCache([pool], lambda layer, expert, slot: [(f"{layer}.{expert}", slot)], groups, filler, Timeline())
    return cache, filler


def use(cache: ExpertCache, filler: LateFiller, layer: int, experts: Sequence[int]) -> list[set[int]]:
    """Go through all waves and look into every place; return the waves."""
    waves = []
    for places in cache.waves(layer, experts):
        assert len(places) == EXPERTS
        here = {expert for expert, place in enumerate(places) if place >= 0}
        assert all(filler.memory[places[expert]] == f"{layer}.{expert}" for expert in here)
        waves.append(here)
    return waves


def begun(filler: LateFiller) -> list[str]:
    return [name for what, name in filler.log if what == "begin"]


def test_only_what_is_missing_is_read_and_all_of_it_at_once() -> None:
    cache, filler = cache_of(6)
    use(cache, filler, 0, [1, 2])
    use(cache, filler, 0, [2, 5, 7])
    assert filler.log[4:] == [("begin", "0.5"), ("begin", "0.7"), ("wait", "0.5"), ("wait", "0.7")]
    assert (cache.hits, cache.misses, cache.hit_rate) == (1, 4, 0.2)
    assert cache_of(6)[0].hit_rate is None


def test_the_coldest_of_all_layers_goes_first() -> None:
    cache, filler = cache_of(4)
    for _ in range(3):
        use(cache, filler, 0, [1])
        use(cache, filler, 1, [1])
    use(cache, filler, 0, [2])
    use(cache, filler, 1, [3])
    use(cache, filler, 2, [4])  # takes the slot of layer 0's expert 2, asked for before layer 1's expert 3
    del filler.log[:]
    use(cache, filler, 0, [1])
    use(cache, filler, 1, [1, 3])
    use(cache, filler, 2, [4])
    assert filler.log == []
    use(cache, filler, 0, [2])
    assert begun(filler) == ["0.2"]


def test_more_experts_than_slots_come_in_waves_those_that_are_there_first() -> None:
    cache, filler = cache_of(4)
    use(cache, filler, 1, [6, 7])
    waves = use(cache, filler, 1, [0, 1, 2, 6, 7])
    assert waves == [{6, 7}, {0, 1}, {2}]
    assert cache.hits == 2
    one, filler = cache_of(1)
    assert use(one, filler, 0, [3, 4, 5]) == [{3}, {4}, {5}]


def test_the_next_wave_is_begun_before_one_is_computed_with() -> None:
    cache, filler = cache_of(4)
    waves = cache.waves(0, [0, 1, 2, 3, 4])
    next(waves)
    assert begun(filler) == ["0.0", "0.1", "0.2", "0.3"]
    assert ("wait", "0.2") not in filler.log
    next(waves)
    assert begun(filler) == ["0.0", "0.1", "0.2", "0.3", "0.4"]


def test_no_expert_is_overwritten_while_it_is_in_use() -> None:
    """A thousand requests of random sizes; what is in use is looked at after the next wave's reads have begun, too."""
    rng = random.Random(1)
    for num_slots in (3, 4, 5, 9, 20):
        cache, filler = cache_of(num_slots)
        for _ in range(1000):
            layer, experts = rng.randrange(LAYERS), rng.sample(range(EXPERTS), rng.randint(0, EXPERTS))
            waves = use(cache, filler, layer, experts)
            assert sorted(expert for wave in waves for expert in wave) == sorted(experts)
            assert len(set(filler.memory)) <= num_slots
            if len(experts) <= num_slots:
                assert len(waves) == bool(experts)


def test_an_expert_that_cannot_be_read_is_one_error_and_is_read_again_when_asked_for_again() -> None:
    cache, filler = cache_of(4)
    filler.failing = {"0.3"}
    with pytest.raises(CheckpointError, match=r"0\.3"):
        use(cache, filler, 0, [2, 3, 4])
    assert [name for what, name in filler.log if what == "cancel"] == ["0.3", "0.4"]  # 2 had arrived
    filler.failing = set()
    del filler.log[:]
    assert use(cache, filler, 0, [2, 3, 4]) == [{2, 3, 4}]
    assert begun(filler) == ["0.3", "0.4"]
    assert use(cache, filler, 1, [0, 1, 2, 3]) == [{0, 1, 2, 3}]  # nothing is pinned, no slot is lost


@pytest.mark.parametrize("stop_after", [1, 2])
def test_whoever_stops_between_waves_leaves_nothing_pinned_and_nothing_being_read(stop_after: int) -> None:
    cache, filler = cache_of(4)

    def consume(waves: Iterator[list[int]]) -> None:
        for number, _ in enumerate(waves, start=1):
            if number == stop_after:
                raise KeyboardInterrupt

    waves = cache.waves(0, [0, 1, 2, 3, 4, 5])
    with pytest.raises(KeyboardInterrupt):
        consume(waves)
    waves.close()
    assert [name for what, name in filler.log if what == "cancel"] == [["0.2", "0.3"], ["0.4", "0.5"]][stop_after - 1]
    assert use(cache, filler, 1, [4, 5, 6, 7]) == [{4, 5, 6, 7}]


def test_waits_are_stalls_of_the_layer_s_group() -> None:
    cache, filler = cache_of(4)
    use(cache, filler, 2, [1])
    use(cache, filler, 2, [1])
    (stall,) = cache.timeline.events
    assert (stall.lane, stall.group) == ("stall", 3)
