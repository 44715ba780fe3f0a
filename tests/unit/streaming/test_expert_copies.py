"""Experts on their way to a simulated device: copies wait for the slots' readers, host slots for their copies."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from simulated_lanes import SimulatedLanes
from torch import Tensor

from graphcore.errors import CheckpointError
from graphcore.streaming.expert_cache import ExpertCache
from graphcore.streaming.expert_copies import Copies, Copying, ExpertCopies
from graphcore.streaming.filler import Filler
from graphcore.streaming.jobs import Job
from graphcore.streaming.timeline import Timeline
from graphcore.weights.expert_pools import ExpertPool

EXPERTS, NBYTES = 6, 10
NAMES = {expert: torch.full((NBYTES,), expert, dtype=torch.uint8) for expert in range(EXPERTS)}


@dataclass(frozen=True)
class WritePiece:
    """A piece that needs no file: an expert's number in every byte, or a fault."""

    expert: int
    out: Tensor
    weight: str = "experts"
    spans: tuple[()] = ()
    plain_place: None = None

    def write(self, _parts: Sequence[Tensor], _threads: int | None) -> None:
        if self.expert < 0:
            raise CheckpointError("the file has changed")
        self.out.fill_(self.expert)


@dataclass
class Bench:
    """A cache of two slots on a simulated device, and what computing saw in them."""

    lanes: SimulatedLanes
    cache: ExpertCache[Copies, Copying]
    slots: Tensor
    seen: list[tuple[int, Tensor]] = field(default_factory=list)

    def use(self, experts: Sequence[int]) -> None:
        for places in self.cache.waves(0, experts):
            for expert, place in enumerate(places):
                if place >= 0:
                    self.lanes.compute(lambda e=expert, p=place: self.seen.append((e, self.slots[p].clone())))


def bench(seed: int, is_held: bool, broken: set[int] | None = None) -> Bench:
    lanes, timeline = SimulatedLanes(random.Random(seed)), Timeline()
    slots = torch.zeros(2, NBYTES, dtype=torch.uint8)

    def jobs(expert: int, outs: Sequence[Tensor]) -> list[Job]:
        number = -1 if expert in (broken or ()) else expert
        return [Job((), ((WritePiece(number, outs[0]), ()),), NBYTES, 0)]

    def copies(_layer: int, expert: int, slot: int) -> list[Copies]:
        if is_held:
            return [Copies([slots[slot]], [NAMES[expert]])]
        return [Copies([slots[slot]], None, lambda host: jobs(expert, host))]

    filler = None if is_held else Filler({}, 2, 0, 0, timeline)
    host = [[torch.zeros(NBYTES, dtype=torch.uint8)] for _ in range(2)]
    carrier = ExpertCopies(lanes, timeline, filler, host)
    cache = ExpertCache([ExpertPool((0,), 2, EXPERTS)], copies, {0: 1}, carrier, timeline)
    return Bench(lanes, cache, slots)


@pytest.mark.parametrize("is_held", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_what_computes_sees_the_expert_that_was_asked_for(is_held: bool, seed: int) -> None:
    one = bench(seed, is_held)
    asked: list[int] = []
    for _ in range(8):
        experts = random.Random(seed + len(asked)).sample(range(EXPERTS), 3)
        asked += experts
        one.use(experts)
    one.lanes.run_dry()
    assert sorted(expert for expert, _ in one.seen) == sorted(asked)
    assert all(torch.equal(found, NAMES[expert]) for expert, found in one.seen)
    one.cache.filler.close()


def test_held_experts_are_copied_without_the_host_waiting() -> None:
    one = bench(0, is_held=True)
    with one.lanes.nothing_runs():
        one.use([1, 4])
        one.use([2, 4])
        assert one.lanes.num_host_waits == 0
    one.lanes.run_dry()
    assert [(expert, int(found[0])) for expert, found in one.seen] == [(1, 1), (4, 4), (2, 2), (4, 4)]


def test_an_expert_that_cannot_be_read_is_forgotten_and_others_go_on() -> None:
    one = bench(3, is_held=False, broken={5})
    one.use([0, 1])
    with pytest.raises(CheckpointError, match="the file has changed"):
        one.use([5, 2])
    one.use([2, 3])
    one.lanes.run_dry()
    assert all(torch.equal(found, NAMES[expert]) for expert, found in one.seen)
    assert {expert for expert, _ in one.seen} == {0, 1, 2, 3}
    one.cache.filler.close()


def test_what_nobody_waited_for_is_brought_again() -> None:
    """A wave that was read ahead and never used: computing has not waited for its copies."""
    one = bench(4, is_held=True)
    waves = one.cache.waves(0, [0, 1, 2])
    next(waves)
    waves.close()
    misses = one.cache.misses
    one.use([1])
    one.lanes.run_dry()
    assert one.cache.misses == misses + 1
    assert [(expert, int(found[0])) for expert, found in one.seen] == [(1, 1)]
