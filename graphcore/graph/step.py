"""The steps of a program: embed, a group of blocks, head.

A step reads its inputs from the state and leaves its outputs there. Whether its function is eager or compiled was
decided by whoever built it; a captured program replays all of its steps as one CUDA graph.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from graphcore.graph.state import StepState
from graphcore.nn.block import Block, Routed
from graphcore.nn.decoder import Embedding, Head
from graphcore.nn.kv_cache import LayerCache
from graphcore.nn.moe import Experts, MoE
from graphcore.nn.span import Span

BlockFunction = Callable[[Block, Tensor, Tensor | None, Span, Tensor, Tensor], Tensor]
RouteFunction = Callable[[Block, Tensor, Tensor | None, Span, Tensor, Tensor], Routed]
AddFunction = Callable[[Block, Tensor, Tensor, Tensor], Tensor]
HeadFunction = Callable[[Head, Tensor], Tensor]


class DecodeKernels(Protocol):
    """What runs a decode step in a device's own kernels, called one after another and not compiled."""

    def block_function(self, block: Block, batch: int, fetches: bool) -> BlockFunction | None:
        """Return what runs the block for one token of each of `batch` sequences; None where something is in its way.

        Args:
            fetches: experts are brought between the halves, so it is a RoutedBlock.
        """

    def head_function(self, head: Head, batch: int) -> HeadFunction | None:
        """Return what makes logits of one token of each of `batch` sequences; None where something is in its way."""


class Step(Protocol):
    """A callable on the state's buffers.

    Attributes:
        group: index of the layer group whose weights it reads.
    """

    group: int

    def replay(self) -> None:
        """Run the step once."""


@dataclass
class EmbedStep:
    """Token ids to the residual stream, and the rope rows of their positions."""

    group: int
    state: StepState
    embedding: Embedding
    tables: Sequence[Tensor]

    def replay(self) -> None:
        """Fill `hidden` and `ropes`."""
        state = self.state
        state.hidden = self.embedding(state.token_ids, state.span)
        positions = state.span.positions(state.token_ids.shape[1])
        state.ropes = tuple(table[positions] for table in self.tables)


@dataclass(frozen=True)
class RoutedBlock:
    """A block with experts as the functions of its two halves; the experts, one operation, run between them."""

    route: RouteFunction
    add: AddFunction

    def __call__(
        self, block: Block, x: Tensor, rope: Tensor | None, span: Span, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        """Run the block as `Block.forward` does."""
        routed = self.route(block, x, rope, span, k_cache, v_cache)
        return self.add(block, routed.x, experts_of(block)(routed.fed, routed.chosen), routed.shares)


def experts_of(block: Block) -> Experts:
    """Return the experts of a block that has them."""
    assert isinstance(block.mlp, MoE), "a block without experts runs whole"
    return block.mlp.experts


class ExpertFetcher(Protocol):
    """Brings experts to places in the tensors that their modules are bound to."""

    def waves(self, layer: int, experts: Sequence[int]) -> Generator[list[int]]:
        """Yield where experts lie, until each was there once; what is yielded holds until the next is asked for.

        For each of the layer's experts its place, or -1; all that are asked for at once if they are no more than a
        token chooses. Whoever stops in between closes the generator.
        """


@dataclass(frozen=True)
class FetchedBlock:
    """A block whose experts are fetched between its halves.

    Attributes:
        layer: the block's.
        slots: the experts whose matrices are where the fetcher brings them; None: the block's own.
    """

    halves: RoutedBlock
    layer: int
    fetcher: ExpertFetcher
    slots: Experts | None = None

    def __call__(
        self, block: Block, x: Tensor, rope: Tensor | None, span: Span, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        """Run the block as `Block.forward` does, to the bit."""
        routed = self.halves.route(block, x, rope, span, k_cache, v_cache)
        return self.halves.add(block, routed.x, self._answers(self.slots or experts_of(block), routed), routed.shares)

    def _answers(self, experts: Experts, routed: Routed) -> Tensor:
        """Return the experts' answers, [B, T, C, D]; each wave has some of the rows."""
        chosen = routed.chosen
        answers: Tensor | None = None
        with closing(self.fetcher.waves(self.layer, sorted({*chosen.flatten().tolist()} - {-1}))) as waves:
            for places in waves:
                found = experts(routed.fed, chosen, places)
                is_here = torch.tensor(places, device=chosen.device)[chosen] >= 0
                answers = found if answers is None else torch.where(is_here[..., None], found, answers)
        return experts(routed.fed, chosen) if answers is None else answers  # nobody was chosen


@dataclass(frozen=True)
class BoundBlock:
    """One layer as a step sees it: its module, the function of its kind, its rope table and its cache."""

    block: Block
    run: BlockFunction
    rope: int | None
    cache: LayerCache


@dataclass
class BlocksStep:
    """The blocks of one layer group, in order."""

    group: int
    state: StepState
    blocks: Sequence[BoundBlock]

    def replay(self) -> None:
        """Advance `hidden` through the group."""
        state = self.state
        for bound in self.blocks:
            rope = None if bound.rope is None else state.ropes[bound.rope]
            state.hidden = bound.run(bound.block, state.hidden, rope, state.span, bound.cache.k, bound.cache.v)


@dataclass
class HeadStep:
    """The logits of some tokens of the vocabulary, after each sequence's last real token or after every token.

    Attributes:
        head: of those rows.
        rows: of the vocabulary.
        takes_all: of the logits after every token, [B, T, V].
    """

    group: int
    state: StepState
    head: Head
    rows: range
    run: HeadFunction
    takes_all: bool = False

    def replay(self) -> None:
        """Fill the rows' columns of `logits`; the first part of all tokens' makes room for them."""
        state = self.state
        if self.takes_all:
            if self.rows.start == 0:
                state.logits = state.logits.new_empty(*state.hidden.shape[:2], state.logits.shape[-1])
            state.logits[:, :, self.rows.start : self.rows.stop] = self._of_all(state.hidden)
            return
        last = (state.span.counts - 1).clamp(min=0)
        rows = torch.arange(len(last), device=last.device)
        state.logits[:, self.rows.start : self.rows.stop] = self.run(self.head, state.hidden[rows, last])

    def _of_all(self, hidden: Tensor) -> Tensor:
        return self.run(self.head, hidden[:, 0])[:, None] if hidden.shape[1] == 1 else self.run(self.head, hidden)


@dataclass
class GreedyStep:
    """The likeliest next token, fed back as the next input without leaving the device."""

    group: int
    state: StepState

    def replay(self) -> None:
        """Fill `chosen` and make it the input."""
        self.state.chosen.copy_(self.state.logits.argmax(dim=-1))
        self.state.feed(self.state.chosen)
