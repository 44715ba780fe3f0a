"""What one pass over a program needs: its inputs, and which of its steps it takes.

A decode program's inputs stay at one address; a longer pass gets new ones.
"""

from collections.abc import Sequence

import torch

from graphcore.graph.program import Program
from graphcore.graph.state import StepState
from graphcore.graph.step import BlocksStep, HeadStep, Step
from graphcore.nn.span import Span


def set_inputs(state: StepState, rows: Sequence[Sequence[int]], starts: Sequence[int], width: int, tokens: int) -> None:
    """Make the rows, padded to `tokens` and to `width` rows, the state's inputs."""
    idle = width - len(rows)
    padded = [[*ids, *[0] * (tokens - len(ids))] for ids in rows] + [[0] * tokens] * idle
    token_ids = torch.tensor(padded, dtype=torch.int64)
    begins, counts = torch.tensor([*starts, *[0] * idle]), torch.tensor([*map(len, rows), *[0] * idle])
    if tokens == 1:  # a decode program's inputs never move
        state.token_ids.copy_(token_ids)
        state.span.starts.copy_(begins)
        state.span.counts.copy_(counts)
    else:
        device = state.token_ids.device
        state.token_ids = token_ids.to(device)
        state.span = Span(begins.to(device), counts.to(device))


def without_head(program: Program) -> Program:
    """Return the program up to the last block."""
    return Program(program.state, [step for step in program.steps if not isinstance(step, HeadStep)])


def heads_of(program: Program) -> list[HeadStep]:
    """Return the steps that `without_head` leaves out."""
    return [step for step in program.steps if isinstance(step, HeadStep)]


def single_blocks(step: Step) -> list[BlocksStep]:
    """Return the step's blocks as steps of their own."""
    assert isinstance(step, BlocksStep), f"{type(step).__name__} has no blocks"
    return [BlocksStep(step.group, step.state, [bound]) for bound in step.blocks]
