"""Compiles one function for all layers of a kind (same spec and packing), and one for all heads of a size.

Each function is compiled by running it once with padding tokens only, so that the caches do not change.

Legend: B batch, T tokens, D model dim.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from graphcore.graph.compile import call_compiling, compile_whole, mark_length
from graphcore.graph.hand_over import first_step
from graphcore.graph.state import StepState
from graphcore.graph.step import (
    AddFunction,
    BlockFunction,
    HeadFunction,
    RoutedBlock,
    RouteFunction,
    experts_of,
)
from graphcore.kvcache.buffers import KVCache, LayerCache
from graphcore.nn.block import RESIDUAL_DTYPE, Block, packed_formats
from graphcore.nn.decoder import Decoder, Head
from graphcore.nn.moe import MoE
from graphcore.nn.span import Span
from graphcore.nn.spec import BlockSpec

BlockKind = tuple[BlockSpec, tuple[tuple[str, str], ...]]
P = ParamSpec("P")
R = TypeVar("R")
WARMUP_TOKENS = 128  # the length for which Inductor plans its loops; the code then runs for any length from 2 up


class _Example(NamedTuple):
    """Example inputs of a block, padding tokens only: its arguments, and the layer's features if it has them."""

    arguments: tuple[Tensor, Tensor | None, Span, Tensor, Tensor, Tensor | None]
    features: tuple[Tensor, ...]


@dataclass(frozen=True)
class BlockCompiler:
    """Compiles blocks and heads of one decoder.

    Attributes:
        caches: one cache per layer, for the largest batch.
        tables: rope tables, [P, 2, E/2] each.
        on_compile: function called with the name of each function before it is compiled.
        cache_dir: folder of the compiled-code cache; None uses Inductor's default.
    """

    decoder: Decoder
    caches: Sequence[LayerCache]
    tables: Sequence[Tensor]
    device: torch.device
    on_compile: Callable[[str], None]
    cache_dir: Path | None

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.decoder.layers)

    def block(self, index: int) -> Block:
        """Return the layer at this index."""
        block = self.decoder.layers[index]
        assert isinstance(block, Block), f"layer {index} is {type(block).__name__}"
        return block

    def kind(self, index: int) -> BlockKind:
        """Return the key of a layer's compiled graph: its spec and the packing of its matrices."""
        return self.decoder.spec.blocks[index], tuple(packed_formats(self.block(index)).items())

    def compile(self, index: int, batch: int, phase: str) -> BlockFunction:
        """Compile and return the function of the layer's kind. Args: phase: "decode" or "prefill"."""
        is_routed = isinstance(self.block(index).mlp, MoE)
        return self._compile_routed(index, batch, phase) if is_routed else self._compile_block(index, batch, phase)

    def _compile_block(self, index: int, batch: int, phase: str) -> BlockFunction:
        run: BlockFunction = self._named(Block.forward, self._kind_name(index), phase, batch)
        example = self._example(index, batch, phase)
        call_compiling(self.cache_dir, run, self.block(index), *example.arguments, *example.features)
        return run

    def _compile_routed(self, index: int, batch: int, phase: str) -> BlockFunction:
        """Compile both halves of a block with experts; the example is padding only, so no expert's weights are read."""
        block, name = self.block(index), self._kind_name(index)
        route: RouteFunction = self._named(Block.route, name, phase, batch)
        example = self._example(index, batch, phase)
        routed = call_compiling(self.cache_dir, route, block, *example.arguments)
        answers = experts_of(block)(routed.experts_input, routed.chosen)
        if phase == "prefill":
            mark_length(routed.x, answers, routed.shares)
        add: AddFunction = self._named(Block.add_experts, f"{name}_experts", phase, batch)
        call_compiling(self.cache_dir, add, block, routed.x, answers, routed.shares, *example.features)
        return RoutedBlock(route, add)

    def _kind_name(self, index: int) -> str:
        """Return the name of the layer's kind: kinds are numbered in order of the layers that are here."""
        kinds = list(dict.fromkeys(self.kind(layer) for layer, _ in self.decoder.blocks()))
        return f"block{kinds.index(self.kind(index))}"

    def _named(self, function: Callable[P, R], name: str, phase: str, batch: int) -> Callable[P, R]:
        """Return the function wrapped so that its first call compiles it, and report its name to `on_compile`."""
        name = f"{name}_{phase}_{batch}"
        self.on_compile(name)
        return compile_whole(function, name)

    def _example(self, index: int, batch: int, phase: str) -> "_Example":
        """Return example inputs of a block, with padding tokens only."""
        state = StepState.empty(batch, 1 if phase == "decode" else WARMUP_TOKENS, self.device)
        first_step(self.decoder, state, self.tables).replay()
        rope_index = self.decoder.rope_index()[index]
        rope = None if rope_index is None else state.ropes[rope_index]
        features = () if state.per_layer is None else (state.per_layer[index],)
        if phase == "prefill":
            mark_length(state.hidden, *state.ropes, *features)
        cache = self.caches[index].rows(batch)
        # One graph then serves every context_length of more than a page; a size of 1 is never symbolic.
        if isinstance(cache, KVCache):
            for tensor, dim in ((cache.k, 0), (cache.v, 0), (cache.k, 2), (cache.v, 2), (cache.table, 1)):
                if tensor.shape[dim] > 1:
                    mark_length(tensor, dim=dim)
        return _Example((state.hidden, rope, state.span, *cache.inputs), features)

    def compile_head(self, head: Head, batch: int, tokens: int | None, name: str) -> HeadFunction:
        """Compile and return the function of heads with as many rows, on [B, D], or on [B, T, D] with `tokens`."""
        self.on_compile(f"{name}_{batch}")
        run: HeadFunction = compile_whole(Head.forward, f"{name}_{batch}")
        shape = (batch, self.decoder.spec.dim) if tokens is None else (batch, tokens, self.decoder.spec.dim)
        hidden = torch.zeros(shape, dtype=RESIDUAL_DTYPE, device=self.device)
        if tokens is not None:
            mark_length(hidden)
        call_compiling(self.cache_dir, run, head, hidden)
        return run
