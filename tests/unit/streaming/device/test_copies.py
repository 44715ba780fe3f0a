"""Groups on their way to a device, in any order: no slot is read before it is full or overwritten before it is free."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
import torch
from support.queues import SimulatedQueues
from torch import Tensor

from graphcore.errors import StreamingError
from graphcore.graph.gpu.partition import cut
from graphcore.graph.program import Program
from graphcore.streaming.device.copies import DeviceCopy, DeviceFiller, Expansion, HostSlots, Transfer
from graphcore.streaming.device.timing import DeviceWatch
from graphcore.streaming.fill_jobs import ByteCopy, FillJob
from graphcore.streaming.policy import Ring
from graphcore.streaming.scheduler import run_program
from graphcore.streaming.streamed import Streamed
from graphcore.streaming.thread_filler import ThreadFiller
from graphcore.streaming.timeline import Timeline

pytestmark = pytest.mark.thorough

MANY = 1000  # steps
ROOM = 64  # bytes of a slot


def bytes_of(group: int) -> Tensor:
    """Return bytes that only this group has, of its own length."""
    return torch.full((ROOM - group,), group, dtype=torch.uint8)


@dataclass(repr=False)  # pytest would print all of it
class Device:
    """A policy over a simulated device, and what its compute queue found in the slots."""

    queues: SimulatedQueues
    policy: Streamed[Transfer, DeviceCopy]
    timeline: Timeline
    slots: dict[int, Tensor]
    wrong: list[str]

    def step(self, group: int, parts: int = 3) -> None:
        """Compute with a group, looking at its slot several times."""
        self.policy.acquire(group)
        self.queues.compute(*[lambda: self.look(group)] * parts)
        self.policy.release(group)

    def look(self, group: int) -> None:
        expected = bytes_of(group)
        if not torch.equal(self.slots[group][: len(expected)], expected):
            self.wrong.append(f"group {group} found {self.slots[group].tolist()}")


@contextmanager
def device_of(
    draw: random.Random,
    groups: int,
    num_slots: int,
    reads_ahead: bool,
    threads: int = 0,
    num_held: int = 0,
    num_expanded: int = 0,
) -> Iterator[Device]:
    """Return a device whose groups are 1 .. `groups`.

    Args:
        threads: that stage the bytes in a ring of 2 or 3 host slots; 0 copies from where they lie.
        num_held: groups, drawn at random, that are copied from where they lie all the same.
        num_expanded: groups, drawn at random, that arrive in a buffer, and are not in it what they are in their slot.
    """
    queues, timeline = SimulatedQueues(draw), Timeline()
    memory = [torch.zeros(ROOM, dtype=torch.uint8) for _ in range(num_slots)]
    slots = {group: memory[index % num_slots] for index, group in enumerate(range(1, groups + 1))}
    expanded = draw.sample(list(slots), num_expanded)
    held = {group: ~bytes_of(group) if group in expanded else bytes_of(group) for group in slots}
    host, stays = None, set(slots)
    if threads:
        ring = [[torch.zeros(ROOM, dtype=torch.uint8)] for _ in range(draw.choice((2, 3)))]
        stays = set(draw.sample(list(slots), num_held))
        host = HostSlots(ThreadFiller({}, threads, 0, 0, timeline, "read"), ring)
    work = {group: transfer_of(slots[group], held[group], group in stays) for group in slots}
    arrival = torch.zeros(ROOM, dtype=torch.uint8)
    work |= {group: expanded_from(work[group], arrival) for group in expanded}
    filler = DeviceFiller(queues, timeline, host)
    policy = Streamed(Ring(work, num_slots, reads_ahead, filler, DeviceWatch(queues, timeline)))
    try:
        yield Device(queues, policy, timeline, slots, [])
    finally:
        filler.close()


def transfer_of(slot: Tensor, source: Tensor, is_held: bool = True) -> Transfer:
    """Return what brings a group's bytes into its slot, from where they lie or by way of a host slot."""
    targets = [slot[: len(source)]]
    return Transfer(targets, [source]) if is_held else Transfer(targets, None, lambda host: jobs_of(source, host[0]))


def expanded_from(work: Transfer, arrival: Tensor) -> Transfer:
    """Return a transfer whose bytes arrive in a buffer, from where their complement is written into the slot."""
    (slot,) = work.targets
    arrived = arrival[: len(slot)]

    def run() -> None:
        slot.copy_(~arrived)

    return replace(work, targets=[arrived], expansion=Expansion(run, slot))


def jobs_of(source: Tensor, target: Tensor) -> list[FillJob]:
    """Return two jobs, so that a host slot is filled by two threads."""
    half = len(source) // 2
    parts = [(source[:half], target[:half]), (source[half:], target[half:])]
    return [FillJob((), ((ByteCopy("weight", part, place), ()),), part.nbytes, 0) for part, place in parts]


def orders(draw: random.Random, groups: int, steps: int) -> Iterator[int]:
    """Yield groups in the ring's order, which now and then jumps, repeats or turns around."""
    at = 0
    for _ in range(steps):
        yield at % groups + 1
        at += draw.choice((1, 1, 1, 1, 1, 1, 1, 0, 2, -1, draw.randrange(groups)))


@pytest.mark.parametrize("threads", [0, 1, 3])
@pytest.mark.parametrize("reads_ahead", [True, False])
@pytest.mark.parametrize("is_partly_held", [False, True])
@pytest.mark.parametrize("are_some_expanded", [False, True])
def test_a_thousand_random_steps_read_what_they_should(
    threads: int, reads_ahead: bool, is_partly_held: bool, are_some_expanded: bool
) -> None:
    """Up to six slots, deeper than the ring of host slots; stores of which a part could be locked; one buffer."""
    for seed in range(3):
        draw = random.Random(seed)
        groups, num_slots = draw.randint(1, 9), draw.randint(1, 6)
        num_held = draw.randint(0, groups - 1) if is_partly_held else 0
        num_expanded = draw.randint(1, groups) if are_some_expanded else 0
        with device_of(draw, groups, num_slots, reads_ahead, threads, num_held, num_expanded) as device:
            for group in orders(draw, groups, MANY // 10):
                device.step(group)
            device.queues.run_dry()
        assert not device.wrong, device.wrong[0]


@pytest.mark.parametrize("threads", [0, 2])
def test_what_an_exception_leaves_behind_does_not_reach_the_next_step(threads: int) -> None:
    """The group was acquired, something of it was enqueued, and it was never released."""
    for seed in range(20):
        draw = random.Random(seed)
        groups = draw.randint(1, 6)
        with device_of(draw, groups, draw.randint(1, 3), True, threads, 0, draw.randint(0, groups)) as device:
            for group in orders(draw, groups, 50):
                if draw.random() < 0.2:
                    device.policy.acquire(group)
                    device.queues.compute(*[lambda device=device, group=group: device.look(group)] * 2)
                if draw.random() < 0.05:
                    device.policy.reset()
                device.step(group)
            device.queues.run_dry()
        assert not device.wrong, device.wrong[0]


def test_the_host_never_waits_for_the_device_in_the_ring_s_order() -> None:
    with device_of(random.Random(0), 5, 2, reads_ahead=True) as device:
        for group in [1, 2, 3, 4, 5] * 20:
            device.step(group)
        assert device.queues.num_host_waits == 0
        device.queues.run_dry()


def test_the_next_group_is_copied_while_one_computes_and_the_one_after_it_is_not() -> None:
    """Two slots: group 2 comes while group 1 computes, and group 3 when group 1's slot is free."""
    with device_of(random.Random(0), 4, 2, reads_ahead=True) as device, device.queues.nothing_runs():
        device.policy.acquire(1)
        device.queues.run_dry()
        assert [source[0].item() for source, _ in device.queues.copied] == [1, 2]
        device.policy.release(1)
        device.queues.run_dry()
        assert [source[0].item() for source, _ in device.queues.copied] == [1, 2, 3]


def test_the_next_token_s_first_groups_are_copied_during_this_one_s_tail() -> None:
    with device_of(random.Random(0), 3, 2, reads_ahead=True) as device:
        for group in (1, 2, 3):
            device.step(group)
        device.queues.run_dry()
    assert [source[0].item() for source, _ in device.queues.copied] == [1, 2, 3, 1, 2]


def test_one_copy_moves_a_group_once_for_each_token() -> None:
    with device_of(random.Random(0), 4, 2, reads_ahead=True) as device:
        for group in [1, 2, 3, 4] * 5:
            device.step(group)
        device.queues.run_dry()
    assert len(device.queues.copied) == 20 + 2


def test_synchronous_mode_copies_nothing_that_was_not_asked_for() -> None:
    with device_of(random.Random(0), 3, 1, reads_ahead=False) as device:
        for group in (1, 2, 3, 1):
            device.step(group)
        device.queues.run_dry()
    assert [source[0].item() for source, _ in device.queues.copied] == [1, 2, 3, 1]


def test_slots_that_had_another_use_are_not_written_to_before_it_ends() -> None:
    for seed in range(20):
        queues = SimulatedQueues(random.Random(seed))
        slot, seen = torch.zeros(ROOM, dtype=torch.uint8), []
        with queues.nothing_runs():
            queues.compute(lambda seen=seen, slot=slot: seen.append(slot[0].item()))
            filler = DeviceFiller(queues, Timeline())
            filler.wait(filler.begin(1, transfer_of(slot, bytes_of(1)), None))
        queues.run_dry()
        assert seen == [0]
        assert slot[0].item() == 1


class Broken(ByteCopy):
    def write(self, parts: object, threads: object) -> None:
        raise OSError("the disk is gone")


def test_a_fault_of_a_thread_is_raised_where_its_group_is_asked_for_and_others_still_come() -> None:
    queues, timeline = SimulatedQueues(random.Random(0)), Timeline()
    slots = {group: torch.zeros(ROOM, dtype=torch.uint8) for group in (1, 2)}
    host = HostSlots(ThreadFiller({}, 2, 0, 0, timeline), [[torch.zeros(ROOM, dtype=torch.uint8)] for _ in range(2)])
    work = {
        1: transfer_of(slots[1], bytes_of(1), is_held=False),
        2: Transfer([slots[2]], None, lambda raw: [FillJob((), ((Broken("weight", bytes_of(2), raw[0]), ()),), 1, 0)]),
    }
    filler = DeviceFiller(queues, timeline, host)
    policy = Streamed(Ring(work, 2, True, filler, DeviceWatch(queues, timeline)))
    for _ in range(3):
        policy.acquire(1)
        policy.release(1)
        with pytest.raises(StreamingError, match="the disk is gone"):
            policy.acquire(2)
    policy.acquire(1)
    queues.run_dry()
    assert torch.equal(slots[1][: ROOM - 1], bytes_of(1))
    filler.close()


@dataclass(frozen=True)
class Gated(ByteCopy):
    """A conversion that is not written before a gate opens."""

    gate: threading.Event = field(default_factory=threading.Event)

    def write(self, parts: object, threads: object) -> None:
        assert self.gate.wait(10), "nobody opened the gate"


def test_a_host_slot_waits_for_its_copy_when_the_filling_between_was_given_up_before_it_began() -> None:
    """Group 1 is still being copied from the host slot, group 2 never got a thread, group 3 comes next."""
    queues, timeline = SimulatedQueues(random.Random(0)), Timeline()
    raw, target = torch.zeros(ROOM, dtype=torch.uint8), torch.zeros(ROOM, dtype=torch.uint8)
    work = {group: transfer_of(target, bytes_of(group), is_held=False) for group in (1, 2, 3)}
    threads = ThreadFiller({}, 1, 0, 0, timeline)
    host = HostSlots(threads, [[raw]])
    filler = DeviceFiller(queues, timeline, host)
    busy = Gated("weight", raw, raw)
    with queues.nothing_runs():
        filler.wait(filler.begin(1, work[1], None))
        threads.begin(9, [FillJob((), ((busy, ()),), 0, 0)], None)
        threads.cancel([host.begin(2, work[2])[0]])
        ticket, _ = host.begin(3, work[3])
        busy.gate.set()
        threads.wait(ticket)
    queues.run_dry()
    filler.close()
    assert torch.equal(target[: ROOM - 1], bytes_of(1))


@dataclass
class Recorded:
    """A step of a decode program that is captured at its first replay: run twice before, and replayed from then on."""

    group: int
    device: Device
    is_streamed: bool
    is_captured: bool = False

    def replay(self) -> None:
        runs = 1 if self.is_captured else 3
        self.is_captured = True
        if self.is_streamed:
            self.device.queues.compute(*[lambda: self.device.look(self.group)] * runs)
        else:
            self.device.queues.compute(*[lambda: None] * runs)


@pytest.mark.parametrize("threads", [0, 2])
def test_captured_pieces_find_their_weights_in_any_order_of_the_queues(threads: int) -> None:
    """Streamed groups between resident ones, as auto lays them, cut into pieces, for many tokens; deeper rings too."""
    for seed in range(20):
        draw = random.Random(seed)
        num_groups, num_slots = draw.randint(2, 12), draw.randint(1, 5)
        streamed = sorted(draw.sample(range(1, num_groups + 1), draw.randint(1, num_groups)))
        num_held = draw.randint(0, len(streamed) - 1)
        with device_of(draw, len(streamed), min(num_slots, len(streamed)), True, threads, num_held) as device:
            place = {group: number for number, group in enumerate(streamed, start=1)}
            steps = [Recorded(place.get(group, -group), device, group in place) for group in range(num_groups + 2)]
            pieces = cut(steps, set(place.values()))
            assert len(pieces) > len(streamed)
            for _ in range(15):
                run_program(Program(None, pieces), device.policy)  # type: ignore[arg-type]
            assert threads or device.queues.num_host_waits == 0
            device.queues.run_dry()
        assert not device.wrong, device.wrong[0]


def test_a_slot_whose_filling_was_given_up_is_filled_again() -> None:
    with device_of(random.Random(1), groups=3, num_slots=2, reads_ahead=True) as device:
        filler, work = device.policy.ring.filler, device.policy.ring.work[1]
        given_up = filler.begin(1, work, None)
        filler.cancel([given_up])
        again = filler.begin(1, work, given_up)
        filler.wait(again)
        assert again.is_full
