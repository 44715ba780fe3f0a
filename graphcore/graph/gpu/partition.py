"""Partitions a decode program into captured pieces: at each group whose weights are streamed, and at steps on the host.

    steps      embed | 1 | 2 | 3 | 4 | head        groups 2 and 4 are streamed
    captured   [ embed   1 ] [2] [3] [4] [head]    between two pieces a policy may enqueue copies

Pieces pass the residual stream, rope rows and per-layer features to one another in buffers that are allocated before
any capture. A tensor that a capture allocates is in the captures' shared pool, and the next capture may reuse its
memory as soon as Python frees it, so that a later piece could read overwritten data. So each piece reads the boundary
buffers at its start and copies its results to them at its end. Inputs, logits and chosen tokens have memory of their
own. All pieces can then share one pool, since they run one after another. The copies are a few kilobytes.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphcore.graph.gpu.sampling import ChooseStep
from graphcore.graph.state import StepState
from graphcore.graph.step import BlocksStep, EmbedStep, FetchedBlock, RowStates, Step
from graphcore.nn.block import RESIDUAL_DTYPE
from graphcore.nn.spec import ModelSpec


@dataclass(frozen=True)
class BoundaryBuffers:
    """Static buffers between the pieces of a partitioned program; T is 1 in a decode step.

    Attributes:
        hidden: [B, T, D] residual stream.
        ropes: rope rows, one [B, T, 2, E/2] float32 per rope table.
        per_layer: [L, B, T, P] float32, per-layer features of the tokens; None if the model has none.
    """

    hidden: Tensor
    ropes: tuple[Tensor, ...]
    per_layer: Tensor | None = None

    @classmethod
    def allocate(
        cls, batch: int, spec: ModelSpec, tables: Sequence[Tensor], device: torch.device, tokens: int = 1
    ) -> "BoundaryBuffers":
        """Return buffers for `tokens` tokens of each of `batch` sequences.

        Args:
            tables: rope tables, [P, 2, E/2] each.
        """
        rows = batch, tokens
        hidden = torch.zeros(*rows, spec.dim, dtype=RESIDUAL_DTYPE, device=device)
        ropes = tuple(torch.zeros(*rows, *table.shape[1:], device=device, dtype=torch.float32) for table in tables)
        if spec.per_layer is None:
            return cls(hidden, ropes)
        shape = len(spec.blocks), *rows, spec.per_layer.width
        return cls(hidden, ropes, torch.zeros(shape, device=device, dtype=torch.float32))

    @classmethod
    def of(cls, state: StepState) -> "BoundaryBuffers":
        """Return the tensors that one step of the state passes to the next."""
        return cls(state.hidden, state.ropes, state.per_layer)

    def first(self, tokens: int) -> "BoundaryBuffers":
        """Return views of the first tokens of each sequence."""
        features = None if self.per_layer is None else self.per_layer[:, :, :tokens]
        return BoundaryBuffers(self.hidden[:, :tokens], tuple(rope[:, :tokens] for rope in self.ropes), features)

    def clone(self) -> "BoundaryBuffers":
        """Return copies."""
        features = None if self.per_layer is None else self.per_layer.clone()
        return BoundaryBuffers(self.hidden.clone(), tuple(rope.clone() for rope in self.ropes), features)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All the tensors."""
        return (self.hidden, *self.ropes, *(() if self.per_layer is None else (self.per_layer,)))

    def give_to(self, state: StepState) -> None:
        """Set the state's tensors to these buffers."""
        state.hidden, state.ropes, state.per_layer = self.hidden, self.ropes, self.per_layer


@dataclass
class CopyInStep:
    """The start of a piece: its inputs are the boundary buffers."""

    group: int
    state: StepState
    boundary: BoundaryBuffers

    def replay(self) -> None:
        """Point the state at the boundary buffers."""
        self.boundary.give_to(self.state)


@dataclass
class CopyOutStep:
    """The end of a piece: copies its results into the boundary buffers, where the next piece reads them."""

    group: int
    state: StepState
    boundary: BoundaryBuffers

    def replay(self) -> None:
        """Copy results that are not in the boundary buffers yet, and point the state at the buffers."""
        features = self.state.per_layer
        made = (self.state.hidden, *self.state.ropes, *(() if features is None else (features,)))
        for tensor, place in zip(made, self.boundary.tensors, strict=True):
            if tensor is not place:
                place.copy_(tensor)
        self.boundary.give_to(self.state)


@dataclass
class Piece:
    """Consecutive steps that run as one.

    Attributes:
        group: layer group whose weights the piece reads; the first one if it reads several, all of them resident.
        may_capture: True if none of the steps needs the host.
    """

    group: int
    steps: Sequence[Step]
    may_capture: bool

    def replay(self) -> None:
        """Run the steps once, one by one."""
        for step in self.steps:
            step.replay()


def cut(steps: Sequence[Step], streamed: Collection[int]) -> list[Piece]:
    """Return the steps in pieces: one for each streamed or host step, and one for all steps between two of these.

    A sampling step reads no weights, and joins the piece before it.
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


def with_boundary_copies(piece: Piece, state: StepState, boundary: BoundaryBuffers) -> Piece:
    """Return the piece with a copy-in step before its steps and a copy-out step after them."""
    copy_in, copy_out = CopyInStep(piece.group, state, boundary), CopyOutStep(piece.group, state, boundary)
    return Piece(piece.group, [copy_in, *piece.steps, copy_out], piece.may_capture)


def asks_host(step: Step) -> bool:
    """Return whether the step reads values back from the device or fetches weights, so that it cannot be captured."""
    if isinstance(step, BlocksStep):
        runs = (bound.run.run if isinstance(bound.run, RowStates) else bound.run for bound in step.blocks)
        return any(isinstance(run, FetchedBlock) for run in runs)
    return isinstance(step, EmbedStep) and step.embedding.asks_host
