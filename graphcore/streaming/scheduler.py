"""The hot loop."""

from graphcore.graph.program import Program
from graphcore.streaming.policy import Policy


def run_program(program: Program, policy: Policy) -> None:
    """Replay the program's steps, each between its group's acquire and release."""
    for step in program.steps:
        policy.acquire(step.group)
        step.replay()
        policy.release(step.group)
