"""A simulated device that fails at some call, once or from then on."""

from dataclasses import dataclass
from typing import ClassVar

from simulated_lanes import SimulatedLanes, SimulatedMark
from torch import Tensor

from graphcore.streaming.lanes import LaneName

SAYS = "CUDA error: an illegal memory access was encountered"


@dataclass(eq=False)
class FailingMark(SimulatedMark):
    def hold(self, lane: LaneName) -> None:
        self._count()
        super().hold(lane)

    def wait(self) -> None:
        self._count()
        super().wait()

    def _count(self) -> None:
        assert isinstance(self.lanes, FailingLanes)
        self.lanes.count()


@dataclass
class FailingLanes(SimulatedLanes):
    """Lanes that raise.

    Attributes:
        fails_at: the call that fails, from now on; 0 is none.
        is_dead: every call after that fails too.
    """

    fails_at: int = 0
    is_dead: bool = False
    calls: int = 0
    mark_type: ClassVar[type[SimulatedMark]] = FailingMark

    def mark(self, lane: LaneName, is_timed: bool = True) -> SimulatedMark:
        self.count()
        return super().mark(lane, is_timed)

    def copy(self, source: Tensor, target: Tensor) -> None:
        self.count()
        super().copy(source, target)

    def count(self) -> None:
        """Count a call, and fail if it is its turn."""
        with self.lock:
            self.calls += 1
            if self.fails_at and (self.calls == self.fails_at or (self.is_dead and self.calls > self.fails_at)):
                raise RuntimeError(f"{SAYS}\nCUDA kernel errors might be asynchronously reported")
