"""A simulated device that fails at some call, once or from then on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from simulated_queues import SimulatedMark, SimulatedQueues
from torch import Tensor

from graphcore.streaming.device.queues import QueueName

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
