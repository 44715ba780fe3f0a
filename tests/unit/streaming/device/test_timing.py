"""Times of what a device did: taken by the device, read when they are asked for."""

import random

from support.queues import SimulatedQueues
from test_copies import ROOM, device_of

from graphcore.streaming.device.timing import DeviceWatch, LateEvent
from graphcore.streaming.timeline import LATE_LIMIT, Event, Timeline


def test_every_copy_stall_and_computation_of_a_device_is_an_event() -> None:
    with device_of(random.Random(0), 3, 2, reads_ahead=True) as device:
        for group in (1, 2, 3):
            device.step(group)
        device.queues.run_dry()
        events = device.timeline.since(-1.0)
    counts = {lane: [event.group for event in events if event.lane == lane] for lane in ("copy", "stall", "compute")}
    assert counts == {"copy": [1, 2, 3, 1, 2], "stall": [1, 2, 3], "compute": [1, 2, 3]}
    assert [event.nbytes for event in events if event.lane == "copy"] == [ROOM - group for group in (1, 2, 3, 1, 2)]


def test_a_stall_is_the_device_s_and_ends_when_the_copy_does() -> None:
    with device_of(random.Random(0), 2, 1, reads_ahead=False) as device:
        device.step(1)
        device.queues.run_dry()
        copy, stall, compute = (
            next(event for event in device.timeline.since(-1.0) if event.lane == lane)
            for lane in ("copy", "stall", "compute")
        )
    assert stall.begin <= copy.begin < copy.end <= stall.end <= compute.begin < compute.end


def test_staged_bytes_are_read_and_then_copied_and_counted_in_both() -> None:
    with device_of(random.Random(0), 2, 1, reads_ahead=False, threads=2) as device:
        device.step(1)
        device.queues.run_dry()
        events = device.timeline.since(-1.0)
    for lane in ("copy", "read"):
        assert sum(event.nbytes for event in events if event.lane == lane) == ROOM - 1


def test_nothing_is_read_before_it_is_asked_for_or_over() -> None:
    queues, timeline = SimulatedQueues(random.Random(0)), Timeline()
    watch = DeviceWatch(queues, timeline)
    with queues.nothing_runs():
        watch.start("compute", 1).stop()
        watch.start("compute", 2)  # never stopped
        assert timeline.since(-1.0) == []
        queues.run_dry()
        assert list(timeline.events) == []
        assert [event.group for event in timeline.since(-1.0)] == [1]
        assert len(timeline.events) == len(timeline.since(-1.0))
    assert queues.num_host_waits == 0


def test_a_device_keeps_a_bounded_number_of_timers() -> None:
    class Over:
        is_over, seconds = True, 1.0

    timeline, mark = Timeline(), Over()
    for group in range(LATE_LIMIT + 10):
        timeline.add_late(LateEvent("copy", group, mark, mark, 8))  # type: ignore[arg-type]
    assert list(timeline.events) == [Event("copy", group, 1.0, 1.0, 8) for group in range(10)]
    assert len(timeline.since(0.0)) == LATE_LIMIT + 10
