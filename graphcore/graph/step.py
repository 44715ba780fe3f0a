"""The steps of a program: embed, a group of blocks, head.

A step reads its inputs from the state and leaves its outputs there. The builder decided whether its function is eager
or compiled; a captured program replays all of its steps as one CUDA graph.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from graphcore.graph.state import StepState
from graphcore.kvcache.buffers import LayerCache
from graphcore.nn.block import Block, Routed
from graphcore.nn.decoder import Embedding, Head
from graphcore.nn.moe import Experts, MoE
from graphcore.nn.span import Span
from graphcore.nn.spec import ModelSpec

# The block, and the arguments of its forward; features of the layer are passed where the block has them.
BlockFunction = Callable[..., Tensor]
RouteFunction = Callable[[Block, Tensor, Tensor | None, Span, Tensor, Tensor, Tensor | None], Routed]
AddFunction = Callable[..., Tensor]  # Block.add_experts, features of the layer likewise
HeadFunction = Callable[[Head, Tensor], Tensor]


@dataclass(frozen=True)
class FusionMemory:
    """Memory in which a program's layers leave rows for fused norms (norm_fusion.py); programs may alternate by layer.

    Attributes:
        rows: [B, D] compute dtype, the last sum's.
        squares: [4 L, B, 2] int64, of each sum.
    """

    rows: Tensor
    squares: Tensor


@dataclass(frozen=True)
class Neighbours:
    """The layers before and after one in a program, if no experts are fetched in either.

    Attributes:
        layer: index of the layer itself.
        memory: memory of the program that they belong to.
    """

    layer: int
    memory: FusionMemory
    before: Block | None = None
    after: Block | None = None


class DecodeKernels(Protocol):
    """A device's decode kernels, which run a decode step one after another, without compilation."""

    def fusion_memory(self, spec: ModelSpec, dtype: torch.dtype, batch: int) -> FusionMemory:
        """Return memory for a new program of `batch` sequences in that compute dtype."""

    def block_function(
        self, block: Block, batch: int, fetches: bool, beside: Neighbours | None = None
    ) -> BlockFunction | None:
        """Return the function that runs the block for one token of each of `batch` sequences; None if it cannot run.

        Args:
            fetches: True if experts are fetched between the block's halves; the function is then a RoutedBlock.
            beside: the layers whose functions run just before and just after it; None for a block that runs alone.
        """

    def head_function(self, head: Head, batch: int) -> HeadFunction | None:
        """Return the function that makes one token's logits for each of `batch` sequences; None if it cannot run."""


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
    """Turns token ids into the residual stream and layers' features, and looks up the rope rows of their positions."""

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
        positions = state.span.positions(state.token_ids.shape[1])
        state.ropes = tuple(table[positions] for table in self.tables)


@dataclass(frozen=True)
class RoutedBlock:
    """A block with experts, as the functions of its two halves; the experts run between them as one operation."""

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
        return self.add(block, routed.x, experts_of(block)(routed.fed, routed.chosen), routed.shares, *features)


def experts_of(block: Block) -> Experts:
    """Return the experts of a block that has them."""
    assert isinstance(block.mlp, MoE), "a block without experts runs whole"
    return block.mlp.experts


class ExpertFetcher(Protocol):
    """Brings experts to places in the tensors that their modules are bound to."""

    def waves(self, layer: int, experts: Sequence[int]) -> Generator[list[int]]:
        """Yield the places of experts in waves, until each expert asked for was in one of them.

        Each wave has one entry for each of the layer's experts: its place, or -1. It is valid until the next wave is
        asked for. Experts come in one wave if they are no more than a token chooses. A caller that stops early closes
        the generator.
        """


@dataclass(frozen=True)
class FetchedExperts:
    """The layers whose experts are fetched.

    Attributes:
        slots: experts of each of these layers, whose matrices lie where the fetcher brings them.
        mapped: layers whose experts a decode step reads from locked RAM, without fetching them.
    """

    fetcher: ExpertFetcher
    slots: Mapping[int, Experts]
    mapped: frozenset[int] = frozenset()

    def fetches(self, layer: int, phase: str) -> bool:
        """Return whether a layer's experts are fetched in that phase; the host must then know which were chosen."""
        return layer in self.slots and not (layer in self.mapped and phase == "decode")


@dataclass(frozen=True)
class FetchedBlock:
    """A block whose experts are fetched between its halves.

    Attributes:
        layer: index of the block's layer.
        slots: experts whose matrices lie where the fetcher brings them; None for the block's own.
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
        answers = self._answers(self.slots or experts_of(block), routed)
        return self.halves.add(block, routed.x, answers, routed.shares, *features)

    def _answers(self, experts: Experts, routed: Routed) -> Tensor:
        """Return the experts' answers, [B, T, C, D]; each wave computes some of the rows."""
        chosen = routed.chosen
        answers: Tensor | None = None
        with closing(self.fetcher.waves(self.layer, sorted({*chosen.flatten().tolist()} - {-1}))) as waves:
            for places in waves:
                found = experts(routed.fed, chosen, places)
                is_here = torch.tensor(places, device=chosen.device, dtype=torch.int64)[chosen] >= 0
                answers = found if answers is None else torch.where(is_here[..., None], found, answers)
        return experts(routed.fed, chosen) if answers is None else answers  # no expert was chosen


@dataclass(frozen=True)
class BoundBlock:
    """One layer as a step sees it: its index, module, the function of its kind, its rope table and its cache."""

    layer: int
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
            features = () if state.per_layer is None else (state.per_layer[bound.layer],)
            arguments = (state.hidden, rope, state.span, *bound.cache.inputs, *features)
            state.hidden = bound.run(bound.block, *arguments)


@dataclass
class HeadStep:
    """Makes logits for some rows of the vocabulary, after each sequence's last real token or after every token.

    Attributes:
        head: part of the head that has these rows.
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
    """Chooses the likeliest next token and makes it the next input, without leaving the device."""

    group: int
    state: StepState

    def replay(self) -> None:
        """Fill `chosen` and make it the input."""
        self.state.chosen.copy_(self.state.logits.argmax(dim=-1))
        self.state.advance(self.state.chosen)
