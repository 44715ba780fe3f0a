"""The scheduler: the loop that runs programs' steps under a policy.

program A   embed   1   2   3   head          A group is acquired once for all programs that run together, so one
program B   embed   1   2   3                 pass over the link serves them all.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate

from graphcore.errors import StreamingError
from graphcore.graph.program import Program
from graphcore.graph.step import Step
from graphcore.streaming.policy import Policy


class StoppedError(Exception):
    """A signal that a pass was aborted between two groups, because `is_stopped` returned True."""


def never() -> bool:
    """Return False: the default for `is_stopped`, which never aborts a pass."""
    return False


def run_program(program: Program, policy: Policy) -> None:
    """Replay the program's steps, each between its group's acquire and release."""
    run_together([program], policy)


def run_together(programs: Sequence[Program], policy: Policy, is_stopped: Callable[[], bool] = never) -> None:
    """Replay the steps of all programs, each in its own order, in one pass over the layer groups.

    Args:
        is_stopped: function that is called before each group and returns True to abort the pass.

    Raises:
        StoppedError: the pass was aborted; only the layers that have run have written their KV caches.
    """
    try:
        for group, steps in in_one_pass(programs):
            if is_stopped():
                raise StoppedError
            policy.acquire(group)
            for step in steps:
                step.replay()
            policy.release(group)
    except BaseException:  # reads ahead for the remaining steps may have failed too
        with suppress(StreamingError):  # it would repeat the first error
            policy.reset()
        raise


def in_one_pass(programs: Sequence[Program]) -> Iterator[tuple[int, list[Step]]]:
    """Yield each group in turn with the steps of all programs that need it.

    A step that returns to an earlier group, such as the sampling of a token, keeps its place in its program's order.
    """
    if len(programs) == 1:
        for step in programs[0].steps:
            yield step.group, [step]
        return
    waiting = []
    for program in programs:
        positions = accumulate((step.group for step in program.steps), max)
        waiting.append(list(zip(positions, program.steps, strict=True))[::-1])
    while waiting := [steps for steps in waiting if steps]:
        first = min((position, step.group) for position, step in (steps[-1] for steps in waiting))
        yield first[1], [steps.pop()[1] for steps in waiting if (steps[-1][0], steps[-1][1].group) == first]
