"""The scheduler: the loop that runs programs' steps under a policy.

program A   embed   1   2   3   head          A group is acquired once for all programs that run together, so one
program B   embed   1   2   3                 pass over the link serves them all.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate

from graphcore.errors import StreamingError
from graphcore.graph.gpu.capture import CapturedStep
from graphcore.graph.gpu.chunk_graphs import ChunkStep
from graphcore.graph.hand_over import HandedStep
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

    A step that returns to an earlier group, such as the sampling of a token, keeps its place in its program's order. It
    comes after the groups that other programs run before they return: if it receives what another rank computes
    (graph/hand_over.py), that rank may be waiting for one of these.
    """
    if len(programs) == 1:
        for step in programs[0].steps:
            yield step.group, [step]
        return
    waiting = [_in_order(program.steps)[::-1] for program in programs]
    last = max((position for steps in waiting for position, returns, _ in steps if returns), default=0)
    while waiting := [steps for steps in waiting if steps]:
        first = min(_key(*steps[-1], last) for steps in waiting)
        yield first[2], [steps.pop()[2] for steps in waiting if _key(*steps[-1], last) == first]


def _in_order(steps: Sequence[Step]) -> list[tuple[int, bool, Step]]:
    """Return each step with the largest group up to it, and whether it returns to an earlier one."""
    before = accumulate(map(_last_group, steps), max, initial=0)  # of the steps before each
    return [(max(most, step.group), step.group < most, step) for most, step in zip(before, steps, strict=False)]


def _last_group(step: Step) -> int:
    """Return the last group that a step reads, which may be several that were captured as one."""
    inside = step.step if isinstance(step, HandedStep | ChunkStep) else step
    return max(one.group for one in inside.steps) if isinstance(inside, CapturedStep) else step.group


def _key(position: int, returns: bool, step: Step, last: int) -> tuple[int, bool, int]:
    """Return the place of a step among those of all programs. Args: last: last group before any program returns."""
    return max(position, last) if returns else position, returns, step.group
