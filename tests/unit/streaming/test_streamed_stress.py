"""A thousand steps and more over a recording fake: random groups, delays, depths, slots, orders, faults and give-ups.

    acquire -> the slot holds that group's bytes, all of them written since the slot was last another's
    until release -> nobody writes to the slot, and its bytes stay

Delays are short turns of a loop, different in each read and each write, so that threads meet in ever new orders.
"""

import random
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from byte_conversions import ByteConversion, live_threads
from support.fake_sources import FakeSource, numbered_bytes
from torch import Tensor

from graphcore.checkpoint.file_bytes import FileSpan
from graphcore.errors import CheckpointError
from graphcore.streaming.fill_jobs import file_jobs
from graphcore.streaming.policy import Ring
from graphcore.streaming.streamed import Streamed
from graphcore.streaming.thread_filler import ThreadFiller
from graphcore.streaming.timeline import Timeline

NUM_WORLDS = 60
STEPS = 40  # of each: 2,400 in all
FILES = (Path("model-1.safetensors"), Path("model-2.safetensors"))
FILE_NBYTES = 300_000
BUFFER_NBYTES = 40_960


@dataclass
class Slots:
    """Memory that remembers who is in it.

    Attributes:
        used: slots that are between acquire and release.
        crimes: writes to such a slot.
    """

    memory: Tensor
    used: set[int] = field(default_factory=set)
    crimes: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def writing(self, slot: int, group: int) -> None:
        with self.lock:
            if slot in self.used:
                self.crimes.append(f"group {group} was written to slot {slot} while it was in use")


def turn(chance: random.Random, most: int) -> None:
    """Take a little time, mostly none."""
    for _ in range(chance.choice((0, 0, 0, most // 10, most))):
        pass


@dataclass
class World:
    """One random configuration."""

    seed: int

    def __post_init__(self) -> None:
        chance = self.chance = random.Random(self.seed)
        delays = random.Random(self.seed + 1)
        self.faults: set[int] = set()  # numbers of reads that fail
        self.reads = 0
        count_lock = threading.Lock()

        def on_read(offset: int, nbytes: int) -> None:
            with count_lock:
                self.reads += 1
                number = self.reads
            turn(delays, 3000)
            if number in self.faults:
                raise CheckpointError(f"read {number} fails")

        self.sources = {
            path: FakeSource(path, numbered_bytes(FILE_NBYTES, at), on_read) for at, path in enumerate(FILES)
        }
        num_groups = chance.randint(1, 7)
        self.num_slots = chance.randint(1, num_groups)
        self.reads_ahead = chance.random() < 0.8
        groups = sorted(chance.sample(range(1, 30), num_groups))
        self.spans = {group: self._spans() for group in groups}
        self.slot_of = {group: at % self.num_slots for at, group in enumerate(groups)}
        slot_nbytes = max(sum(span.nbytes for span in spans) for spans in self.spans.values())
        self.slots = Slots(torch.zeros(self.num_slots, slot_nbytes, dtype=torch.uint8))
        jobs = {group: file_jobs(self._conversions(group, delays)) for group in groups}
        large = max(job.room for each in jobs.values() for job in each)
        timeline = Timeline()
        self.filler = ThreadFiller(self.sources, chance.randint(1, 4), BUFFER_NBYTES, large, timeline)
        self.policy = Streamed(Ring(jobs, self.num_slots, self.reads_ahead, self.filler, timeline))

    def _spans(self) -> list[FileSpan]:
        """Return a few runs of bytes of random size at odd offsets, in either file; some too long for a buffer."""
        spans = []
        for _ in range(self.chance.randint(1, 6)):
            nbytes = self.chance.choice((1, 7, 500, 4096, 9_001, 60_000))
            spans.append(FileSpan(self.chance.choice(FILES), self.chance.randrange(FILE_NBYTES - nbytes), nbytes))
        return spans

    def _conversions(self, group: int, delays: random.Random) -> list[ByteConversion]:
        slot, at, conversions = self.slot_of[group], 0, []

        def on_write() -> None:
            self.slots.writing(slot, group)
            turn(delays, 2000)
            self.slots.writing(slot, group)

        for span in self.spans[group]:
            conversions.append(
                ByteConversion(str(group), (span,), self.slots.memory[slot][at : at + span.nbytes], on_write)
            )
            at += span.nbytes
        return conversions

    def holds(self, group: int) -> bool:
        """Return whether the group's slot has its bytes."""
        wanted = torch.cat([self.sources[span.file].content[span.offset : span.end] for span in self.spans[group]])
        return torch.equal(self.slots.memory[self.slot_of[group]][: len(wanted)], wanted)

    def use(self, group: int) -> None:
        """Do one step as the scheduler does, and look before and after."""
        self.policy.acquire(group)
        slot = self.slot_of[group]
        with self.slots.lock:
            self.slots.used.add(slot)
        try:
            assert self.holds(group), f"group {group} is not in slot {slot}"
            turn(self.chance, 20_000)
            assert self.holds(group), f"group {group} was overwritten in slot {slot}"
        finally:
            with self.slots.lock:
                self.slots.used.discard(slot)
        if self.chance.random() < 0.95:  # else an exception came between
            self.policy.release(group)


@pytest.mark.parametrize("seed", range(NUM_WORLDS))
def test_no_slot_is_read_before_its_copy_is_done_nor_overwritten_before_release(seed: int) -> None:
    world = World(seed)
    order = list(world.spans)
    position = failed = 0
    for _ in range(STEPS):
        position = (position + 1) % len(order) if world.chance.random() < 0.85 else world.chance.randrange(len(order))
        if world.chance.random() < 0.06:
            world.faults.add(world.reads + world.chance.randint(1, 4))
        try:
            world.use(order[position])
        except CheckpointError:
            failed += 1
        if world.chance.random() < 0.03:
            world.policy.reset()
    world.filler.close()
    assert world.slots.crimes == []
    assert failed < STEPS / 2, "most steps are to succeed"
    assert live_threads(world.filler) == []
