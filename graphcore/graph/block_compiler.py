"""Makes one compiled function for all layers of a kind (same spec and packing), and one for all heads of a size.

    JustInTime       compiled in this process, by torch.compile               compile.py
    ArtefactWriter   exported and compiled into a package (task=export)       artefacts.py
    Artefacts        loaded from a package (graph.artefacts)                  artefacts.py

The example arguments are padding tokens only, so that the caches do not change.

Legend: B batch, T tokens, D model dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from graphcore.graph.compile import FunctionMaker
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

BlockKind = tuple[BlockSpec, tuple[tuple[str, str], ...], tuple[torch.Size, ...]]
WARMUP_TOKENS = 128  # the length for which Inductor plans its loops; the code then runs for any length from 2 up


class _Example(NamedTuple):
    """Example inputs of a block, padding tokens only.

    Attributes:
        arguments: arguments of `Block.route`.
        features: features of the layer, if it has them.
        lengths: tensors among both, each with a dimension whose size differs from call to call.
    """

    arguments: tuple[Tensor, Tensor | None, Span, Tensor, Tensor, Tensor | None]
    features: tuple[Tensor, ...]
    lengths: tuple[tuple[Tensor, int], ...]


@dataclass(frozen=True)
class BlockCompiler:
    """Compiles blocks and heads of one decoder.

    Attributes:
        caches: one cache per layer, for the largest batch.
        tables: rope tables, [P, 2, E/2] each.
        make: maker of the compiled functions.
    """

    decoder: Decoder
    caches: Sequence[LayerCache]
    tables: Sequence[Tensor]
    device: torch.device
    make: FunctionMaker

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
        """Return the key of a layer's compiled graph: its spec, the packing of its matrices, its cache's shapes.

        Arguments of a decode step differ in nothing else, so that its calls need not compare them (`JustInTime`).
        """
        shapes = tuple(one.shape for one in self.caches[index].inputs if one is not None)
        return self.decoder.spec.blocks[index], tuple(packed_formats(self.block(index)).items()), shapes

    def compile(self, index: int, batch: int, phase: str) -> BlockFunction:
        """Compile and return the function of the layer's kind. Args: phase: "decode" or "prefill"."""
        is_routed = isinstance(self.block(index).mlp, MoE)
        return self._compile_routed(index, batch, phase) if is_routed else self._compile_block(index, batch, phase)

    def _compile_block(self, index: int, batch: int, phase: str) -> BlockFunction:
        example, name = self._example(index, batch, phase), f"{self._kind_name(index)}_{phase}_{batch}"
        arguments = *example.arguments, *example.features
        return self.make(Block.forward, name, self.block(index), arguments, example.lengths)

    def _compile_routed(self, index: int, batch: int, phase: str) -> BlockFunction:
        """Compile both halves of a block with experts; the example is padding only, so no expert's weights are read."""
        block, kind, example = self.block(index), self._kind_name(index), self._example(index, batch, phase)
        route: RouteFunction = self.make(
            Block.route, f"{kind}_{phase}_{batch}", block, example.arguments, example.lengths
        )
        routed = route(block, *example.arguments)
        answers = experts_of(block)(routed.experts_input, routed.chosen)
        arguments = routed.x, answers, routed.shares, *example.features
        lengths = _tokens_in(*arguments) if phase == "prefill" else ()
        add: AddFunction = self.make(Block.add_experts, f"{kind}_experts_{phase}_{batch}", block, arguments, lengths)
        return RoutedBlock(route, add)

    def _kind_name(self, index: int) -> str:
        """Return the name of the layer's kind: kinds are numbered in order of the layers that are here."""
        kinds = list(dict.fromkeys(self.kind(layer) for layer, _ in self.decoder.blocks()))
        return f"block{kinds.index(self.kind(index))}"

    def _example(self, index: int, batch: int, phase: str) -> _Example:
        """Return example inputs of a block, with padding tokens only."""
        state = StepState.empty(batch, 1 if phase == "decode" else WARMUP_TOKENS, self.device)
        first_step(self.decoder, state, self.tables).replay()
        rope_index = self.decoder.rope_index()[index]
        rope = None if rope_index is None else state.ropes[rope_index]
        features = () if state.per_layer is None else (state.per_layer[index],)
        lengths = list(_tokens_in(state.hidden, rope, *features)) if phase == "prefill" else []
        cache = self.caches[index].rows(batch)
        # One graph then serves every context_length of more than a page; a size of 1 is never symbolic.
        if isinstance(cache, KVCache):
            of_cache = ((cache.k, 0), (cache.v, 0), (cache.k, 2), (cache.v, 2), (cache.table, 1))
            lengths += [(tensor, dim) for tensor, dim in of_cache if tensor.shape[dim] > 1]
        return _Example((state.hidden, rope, state.span, *cache.inputs), features, tuple(lengths))

    def compile_head(self, head: Head, batch: int, tokens: int | None, name: str) -> HeadFunction:
        """Compile and return the function of heads with as many rows, on [B, D], or on [B, T, D] with `tokens`."""
        shape = (batch, self.decoder.spec.dim) if tokens is None else (batch, tokens, self.decoder.spec.dim)
        hidden = torch.zeros(shape, dtype=RESIDUAL_DTYPE, device=self.device)
        lengths = () if tokens is None else _tokens_in(hidden)
        return self.make(Head.forward, f"{name}_{batch}", head, (hidden,), lengths)


def _tokens_in(*tensors: Tensor | None) -> tuple[tuple[Tensor, int], ...]:
    """Return each tensor [B, T, ...] with its dimension of tokens."""
    return tuple((tensor, 1) for tensor in tensors if tensor is not None)
