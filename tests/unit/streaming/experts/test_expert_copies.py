"""Experts on their way to a simulated device: copies wait for the slots' readers, host slots for their copies."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from support.queues import SimulatedQueues
from torch import Tensor

from graphcore.errors import CheckpointError
from graphcore.streaming.device.copies import DeviceCopy, DeviceFiller, HostSlots, Transfer
from graphcore.streaming.experts.cache import ExpertCache
from graphcore.streaming.experts.slots import ExpertPool
from graphcore.streaming.fill_jobs import FillJob
from graphcore.streaming.thread_filler import ThreadFiller
from graphcore.streaming.timeline import Timeline

EXPERTS, NBYTES = 6, 10
NAMES = {expert: torch.full((NBYTES,), expert, dtype=torch.uint8) for expert in range(EXPERTS)}


@dataclass(frozen=True)
class WriteNumber:
    """A conversion that needs no file: an expert's number in every byte, or a fault."""

    expert: int
    out: Tensor
    weight: str = "experts"
    spans: tuple[()] = ()
    plain_place: None = None

    @property
    def nbytes(self) -> int:
        return self.out.nbytes

    def write(self, _parts: Sequence[Tensor], _threads: int | None) -> None:
        if self.expert < 0:
            raise CheckpointError("the file has changed")
        self.out.fill_(self.expert)


@dataclass
class Bench:
    """A cache of two slots on a simulated device, and what computing saw in them."""

    queues: SimulatedQueues
    cache: ExpertCache[Transfer, DeviceCopy]
    slots: Tensor
    seen: list[tuple[int, Tensor]] = field(default_factory=list)

    def use(self, experts: Sequence[int]) -> None:
        for places in self.cache.waves(0, experts):
            for expert, place in enumerate(places):
                if place >= 0:
                    self.queues.compute(lambda e=expert, p=place: self.seen.append((e, self.slots[p].clone())))


def bench(seed: int, is_held: bool, broken: set[int] | None = None) -> Bench:
    queues, timeline = SimulatedQueues(random.Random(seed)), Timeline()
    slots = torch.zeros(2, NBYTES, dtype=torch.uint8)

    def jobs(expert: int, outs: Sequence[Tensor]) -> list[FillJob]:
        number = -1 if expert in (broken or ()) else expert
        return [FillJob((), ((WriteNumber(number, outs[0]), ()),), NBYTES, 0)]

    def transfer(_layer: int, expert: int, slot: int) -> Transfer:
        if is_held:
            return Transfer([slots[slot]], [NAMES[expert]])
        return Transfer([slots[slot]], None, lambda host: jobs(expert, host))

    ring = [[torch.zeros(NBYTES, dtype=torch.uint8)] for _ in range(2)]
    host = None if is_held else HostSlots(ThreadFiller({}, 2, 0, 0, timeline), ring)
    cache = ExpertCache(
        [ExpertPool((0,), 2, EXPERTS)], transfer, {0: 1}, DeviceFiller(queues, timeline, host), timeline
    )
    return Bench(queues, cache, slots)


@pytest.mark.parametrize("is_held", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_what_computes_sees_the_expert_that_was_asked_for(is_held: bool, seed: int) -> None:
    one = bench(seed, is_held)
    asked: list[int] = []
    for _ in range(8):
        experts = random.Random(seed + len(asked)).sample(range(EXPERTS), 3)
        asked += experts
        one.use(experts)
    one.queues.run_dry()
    assert sorted(expert for expert, _ in one.seen) == sorted(asked)
    assert all(torch.equal(found, NAMES[expert]) for expert, found in one.seen)
    one.cache.filler.close()


def test_held_experts_are_copied_without_the_host_waiting() -> None:
    one = bench(0, is_held=True)
    with one.queues.nothing_runs():
        one.use([1, 4])
        one.use([2, 4])
        assert one.queues.num_host_waits == 0
    one.queues.run_dry()
    assert [(expert, int(found[0])) for expert, found in one.seen] == [(1, 1), (4, 4), (2, 2), (4, 4)]


def test_an_expert_that_cannot_be_read_is_forgotten_and_others_go_on() -> None:
    one = bench(3, is_held=False, broken={5})
    one.use([0, 1])
    with pytest.raises(CheckpointError, match="the file has changed"):
        one.use([5, 2])
    one.use([2, 3])
    one.queues.run_dry()
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
    one.queues.run_dry()
    assert one.cache.misses == misses + 1
    assert [(expert, int(found[0])) for expert, found in one.seen] == [(1, 1)]
