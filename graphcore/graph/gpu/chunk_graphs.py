"""Chunks of prompts as CUDA graphs: one set of graphs for each size, which the sequences of all rows use in turn.

    chunk of 300 tokens of row 5     inputs -> buffers of size 512 | replay, replay, ... | views of 300 tokens -> head

A decode step has all rows of the caches; a chunk has one. The row is an input like the tokens: its pages are copied to
the graphs' own tables, and the graphs find its recurrent states by its number. A chunk is padded to the next size, and
`Span.counts` says which tokens are real. The head is not captured, because only a prompt's last chunk needs it.

Where weights stream, several chunks may take turns in one pass, group by group. The buffers then hold the values of one
of them, and the others keep copies.

Legend: T tokens of the size, D model dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from graphcore.graph.gpu.partition import BoundaryBuffers
from graphcore.graph.state import StepState
from graphcore.graph.step import BoundBlock, RowStates, Step
from graphcore.kernels import limits
from graphcore.kvcache.buffers import KVCache, LayerCache

LEAST_TOKENS = 64  # fewer tokens take as long: their products are limited by reading the weights
FEW_TOKENS = limits.MOST_TOKENS  # they are multiplied without unpacking matrices


def chunk_sizes(most: int) -> list[int]:
    """Return the sizes of captured chunks, ascending: few tokens, and powers of two up to chunks of `most` tokens."""
    powers = [LEAST_TOKENS << shift for shift in range(max(most // LEAST_TOKENS, 1).bit_length())]
    return sorted({min(size, most) for size in (FEW_TOKENS, *powers, most)})


@dataclass(frozen=True)
class RowCaches:
    """The caches of the one row that a state names.

    Attributes:
        caches: one for each layer; those of attention layers have a table of their own.
        tables: [B, N] pages of all sequences, and [1, N] of the one, of each kind of table.
    """

    state: StepState
    caches: Sequence[LayerCache]
    tables: Sequence[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, caches: Sequence[LayerCache], state: StepState) -> "RowCaches":
        """Return the caches, over the same memory, and new tables."""
        own: dict[int, tuple[Tensor, Tensor]] = {}

        def with_own_table(cache: LayerCache) -> LayerCache:
            if not isinstance(cache, KVCache):
                return cache
            _, table = own.setdefault(cache.table.data_ptr(), (cache.table, torch.zeros_like(cache.table[:1])))
            return replace(cache, table=table)

        found = [with_own_table(cache) for cache in caches]
        return cls(state, found, [*own.values()])

    def find_pages(self) -> None:
        """Copy the row's pages to its own tables."""
        for table, own in self.tables:
            torch.index_select(table, 0, self.state.sequences, out=own)

    def bound(self, layer: BoundBlock) -> BoundBlock:
        """Return a layer bound to the row instead of to its own cache."""
        cache = self.caches[layer.layer]
        run = layer.run if isinstance(cache, KVCache) else RowStates(layer.run, self.state.sequences)
        return replace(layer, run=run, cache=cache)


@dataclass
class ChunkBuffers:
    """The static inputs of a size's graphs, and what the graphs hand over.

    Attributes:
        state: state of the captured steps.
        row: caches that they use.
        boundary: residual stream, rope rows and features between the graphs and after the last.
        holder: state of the sequence whose values these are; None before the first chunk.
    """

    state: StepState
    row: RowCaches
    boundary: BoundaryBuffers
    holder: StepState | None = None

    def begin(self, state: StepState) -> None:
        """Take a chunk's inputs."""
        self._keep_others(state)
        own, tokens = self.state, state.token_ids.shape[1]
        own.token_ids.zero_()  # padding is a token like any other, and its results are never read
        own.token_ids[:, :tokens].copy_(state.token_ids)
        self._take_place(state)

    def resume(self, state: StepState) -> None:
        """Take a chunk's inputs, and what its earlier graphs have handed over, unless the buffers hold them."""
        if self.holder is state:
            return
        self._keep_others(state)
        views = self.boundary.first(state.token_ids.shape[1])
        for place, kept in zip(views.tensors, BoundaryBuffers.of(state).tensors, strict=True):
            place.copy_(kept)
        self._take_place(state)

    def give_to(self, state: StepState) -> None:
        """Set the state's tensors to views of its own tokens."""
        self.boundary.first(state.token_ids.shape[1]).give_to(state)

    def _keep_others(self, state: StepState) -> None:
        """Give the sequence whose values are here copies of them, if it still needs them."""
        holder = self.holder
        if holder is not None and holder is not state and holder.hidden.numel():
            BoundaryBuffers.of(holder).clone().give_to(holder)

    def _take_place(self, state: StepState) -> None:
        own = self.state
        own.span.starts.copy_(state.span.starts)
        own.span.counts.copy_(state.span.counts)
        own.sequences.copy_(state.sequences)
        self.row.find_pages()
        self.holder = state


@dataclass
class ChunkStep:
    """A captured step of a size's graphs, run for one sequence.

    Attributes:
        state: the sequence's own state, with a chunk's inputs of at most the size's tokens.
        step: the captured step; a plain one if it needs the host.
        is_first: True for the first step of a chunk.
    """

    group: int
    state: StepState
    step: Step
    buffers: ChunkBuffers
    is_first: bool

    def replay(self) -> None:
        """Run the step on the sequence's values."""
        if self.is_first:
            self.buffers.begin(self.state)
        else:
            self.buffers.resume(self.state)
        self.step.replay()
        self.buffers.give_to(self.state)
