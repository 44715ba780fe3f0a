"""The hot loop."""

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
    except BaseException:  # what was read ahead of the steps that are left may have failed as this one did
        with suppress(StreamingError):  # in the same words
            policy.reset()
        raise
