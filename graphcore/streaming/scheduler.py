"""The scheduler: the loop that runs a program's steps under a policy."""

from contextlib import suppress

from graphcore.errors import StreamingError
from graphcore.graph.program import Program
from graphcore.streaming.policy import Policy


def run_program(program: Program, policy: Policy) -> None:
    """Replay the program's steps, each between its group's acquire and release."""
    try:
        for step in program.steps:
            policy.acquire(step.group)
            step.replay()
            policy.release(step.group)
    except BaseException:  # reads ahead for the remaining steps may have failed too
        with suppress(StreamingError):  # it would repeat the first error
            policy.reset()
        raise
