"""The steps of a program: embed, a group of blocks, head.

A step reads its inputs from the state and writes its outputs to it. The builder chooses whether a step's function is
eager or compiled; a captured program replays all of its steps as one CUDA graph.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from graphcore.graph.state import StepState
from graphcore.kvcache.buffers import LayerCache
from graphcore.nn.block import Block, Routed
from graphcore.nn.decoder import Embedding, Head
from graphcore.nn.moe import Experts, MoE
from graphcore.nn.span import Span
from graphcore.nn.spec import ModelSpec

# Takes the block and the arguments of its forward, including the layer's features if the block has them.
BlockFunction = Callable[..., Tensor]
RouteFunction = Callable[[Block, Tensor, Tensor | None, Span, Tensor, Tensor, Tensor | None], Routed]
AddFunction = Callable[..., Tensor]  # takes the block and the arguments of Block.add_experts
HeadFunction = Callable[[Head, Tensor], Tensor]


@dataclass(frozen=True)
class FusionMemory:
    """Buffers of one program for fused norms (norm_fusion.py); each program has its own, since programs may interleave.

    Attributes:
        rows: [B, D] compute dtype, rows of the last residual add.
        squares: [4 L, B, 2] int64, sums of squares of each residual add.
    """

    rows: Tensor
    squares: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """All the tensors."""
        return self.rows, self.squares


@dataclass(frozen=True)
class Neighbours:
    """The layers before and after one in a program, if no experts are fetched in either.

    Attributes:
        layer: index of the layer itself.
        memory: norm-fusion buffers of the program that the layers belong to.
    """

    layer: int
    memory: FusionMemory
    before: Block | None = None
    after: Block | None = None


class DecodeKernels(Protocol):
    """A device's decode kernels, launched one after another without compilation."""

    def fusion_memory(self, spec: ModelSpec, dtype: torch.dtype, batch: int) -> FusionMemory:
        """Return norm-fusion buffers for a new program of `batch` sequences in that compute dtype."""

    def block_function(
        self, block: Block, batch: int, fetches: bool, neighbours: Neighbours | None = None
    ) -> BlockFunction | None:
        """Return the function that runs the block for one token of each of `batch` sequences; None if unsupported.

        Args:
            fetches: True if experts are fetched between the block's halves; the function is then a RoutedBlock.
            neighbours: the layers that run just before and just after the block; None if its norms are not fused.
        """

    def head_function(self, head: Head, batch: int) -> HeadFunction | None:
        """Return the function that computes one token's logits for each of `batch` sequences; None if unsupported."""


class Step(Protocol):
    """A unit of work that reads and writes the state's tensors.

    Attributes:
        group: index of the layer group whose weights the step reads.
    """

    group: int

    def replay(self) -> None:
        """Run the step once."""


@dataclass
class EmbedStep:
    """Embeds token ids: the residual stream, per-layer features, and the rope rows of the tokens' positions."""

    group: int
    state: StepState
    embedding: Embedding
    tables: Sequence[Tensor]

    def replay(self) -> None:
        """Fill `hidden`, `ropes` and `per_layer`."""
        state = self.state
        state.hidden = self.embedding(state.token_ids, state.span)
        if self.embedding.per_layer is not None:
            state.per_layer = self.embedding.per_layer(state.token_ids, state.hidden)
        state.ropes = rope_rows(state, self.tables)


def rope_rows(state: StepState, tables: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the rows of the rope tables at the positions of a state's tokens."""
    positions = state.span.positions(state.token_ids.shape[1])
    return tuple(table[positions] for table in tables)


@dataclass(frozen=True)
class RoutedBlock:
    """A block with experts as two functions, before and after the experts, which run between them as one operation."""

    route: RouteFunction
    add: AddFunction

    def __call__(
        self,
        block: Block,
        x: Tensor,
        rope: Tensor | None,
        span: Span,
        k_cache: Tensor,
        v_cache: Tensor,
        table: Tensor | None,
        *features: Tensor,
    ) -> Tensor:
        """Run the block as `Block.forward` does."""
        routed = self.route(block, x, rope, span, k_cache, v_cache, table)
        return self.add(
            block, routed.x, experts_of(block)(routed.experts_input, routed.chosen), routed.shares, *features
        )


def experts_of(block: Block) -> Experts:
    """Return the experts of a block that has them."""
    assert isinstance(block.mlp, MoE), "a block without experts runs whole"
    return block.mlp.experts


class ExpertFetcher(Protocol):
    """Copies experts' weights to slots of the tensors that the expert modules read."""

    def waves(self, layer: int, experts: Sequence[int]) -> Generator[list[int]]:
        """Fetch experts in waves (batches that fit in the slots), and yield each wave's slots until all were yielded.

        A wave lists the slot of each of the layer's experts, or -1 for an expert that is not in a slot. It is valid
        until the next one is requested. If the experts are at most as many as one token chooses, one wave has them all.
        A caller that stops early must close the generator.
        """


@dataclass(frozen=True)
class FetchedExperts:
    """The layers whose experts are fetched.

    Attributes:
        slots: by layer, the expert module whose matrices are the slots that the fetcher fills.
        device_readable: layers whose experts a decode step's kernels read or copy from page-locked RAM by themselves.
    """

    fetcher: ExpertFetcher
    slots: Mapping[int, Experts]
    device_readable: frozenset[int] = frozenset()

    def fetches(self, layer: int, phase: str) -> bool:
        """Return whether a layer's experts are fetched in that phase, so that the host must read back the routing."""
        return layer in self.slots and not (layer in self.device_readable and phase == "decode")


@dataclass(frozen=True)
class FetchedBlock:
    """A block whose experts are fetched between its halves.

    Attributes:
        layer: index of the block's layer.
        slots: expert module whose matrices are the slots that the fetcher fills; None for the block's own.
    """

    halves: RoutedBlock
    layer: int
    fetcher: ExpertFetcher
    slots: Experts | None = None

    def __call__(
        self,
        block: Block,
        x: Tensor,
        rope: Tensor | None,
        span: Span,
        k_cache: Tensor,
        v_cache: Tensor,
        table: Tensor | None,
        *features: Tensor,
    ) -> Tensor:
        """Run the block as `Block.forward` does, with the same bits."""
        routed = self.halves.route(block, x, rope, span, k_cache, v_cache, table)
        answers = self.run_experts(block, routed.experts_input, routed.chosen)
        return self.halves.add(block, routed.x, answers, routed.shares, *features)

    def run_experts(self, block: Block, experts_input: Tensor, chosen: Tensor) -> Tensor:
        """Return the experts' outputs, [B, T, C, D]; each wave of fetched experts computes some of the rows.

        Args:
            experts_input, chosen: the same as in `Routed`.
        """
        experts = self.slots or experts_of(block)
        answers: Tensor | None = None
        with closing(self.fetcher.waves(self.layer, sorted({*chosen.flatten().tolist()} - {-1}))) as waves:
            for places in waves:
                found = experts(experts_input, chosen, places)
                is_here = torch.tensor(places, device=chosen.device, dtype=torch.int64)[chosen] >= 0
                answers = found if answers is None else torch.where(is_here[..., None], found, answers)
        return experts(experts_input, chosen) if answers is None else answers  # no expert was chosen


@dataclass(frozen=True)
class RowStates:
    """A block with recurrent states that runs on copies of one row of them, and then writes the row.

    Attributes:
        row: [1] int64, the row, on the device, so that a captured block serves all rows.
    """

    run: BlockFunction
    row: Tensor

    def __call__(
        self,
        block: Block,
        x: Tensor,
        rope: Tensor | None,
        span: Span,
        recurrent: Tensor,
        convolution: Tensor,
        table: Tensor | None,
        *features: Tensor,
    ) -> Tensor:
        """Run the block as `Block.forward` does."""
        own = [states.index_select(0, self.row) for states in (recurrent, convolution)]
        hidden = self.run(block, x, rope, span, *own, table, *features)
        for states, changed in zip((recurrent, convolution), own, strict=True):
            states.index_copy_(0, self.row, changed)
        return hidden


@dataclass(frozen=True)
class BoundBlock:
    """One layer of a step: its index, its module, the function that runs it, the index of its rope table, its cache."""

    layer: int
    block: Block
    run: BlockFunction
    rope: int | None
    cache: LayerCache

    def arguments(self, state: StepState) -> tuple[Any, ...]:
        """Return the arguments of the block's forward."""
        rope = None if self.rope is None else state.ropes[self.rope]
        features = () if state.per_layer is None else (state.per_layer[self.layer],)
        return (state.hidden, rope, state.span, *self.cache.inputs, *features)


@dataclass
class BlocksStep:
    """The blocks of one layer group, in order."""

    group: int
    state: StepState
    blocks: Sequence[BoundBlock]

    def replay(self) -> None:
        """Run `hidden` through the group's blocks."""
        for bound in self.blocks:
            self.state.hidden = bound.run(bound.block, *bound.arguments(self.state))


@dataclass
class HeadStep:
    """Computes logits for a range of the vocabulary, after each sequence's last real token or after every token.

    Attributes:
        head: part of the head that computes these rows.
        rows: range of the vocabulary's rows.
        takes_all: True for the logits after every token, [B, T, V].
    """

    group: int
    state: StepState
    head: Head
    rows: range
    run: HeadFunction
    takes_all: bool = False

    def replay(self) -> None:
        """Fill these rows' columns of `logits`; for every token, the first part also allocates it."""
        state = self.state
        if self.takes_all:
            if len(self.rows) == state.logits.shape[-1]:  # the whole vocabulary: no copy
                state.logits = self._of_all(state.hidden)
                return
            if self.rows.start == 0:
                state.logits = state.logits.new_empty(*state.hidden.shape[:2], state.logits.shape[-1])
            state.logits[:, :, self.rows.start : self.rows.stop] = self._of_all(state.hidden)
            return
        last = (state.span.counts - 1).clamp(min=0)
        rows = torch.arange(len(last), device=last.device, dtype=torch.int64)
        state.logits[:, self.rows.start : self.rows.stop] = self.run(self.head, state.hidden[rows, last])

    def _of_all(self, hidden: Tensor) -> Tensor:
        return self.run(self.head, hidden[:, 0])[:, None] if hidden.shape[1] == 1 else self.run(self.head, hidden)


@dataclass
class GreedyStep:
    """Chooses the next token by argmax on the device and makes it the next input."""

    group: int
    state: StepState

    def replay(self) -> None:
        """Fill `chosen` and make it the next input."""
        self.state.chosen.copy_(self.state.logits.argmax(dim=-1))
        self.state.advance(self.state.chosen)
