"""What is asked of torch.cuda, which is replaced: which stream records, waits and copies. No GPU is proved by this."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from graphcore.streaming.device.queues import HOP_SECONDS, CudaClock, CudaMark, CudaQueues, Queues

CPU = torch.device("cpu")
LOG: list[str] = []


class Stream:
    def __init__(self, name: object, priority: int = 0) -> None:
        assert (priority == -1) == (name == CPU), "the copy stream is not one of those that anybody else is dealt"
        self.name = "copy" if name == CPU else name

    def wait_event(self, event: "Event") -> None:
        LOG.append(f"{self.name} waits for {event.name}")


class Event:
    count = 0

    def __init__(self, enable_timing: bool = False, milliseconds: float = 0.0, blocking: bool = False) -> None:
        self.is_timed, self.is_recorded, self.sleeps = enable_timing, False, blocking
        Event.count += 1
        self.name, self.milliseconds = f"event {Event.count}", milliseconds

    def record(self, stream: Stream) -> None:
        assert not self.is_recorded, "events are used once"
        self.is_recorded = True
        LOG.append(f"{stream.name} records {self.name}")

    def synchronize(self) -> None:
        LOG.append(f"host waits for {self.name}")

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "Event") -> float:
        assert self.is_timed, "as torch checks it"
        assert other.is_timed, "as torch checks it"
        return other.milliseconds - self.milliseconds


@pytest.fixture
def queues(monkeypatch: pytest.MonkeyPatch) -> CudaQueues:
    @contextmanager
    def current(stream: Stream) -> Iterator[None]:
        LOG.append(f"on {stream.name}:")
        yield
        LOG.append("end")

    Event.count = 0
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("current"))
    LOG.clear()
    return CudaQueues(CPU)


def test_marks_are_events_and_holding_is_a_stream_s_wait(queues: CudaQueues) -> None:
    proved: Queues = queues
    LOG.clear()
    proved.mark("copy").hold("compute")
    proved.mark("compute").hold("copy")
    assert LOG == [
        "copy records event 2",
        "current waits for event 2",
        "current records event 3",
        "copy waits for event 3",
    ]


def test_only_waiting_for_a_mark_makes_the_host_wait(queues: CudaQueues) -> None:
    LOG.clear()
    mark = queues.mark("copy")
    assert mark.is_over
    assert LOG == ["copy records event 2"]
    mark.wait()
    assert LOG[-1] == "host waits for event 2"


def test_a_mark_that_only_orders_keeps_no_time(queues: CudaQueues) -> None:
    untimed, timed = queues.mark("compute", is_timed=False), queues.mark("copy")
    assert isinstance(untimed, CudaMark)
    assert isinstance(timed, CudaMark)
    assert untimed.event.sleeps, "a thread that waits for a copy would take a core"  # type: ignore[attr-defined]
    assert not untimed.event.is_timed  # type: ignore[attr-defined]
    assert timed.seconds == pytest.approx(queues.clock.seconds)


def test_a_copy_is_enqueued_on_the_copy_stream_which_the_allocator_hears_of(queues: CudaQueues) -> None:
    class Target:
        def copy_(self, source: object, non_blocking: bool) -> None:
            LOG.append(f"copy {source} non_blocking={non_blocking}")

        def record_stream(self, stream: Stream) -> None:
            LOG.append(f"{stream.name} is recorded")

    LOG.clear()
    queues.copy("bytes", Target())  # type: ignore[arg-type]
    assert LOG == ["on copy:", "copy bytes non_blocking=True", "end", "copy is recorded"]


def test_work_is_enqueued_on_the_copy_stream_and_the_allocator_hears_of_what_it_writes(queues: CudaQueues) -> None:
    class Target:
        def record_stream(self, stream: Stream) -> None:
            LOG.append(f"{stream.name} is recorded")

    LOG.clear()
    queues.run(lambda: LOG.append("kernels"), Target())  # type: ignore[arg-type]
    assert LOG == ["on copy:", "kernels", "end", "copy is recorded"]


def test_the_device_s_milliseconds_become_the_host_s_seconds_over_hours() -> None:
    clock = CudaClock(Event(True), 100.0)  # type: ignore[arg-type]
    for milliseconds in (0.0, 1500.0, 9e3, 2e4, 2.1e4, 1.9e4, 3.6e6, 3.6e6 + 0.25):
        assert clock.at(Event(True, milliseconds)) == pytest.approx(100 + milliseconds / 1e3, abs=1e-9)  # type: ignore[arg-type]
    assert clock.seconds > 100 + HOP_SECONDS  # no time is measured over more than it has to be
