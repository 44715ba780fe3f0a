"""A device that fails at any of its calls: one error that says so, no wrong bytes, no thread that waits for ever."""

import random

import pytest
import torch
from support.queues import SAYS, FailingQueues
from support.streaming import fill_threads
from test_copies import ROOM, Device, bytes_of, expanded_from, transfer_of

from graphcore.errors import StreamingError
from graphcore.streaming.device.copies import DeviceFiller, HostSlots
from graphcore.streaming.device.stream import DeviceLink
from graphcore.streaming.device.timing import DeviceWatch
from graphcore.streaming.moving_weights import MovingWeights
from graphcore.streaming.pinned_memory import Pins
from graphcore.streaming.policy import Ring
from graphcore.streaming.streamed import Streamed
from graphcore.streaming.thread_filler import ThreadFiller
from graphcore.streaming.timeline import Timeline
from graphcore.streaming.weight_stream import WeightStream
from graphcore.weights.plan import GroupPlan, Plan

pytestmark = pytest.mark.thorough

GROUPS = (1, 2, 3, 4, 5)


class Driver:
    """Locks anything."""

    def __init__(self) -> None:
        self.locked: list[int] = []

    def register(self, address: int, nbytes: int) -> str:
        self.locked.append(address)
        return ""

    def unregister(self, address: int) -> None:
        self.locked.remove(address)

    def device_address(self, address: int) -> int | None:
        return address


def open_device(queues: FailingQueues) -> tuple[Device, WeightStream, Driver]:
    """Return a device with two slots; groups 2 and 4 go through two host slots, the others lie in locked memory.

    Groups 3 and 4 are expanded on the device.
    """
    timeline, driver = Timeline(), Driver()
    held = {group: ~bytes_of(group) if group in (3, 4) else bytes_of(group) for group in GROUPS}
    memory = [torch.zeros(ROOM, dtype=torch.uint8) for _ in range(2)]
    slots = {group: memory[index % 2] for index, group in enumerate(GROUPS)}
    pins = Pins(driver)
    pins.add(held[group] for group in (1, 3, 5))
    ring = [[torch.zeros(ROOM, dtype=torch.uint8)] for _ in range(2)]
    filler = DeviceFiller(queues, timeline, HostSlots(ThreadFiller({}, 2, 0, 0, timeline, "read"), ring))
    work = {group: transfer_of(slots[group], held[group], group in (1, 3, 5)) for group in GROUPS}
    arrival = torch.zeros(ROOM, dtype=torch.uint8)
    work |= {group: expanded_from(work[group], arrival) for group in (3, 4)}
    policy = Streamed(Ring(work, 2, True, filler, DeviceWatch(queues, timeline)))
    moving = MovingWeights(Plan(GroupPlan((0, 0)), 0, "cuda:0"))
    stream = WeightStream(policy, timeline, moving, filler, link=DeviceLink(queues, pins))
    return Device(queues, policy, timeline, slots, []), stream, driver  # type: ignore[arg-type]


def calls_of_three_passes() -> int:
    """Return how many calls of the device three passes take."""
    queues = FailingQueues(random.Random(0))
    device, stream, _ = open_device(queues)
    before = queues.calls
    for group in GROUPS * 3:
        device.step(group)
    found = queues.calls - before
    stream.close()
    return found


@pytest.mark.parametrize("is_dead", [False, True])
def test_a_call_that_fails_is_one_error_and_what_comes_after_it_is_right_or_the_same_error(is_dead: bool) -> None:
    before = fill_threads()
    for number in range(1, calls_of_three_passes() + 1):
        queues = FailingQueues(random.Random(number), is_dead=is_dead)
        device, stream, driver = open_device(queues)
        queues.fails_at = queues.calls + number
        errors: list[StreamingError] = []
        for group in GROUPS * 4:
            try:
                device.step(group)
            except StreamingError as error:
                errors.append(error)
        assert errors
        assert all(SAYS in str(error) for error in errors)
        assert len(errors) == 1 or is_dead, errors
        if not is_dead:
            queues.run_dry()
        assert not device.wrong, device.wrong[0]
        stream.close()
        assert driver.locked == []
    assert fill_threads() == before


def test_a_copy_that_fails_names_its_group_and_what_to_do() -> None:
    queues = FailingQueues(random.Random(0))
    device, stream, _ = open_device(queues)
    copies = queues.copy

    def refuse(source: torch.Tensor, target: torch.Tensor) -> None:
        if source[0] == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nand so on")
        copies(source, target)

    queues.copy = refuse  # type: ignore[method-assign]
    with pytest.raises(StreamingError) as error:
        device.policy.acquire(1)
    words = "could not be moved to the device: CUDA out of memory. Tried to allocate; load the model again"
    assert str(error.value) == f"weights of group 1 {words}"
    assert isinstance(error.value.__cause__, torch.OutOfMemoryError)
    stream.close()
