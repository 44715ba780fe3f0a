"""Chooses how blocks and heads run: eager, compiled once per kind (block spec and packing), or on GPU decode kernels.

    decode step on a GPU     decode kernels, if they support the block           gpu/kernel_decode.py
    otherwise                compiled for the block's kind, or eager             block_compiler.py
    offloaded experts        fetched between the block's two halves              step.py

Legend: B batch, T tokens, D model dim.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from graphcore.graph.block_compiler import BlockCompiler, BlockKind
from graphcore.graph.step import (
    BlockFunction,
    DecodeKernels,
    FetchedBlock,
    FetchedExperts,
    FusionMemory,
    HeadFunction,
    Neighbours,
    RoutedBlock,
)
from graphcore.nn.block import Block
from graphcore.nn.decoder import Head
from graphcore.nn.moe import MoE


@dataclass
class BlockFunctions:
    """The functions that run blocks and heads, and the cache of those that are compiled.

    Attributes:
        compiles: True to compile the functions that decode kernels cannot run; False to run them eager.
        fetched: layers whose experts are fetched; None if all experts are resident.
        decode_kernels: a GPU's decode kernels, used instead of compiled functions; None if the device has none.
        compiled: compiled functions, one for each kind of block or head, batch and phase.
    """

    compiler: BlockCompiler
    compiles: bool = True
    fetched: FetchedExperts | None = None
    decode_kernels: DecodeKernels | None = None
    compiled: dict[tuple[BlockKind | str, int, str], Callable[..., Tensor]] = field(default_factory=dict)

    def fusion_memory(self, batch: int, phase: str) -> FusionMemory | None:
        """Return the norm-fusion memory of a new program; None if decode kernels cannot run it."""
        if self.decode_kernels is None or phase != "decode":
            return None
        _, first = next(self.compiler.decoder.blocks())
        return self.decode_kernels.fusion_memory(self.compiler.decoder.spec, first.dtype, batch)

    def block_function(self, index: int, batch: int, phase: str, memory: FusionMemory | None = None) -> BlockFunction:
        """Return the function that runs a layer and fetches its non-resident experts; compile it if its kind is new.

        Args:
            phase: "decode" or "prefill".
            memory: memory of the program that the function is for; None for a function that runs alone.
        """
        fetches = self.fetched is not None and self.fetched.fetches(index, phase)
        run = self._kind_function(index, batch, phase, fetches, memory)
        if self.fetched is None or not fetches or not isinstance(run, RoutedBlock):
            return run
        return FetchedBlock(run, index, self.fetched.fetcher, self.fetched.slots[index])

    def head_function(self, head: Head, batch: int, tokens: int | None, is_usual: bool = True) -> HeadFunction:
        """Return the function that runs heads with as many rows as `head`, on [B, D], or on [B, T, D] with `tokens`.

        Args:
            is_usual: True if other parts of the head have as many rows.
        """
        run = None if tokens is not None else self.device_head(head, batch)
        if run is not None:
            return run
        if not self.compiles:
            return Head.forward
        name = "head" if tokens is None else "head_of_all"
        key = (f"{name}_{head.lm_head.outputs}", batch, "decode")
        if key not in self.compiled:
            self.compiled[key] = self.compiler.compile_head(head, batch, tokens, name if is_usual else f"{name}_rest")
        return self.compiled[key]

    def device_head(self, head: Head, batch: int) -> HeadFunction | None:
        """Return the function that runs the head on decode kernels, for [B, D]; None if they do not support it."""
        return None if self.decode_kernels is None else self.decode_kernels.head_function(head, batch)

    def _neighbours(self, index: int, memory: FusionMemory | None) -> Neighbours | None:
        """Return the layers before and after `index`, each only if it is here and both run without the host."""
        if memory is None:
            return None
        here = {layer for layer, _ in self.compiler.decoder.blocks()}

        def joined(first: int) -> bool:
            fetches = self.fetched is not None and any(self.fetched.fetches(at, "decode") for at in (first, first + 1))
            return {first, first + 1} <= here and not fetches

        before = self.compiler.block(index - 1) if joined(index - 1) else None
        return Neighbours(index, memory, before, self.compiler.block(index + 1) if joined(index) else None)

    def _kind_function(
        self, index: int, batch: int, phase: str, fetches: bool, memory: FusionMemory | None
    ) -> BlockFunction:
        block = self.compiler.block(index)
        if self.decode_kernels is not None and phase == "decode":
            run = self.decode_kernels.block_function(block, batch, fetches, self._neighbours(index, memory))
            if run is not None:
                return run
        if not self.compiles:
            return RoutedBlock(Block.route, Block.add_experts) if isinstance(block.mlp, MoE) else Block.forward
        key = (self.compiler.kind(index), batch, phase)
        if key not in self.compiled:
            self.compiled[key] = self.compiler.compile(index, batch, phase)
        return self.compiled[key]
