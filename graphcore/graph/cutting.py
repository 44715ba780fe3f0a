"""Where a decode program is cut into what is captured: at every group whose weights move, and at what asks the host.

    steps      embed | 1 | 2 | 3 | 4 | head        groups 2 and 4 move
    captured   [ embed   1 ] [2] [3] [4] [head]    between two pieces a policy may have something to enqueue

Pieces hand the residual stream and the rope rows to one another in memory of their own, from before any capture. A
tensor that a capture makes lies in the captures' common pool and belongs to the next capture as soon as Python has
let go of it; if a later piece read it there, some piece between might have overwritten it. So each piece begins with
the handed memory as its input and ends by copying what it has made into it. Nothing else leaves a piece: the inputs,
the logits and the chosen tokens have their own memory anyway. All pieces can then share one pool, since they run one
after another. The copies are a few kilobytes.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphcore.graph.choosing import ChooseStep
from graphcore.graph.state import StepState
from graphcore.graph.step import BlocksStep, EmbedStep, FetchedBlock, Step
from graphcore.nn.block import RESIDUAL_DTYPE


@dataclass(frozen=True)
class Handover:
    """What flows from piece to piece.

    Attributes:
        hidden: [B, 1, D] residual stream.
        ropes: one [B, 1, 2, E/2] float32 per rope table.
    """

    hidden: Tensor
    ropes: tuple[Tensor, ...]

    @classmethod
    def allocate(cls, batch: int, dim: int, tables: Sequence[Tensor], device: torch.device) -> "Handover":
        """Return memory for one token of each of `batch` sequences.

        Args:
            tables: rope tables, [P, 2, E/2] each.
        """
        hidden = torch.zeros(batch, 1, dim, dtype=RESIDUAL_DTYPE, device=device)
        return cls(hidden, tuple(torch.zeros(batch, 1, *table.shape[1:], device=device) for table in tables))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of it."""
        return (self.hidden, *self.ropes)


@dataclass
class TakeStep:
    """The beginning of a piece: what was handed over is its input."""

    group: int
    state: StepState
    handover: Handover

    def replay(self) -> None:
        """Point the state at the handed memory."""
        self.state.hidden, self.state.ropes = self.handover.hidden, self.handover.ropes


@dataclass
class HandStep:
    """The end of a piece: what it has made goes where the next one looks."""

    group: int
    state: StepState
    handover: Handover

    def replay(self) -> None:
        """Copy what is new; let go of where it was made."""
        made = (self.state.hidden, *self.state.ropes)
        for tensor, place in zip(made, self.handover.tensors, strict=True):
            if tensor is not place:
                place.copy_(tensor)
        self.state.hidden, self.state.ropes = self.handover.hidden, self.handover.ropes


@dataclass
class Piece:
    """Consecutive steps as one.

    Attributes:
        group: whose weights it reads; of several groups, none of which moves, the first.
        may_capture: none of them asks the host for anything.
    """

    group: int
    steps: Sequence[Step]
    may_capture: bool

    def replay(self) -> None:
        """Run the steps once, each by itself."""
        for step in self.steps:
            step.replay()


def cut(steps: Sequence[Step], streamed: Collection[int]) -> list[Piece]:
    """Return the steps in pieces: one for each step that moves or asks the host, one for all between two of them.

    A choice of tokens reads no weights, and joins what is before it.
    """
    pieces: list[Piece] = []
    between: list[Step] = []
    for step in steps:
        if isinstance(step, ChooseStep) and not between and pieces and pieces[-1].may_capture:
            pieces[-1] = Piece(pieces[-1].group, [*pieces[-1].steps, step], may_capture=True)
            continue
        if step.group not in streamed and not asks_host(step):
            between.append(step)
            continue
        pieces += [*_together(between), Piece(step.group, [step], not asks_host(step))]
        between = []
    return [*pieces, *_together(between)]


def _together(steps: Sequence[Step]) -> list[Piece]:
    return [Piece(steps[0].group, steps, may_capture=True)] if steps else []


def with_handover(piece: Piece, state: StepState, handover: Handover) -> Piece:
    """Return the piece with what hands over around it."""
    take, hand = TakeStep(piece.group, state, handover), HandStep(piece.group, state, handover)
    return Piece(piece.group, [take, *piece.steps, hand], piece.may_capture)


def asks_host(step: Step) -> bool:
    """Return whether the step reads values back from the device, or brings bytes there: no capture may do that."""
    if isinstance(step, BlocksStep):
        return any(isinstance(bound.run, FetchedBlock) for bound in step.blocks)
    return isinstance(step, EmbedStep) and step.embedding.is_gathered
