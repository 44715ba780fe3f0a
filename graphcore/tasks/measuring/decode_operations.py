"""Operations of a decode step, native or torch's, and the clock that times them.

warm       the same operation again and again: its weights lie in a cache, if they fit
in order   each operation once, one after the other as a step has them: weights come from memory, as in a step
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from graphcore.tasks.measuring.timed_runs import synchronize

WARM_TIMES = 16  # runs between two readings of the clock
UNTIMED_PASSES = 2


class OperationName(NamedTuple):
    """The name of an operation; operations of one name are timed as one.

    Attributes:
        shape: sizes in words.
        format: format of the weights or of the cache; "" where there are none.
    """

    kind: str
    shape: str
    format: str


@dataclass(frozen=True)
class Operation:
    """An operation of a decode step.

    Attributes:
        weight_nbytes: bytes of weights that it reads.
        run: function that runs it once.
        run_again: function that runs it a given number of times.
    """

    name: OperationName
    weight_nbytes: int
    run: Callable[[], object]
    run_again: Callable[[int], object]

    @classmethod
    def of(cls, name: OperationName, weight_nbytes: int, run: Callable[[], object]) -> "Operation":
        """Return an operation that is repeated by calling `run`."""

        def run_again(times: int) -> None:
            for _ in range(times):
                run()

        return cls(name, weight_nbytes, run, run_again)


@dataclass(frozen=True)
class Clock:
    """A clock for work on a device.

    Attributes:
        idle: function that does nothing, called like the operations; its time is subtracted from theirs.
    """

    device: torch.device
    idle: Callable[[], object]
    repeats: int

    def warm_seconds(self, operation: Operation) -> float:
        """Return the median seconds of one run while the same operation runs many times in a row."""
        operation.run_again(WARM_TIMES)
        seconds = [self._seconds(lambda: operation.run_again(WARM_TIMES)) for _ in range(self.repeats)]
        return statistics.median(seconds) / WARM_TIMES

    def pass_seconds(self, operations: Sequence[Operation], before: Callable[[], object]) -> list[float]:
        """Return the median seconds of each operation, over passes through all of them in order.

        Args:
            before: function that is called before each pass.
        """
        passes: list[list[float]] = []
        for _ in range(UNTIMED_PASSES + self.repeats):
            before()
            idle = self._seconds(self.idle)
            passes.append([max(0.0, self._seconds(operation.run) - idle) for operation in operations])
        return [statistics.median(seconds) for seconds in zip(*passes[UNTIMED_PASSES:], strict=True)]

    def step_seconds(self, step: Callable[[], object], before: Callable[[], object]) -> float:
        """Return the median seconds of a whole step."""
        seconds = []
        for _ in range(UNTIMED_PASSES + self.repeats):
            before()
            seconds.append(self._seconds(step))
        return statistics.median(seconds[UNTIMED_PASSES:])

    def _seconds(self, work: Callable[[], object]) -> float:
        synchronize(self.device)
        began = time.perf_counter()
        work()
        synchronize(self.device)
        return time.perf_counter() - began
