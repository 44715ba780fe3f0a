"""A device that fails at any of its calls: one error that says so, no wrong bytes, no thread that waits for ever."""

import random
import threading

import pytest
import torch
from failing_lanes import SAYS, FailingLanes
from test_device_copy import ROOM, Device, bytes_of, jobs_of

from graphcore.engine.device_stream import DeviceLink
from graphcore.engine.weight_stream import WeightStream
from graphcore.errors import StreamingError
from graphcore.streaming.device_copy import DeviceCopy
from graphcore.streaming.device_watch import DeviceWatch
from graphcore.streaming.filler import Filler
from graphcore.streaming.pinning import Pins
from graphcore.streaming.staging import Held, Partly, Staged
from graphcore.streaming.streamed import Streamed
from graphcore.streaming.timeline import Timeline

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


def open_device(lanes: FailingLanes) -> tuple[Device, WeightStream, Driver]:
    """Return a device with two slots; groups 2 and 4 go through two host slots, the others lie in locked memory."""
    timeline, driver = Timeline(), Driver()
    held = {group: bytes_of(group) for group in GROUPS}
    memory = [torch.zeros(ROOM, dtype=torch.uint8) for _ in range(2)]
    slots = {group: memory[index % 2] for index, group in enumerate(GROUPS)}
    host = {group: torch.zeros(ROOM - group, dtype=torch.uint8) for group in (2, 4)}
    pins = Pins(driver)
    pins.add(held[group] for group in (1, 3, 5))
    filler = Filler({}, 2, 0, 0, timeline, "read")
    staged = Staged({group: jobs_of(held[group], host[group]) for group in (2, 4)}, host, 2, filler)
    store = Partly(Held({group: held[group] for group in (1, 3, 5)}), staged)
    policy = Streamed(slots, 2, True, DeviceCopy(lanes, store, timeline), DeviceWatch(lanes, timeline))
    stream = WeightStream(policy, timeline, filler, link=DeviceLink(lanes, pins))
    return Device(lanes, policy, timeline, slots, []), stream, driver  # type: ignore[arg-type]


def calls_of_three_passes() -> int:
    """Return how many calls of the device three passes take."""
    lanes = FailingLanes(random.Random(0))
    device, stream, _ = open_device(lanes)
    before = lanes.calls
    for group in GROUPS * 3:
        device.step(group)
    found = lanes.calls - before
    stream.close()
    return found


@pytest.mark.parametrize("is_dead", [False, True])
def test_a_call_that_fails_is_one_error_and_what_comes_after_it_is_right_or_the_same_error(is_dead: bool) -> None:
    for number in range(1, calls_of_three_passes() + 1):
        lanes = FailingLanes(random.Random(number), is_dead=is_dead)
        device, stream, driver = open_device(lanes)
        lanes.fails_at = lanes.calls + number
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
            lanes.run_dry()
        assert not device.wrong, device.wrong[0]
        stream.close()
        assert driver.locked == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("graphcore-fill")]


def test_a_copy_that_fails_names_its_group_and_what_to_do() -> None:
    lanes = FailingLanes(random.Random(0))
    device, stream, _ = open_device(lanes)
    copies = lanes.copy

    def refuse(source: torch.Tensor, target: torch.Tensor) -> None:
        if source[0] == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nand so on")
        copies(source, target)

    lanes.copy = refuse  # type: ignore[method-assign]
    with pytest.raises(StreamingError) as error:
        device.policy.acquire(3)
    words = "could not be moved to the device: CUDA out of memory. Tried to allocate; load the model again"
    assert str(error.value) == f"weights of group 3 {words}"
    assert isinstance(error.value.__cause__, torch.OutOfMemoryError)
    stream.close()
