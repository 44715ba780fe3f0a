"""Devices whose queues run late, fail or go at a test's pace."""

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from graphcore import Engine
from graphcore.engine.output import TokenEvent
from graphcore.engine.request_handle import RequestHandle
from graphcore.streaming.device.queues import QueueName

# A device with two queues that runs what is enqueued late, in any order that marks allow, and copies in two halves.
#
# Which queue goes next is drawn at random, at every call of the host and whenever the host waits, so that over many
# runs all kinds of legal interleavings of the two queues and the host come up. A copy that reads or writes too early or
# too late leaves wrong bytes behind.

WRONG = 0xEE  # what a slot holds while a copy into it is under way
Operation = Callable[[], bool]  # whether it was done; if not, it is tried again


@dataclass(eq=False)
class SimulatedMark:
    queues: "SimulatedQueues"
    ended: float = 0.0
    is_done: bool = False
    is_timed: bool = True

    @property
    def seconds(self) -> float:
        assert self.is_timed, "a mark that only orders was asked for the time"
        assert self.is_done, "a mark was asked for the time before it was over"
        return self.ended

    @property
    def is_over(self) -> bool:
        with self.queues.lock:
            return self.is_done

    def hold(self, queue: QueueName) -> None:
        if queue == "compute" and self.queues.computes_at_once:
            self.wait()
            return
        self.queues.enqueue(queue, lambda: self.is_done)

    def wait(self) -> None:
        with self.queues.lock:
            self.queues.num_host_waits += 1
            while not self.is_done:
                assert self.queues.advance(), "the host waits for a mark that can never be over"


@dataclass
class SimulatedQueues:
    """Queues of RAM.

    Attributes:
        computes_at_once: what computes is the host itself, so that holding the compute queue makes the host wait.
        num_host_waits: times that the host waited for the device.
    """

    random: random.Random
    computes_at_once: bool = False
    num_host_waits: int = 0
    now: float = 0.0
    copied: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)
    queues: dict[QueueName, deque[Operation]] = field(default_factory=lambda: {"copy": deque(), "compute": deque()})
    mark_type: ClassVar[type[SimulatedMark]] = SimulatedMark

    def mark(self, queue: QueueName, is_timed: bool = True) -> SimulatedMark:
        mark = self.mark_type(self, is_timed=is_timed)

        def end() -> bool:
            mark.is_done, mark.ended = True, self.now
            return True

        if queue == "compute" and self.computes_at_once:
            end()
        else:
            self.enqueue(queue, end)
        return mark

    def copy(self, source: Tensor, target: Tensor) -> None:
        assert source.nbytes == target.nbytes
        half = source.nbytes // 2

        def begin() -> bool:
            target.fill_(WRONG)
            target[:half].copy_(source[:half])
            return True

        def end() -> bool:
            target[half:].copy_(source[half:])
            self.copied.append((source, target))
            return True

        self.enqueue("copy", begin)
        self.enqueue("copy", end)

    def run(self, work: Callable[[], None], target: Tensor) -> None:
        def begin() -> bool:
            target.fill_(WRONG)
            return True

        def end() -> bool:
            work()
            return True

        self.enqueue("copy", begin)
        self.enqueue("copy", end)

    def compute(self, *parts: Callable[[], None]) -> None:
        """Enqueue something that reads slots, in parts between which the other queue may go on."""
        for part in parts:
            self.enqueue("compute", lambda part=part: part() is None)

    def enqueue(self, queue: QueueName, operation: Operation) -> None:
        with self.lock:
            self.queues[queue].append(operation)
            for _ in range(self.random.choice((0, 0, 1, 3, 9))):
                self.advance()

    def advance(self) -> bool:
        """Do one operation of a queue drawn at random; return whether any could be done."""
        names: list[QueueName] = ["copy", "compute"]
        self.random.shuffle(names)
        self.now += 1.0
        with torch.inference_mode():  # on whatever thread this is
            for name in names:
                queue = self.queues[name]
                if queue and queue[0]():
                    queue.popleft()
                    return True
        return False

    def run_dry(self) -> None:
        """Do everything that has been enqueued."""
        with self.lock:
            while any(self.queues.values()):
                assert self.advance(), "the queues wait for each other"

    @contextmanager
    def nothing_runs(self) -> Iterator[None]:
        """Have the device do nothing of itself inside the block."""
        drawn, self.random = self.random, _Idle()
        try:
            yield
        finally:
            self.random = drawn


class _Idle(random.Random):
    def choice(self, seq: object) -> object:  # type: ignore[override]
        return 0


def simulated(seed: int) -> SimulatedQueues:
    return SimulatedQueues(random.Random(seed), computes_at_once=True)


# A simulated device that fails at some call, once or from then on.

SAYS = "CUDA error: an illegal memory access was encountered"


@dataclass(eq=False)
class FailingMark(SimulatedMark):
    def hold(self, queue: QueueName) -> None:
        self._count()
        super().hold(queue)

    def wait(self) -> None:
        self._count()
        super().wait()

    def _count(self) -> None:
        assert isinstance(self.queues, FailingQueues)
        self.queues.count()


@dataclass
class FailingQueues(SimulatedQueues):
    """Queues that raise.

    Attributes:
        fails_at: the call that fails, from now on; 0 is none.
        is_dead: every call after that fails too.
    """

    fails_at: int = 0
    is_dead: bool = False
    calls: int = 0
    mark_type: ClassVar[type[SimulatedMark]] = FailingMark

    def mark(self, queue: QueueName, is_timed: bool = True) -> SimulatedMark:
        self.count()
        return super().mark(queue, is_timed)

    def copy(self, source: Tensor, target: Tensor) -> None:
        self.count()
        super().copy(source, target)

    def run(self, work: Callable[[], None], target: Tensor) -> None:
        self.count()
        super().run(work, target)

    def count(self) -> None:
        """Count a call, and fail if it is its turn."""
        with self.lock:
            self.calls += 1
            if self.fails_at and (self.calls == self.fails_at or (self.is_dead and self.calls > self.fails_at)):
                raise RuntimeError(f"{SAYS}\nCUDA kernel errors might be asynchronously reported")


# A stream whose tokens are computed one by one, when they are asked for: without it the engine runs ahead.

SECONDS = 60.0


class Paced(Iterator[TokenEvent]):
    """The events of one request, which computes its next token at `next`.

    Args:
        engine: engine whose thread is held back after each pass from the request's first token on, whichever request
            it was for, until `close`. An earlier request's last pass may still be ending.
        arguments, settings: those of `Engine.submit`.
    """

    def __init__(self, engine: Engine, *arguments: object, **settings: object) -> None:
        self._engine, self._before = engine, engine._on_progress
        self._passes, self._is_free, self._at = threading.Semaphore(0), False, 0
        with engine.holding_back():
            self.handle: RequestHandle = engine.submit(*arguments, **settings)  # type: ignore[arg-type]
            engine._on_progress = self._hold

    def __next__(self) -> TokenEvent:
        if self._at:
            self._passes.release()
        try:
            event = self.handle.event(self._at)
        except BaseException:
            self.let_go()
            raise
        if event is None:
            self.close()
            raise StopIteration
        self._at += 1
        return event

    def close(self) -> None:
        """Cancel the request and let the engine run freely again."""
        self.handle.cancel()
        self.let_go()

    def close_engine(self) -> None:
        """Close the engine, in a pass of this request."""
        closing = threading.Thread(target=self._engine.close)
        closing.start()
        while not self._engine._queue.is_closed:
            continue
        self.let_go()
        closing.join(SECONDS)
        assert not closing.is_alive()

    def let_go(self) -> None:
        """Let the engine run freely again."""
        self._is_free = True
        self._passes.release()
        self._engine._on_progress = self._before

    def _hold(self, stage: str, group: int | None, done: int, total: int) -> None:
        self._before(stage, group, done, total)
        has_begun = self.handle._output.is_ready(0)
        if stage == "generate" and group is None and has_begun and not self._is_free:
            assert self._passes.acquire(timeout=SECONDS), "nobody asked for the next token"
