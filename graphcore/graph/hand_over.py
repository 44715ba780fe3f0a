"""Hand-overs of the residual stream between the ranks that run one model's layers (graphcore/parallel).

    rank 0   embed  layer 0 -> send                receive -> layer 2 -> send                receive  head
    rank 1          receive -> layer 1 -> send                receive -> layer 3 -> send

Per-layer features (Gemma 4) are computed with the embedding, and sent from there to every rank.

A step receives before it runs and sends when it has run, so that it waits for the stream after its weights are there.

Legend: B batch, T tokens, D model dim, P positions, E head dim.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from graphcore.graph.state import StepState
from graphcore.graph.step import EmbedStep, Step, rope_rows
from graphcore.nn.decoder import Decoder
from graphcore.nn.spec import ModelSpec
from graphcore.parallel.process_group import ProcessGroup
from graphcore.parallel.share import ENDS, Share


@dataclass(frozen=True)
class HandOver:
    """A rank's share of the layers, and the process group that it hands the residual stream over in."""

    share: Share
    ranks: ProcessGroup


@dataclass
class PositionsStep:
    """What a rank without the embedding begins with: rope rows of the tokens, room for their stream and features."""

    group: int
    state: StepState
    tables: Sequence[Tensor]
    spec: ModelSpec

    def replay(self) -> None:
        """Fill `ropes`, and allocate `hidden` and `per_layer`."""
        ids, spec = self.state.token_ids, self.spec
        self.state.hidden = torch.empty(*ids.shape, spec.dim, dtype=torch.float32, device=ids.device)
        if spec.per_layer is not None:
            shape = len(spec.blocks), *ids.shape, spec.per_layer.width
            self.state.per_layer = torch.empty(shape, dtype=torch.float32, device=ids.device)
        self.state.ropes = rope_rows(self.state, self.tables)


def first_step(decoder: Decoder, state: StepState, tables: Sequence[Tensor]) -> Step:
    """Return the step that begins a program: the embedding, unless another rank has it.

    Args:
        tables: rope tables, [P, 2, E/2] each.
    """
    if decoder.has_ends:
        return EmbedStep(0, state, decoder.embed_tokens, tables)
    return PositionsStep(0, state, tables, decoder.spec)


@dataclass
class HandedStep:
    """A step whose residual stream comes from another rank, or goes to one, or both.

    Attributes:
        step: the step; None to receive only.
        stream: function that returns the residual stream, where the step reads and writes it.
        source: rank that sends the stream; None if it is here.
        target: rank that it goes to; None if it stays.
    """

    group: int
    state: StepState
    step: Step | None
    stream: Callable[[], Tensor]
    ranks: ProcessGroup
    source: int | None = None
    target: int | None = None

    def replay(self) -> None:
        """Receive the stream, run the step, send the stream."""
        if self.source is not None:
            self.ranks.receive(self.stream(), self.source, self.state.place)
        if self.step is not None:
            self.step.replay()
        if self.target is not None:
            self.ranks.send(self.stream(), self.target, self.state.place)


def handed(
    step: Step,
    state: StepState,
    stream: Callable[[], Tensor],
    hand_over: HandOver | None,
    source: int | None,
    target: int | None,
) -> Step:
    """Return a step with its hand-overs; the step itself if it has none. Arguments as for `HandedStep`."""
    if hand_over is None or (source is None and target is None):
        return step
    return HandedStep(step.group, state, step, stream, hand_over.ranks, source, target)


def feature_steps(state: StepState, features: Callable[[], Tensor], hand_over: HandOver | None) -> list[Step]:
    """Return the steps that follow the embedding and bring its per-layer features to all other ranks.

    Args:
        features: function that returns the features, where they are written and read; contiguous.
        hand_over: the same as in `GraphBuilder`; without one there are no such steps.
    """
    if hand_over is None:
        return []
    ranks = hand_over.ranks
    if not hand_over.share.has_ends:
        return [HandedStep(0, state, None, features, ranks, source=ENDS)]
    others = range(ENDS + 1, ranks.world_size)
    return [HandedStep(0, state, None, features, ranks, target=rank) for rank in others]


def features_in(state: StepState) -> Callable[[], Tensor]:
    """Return the function that returns a state's per-layer features, [L, B, T, P] float32."""

    def features() -> Tensor:
        assert state.per_layer is not None, "the model has per-layer features"
        return state.per_layer

    return features


class Stretch(NamedTuple):
    """Steps between two hand-overs.

    Attributes:
        source: rank that sends the stream before the steps; None if it is here.
        steps: the steps; none if the stream is only received.
        target: rank that gets it after them; None if it stays.
    """

    source: int | None
    steps: Sequence[Step]
    target: int | None


def stretches(steps: Sequence[Step]) -> list[Stretch]:
    """Return the steps of a program, without their hand-overs, cut at these."""
    found: list[Stretch] = []
    source, inside = None, list[Step]()
    for step in steps:
        if not isinstance(step, HandedStep):
            inside.append(step)
            continue
        if step.source is not None:
            found.append(Stretch(source, inside, None))
            source, inside = step.source, []
        if step.step is not None:
            inside.append(step.step)
        if step.target is not None or step.step is None:
            found.append(Stretch(source, inside, step.target))
            source, inside = None, []
    found.append(Stretch(source, inside, None))
    return [one for one in found if one.steps or one.source is not None]


def with_hand_overs(
    steps: Sequence[Step],
    state: StepState,
    stream: Callable[[], Tensor],
    hand_over: HandOver | None,
    source: int | None,
    target: int | None,
) -> list[Step]:
    """Return steps with the hand-overs before the first and after the last. Arguments as for `HandedStep`."""
    if len(steps) == 1:
        return [handed(steps[0], state, stream, hand_over, source, target)]
    first, *between, last = steps
    first = handed(first, state, stream, hand_over, source, None)
    return [first, *between, handed(last, state, stream, hand_over, None, target)]


def hidden_of(state: StepState) -> Callable[[], Tensor]:
    """Return the function that returns a state's residual stream, [B, T, D] float32."""
    return lambda: state.hidden


def rows_in_use(state: StepState, x: Tensor) -> Callable[[], Tensor]:
    """Return the function that returns the rows of a native program's buffer, [B, ...], up to the last in use."""

    def rows() -> Tensor:
        counts: list[int] = state.span.counts.tolist()
        return x[: max((row for row, count in enumerate(counts, start=1) if count), default=0)]

    return rows
