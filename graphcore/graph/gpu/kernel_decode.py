"""Runs a decode step on a GPU's decode kernels, called one after another, for every block without an obstacle.

Legend: B batch (one token of each), D model dim, K kv heads, V vocab.

torch.compile is not used, since no operations are left to fuse between the kernels. A block's operations are lowered
once for each spec (lowering/targets.py); kernel_entries.py launches the kernel of each operation, and
kernel_obstacles.py says which blocks are unsupported.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from graphcore.graph.gpu.kernel_entries import DeviceRun
from graphcore.graph.gpu.kernel_obstacles import block_obstacle, head_obstacle
from graphcore.graph.gpu.norm_fusion import RESIDUAL_ADDS_OF_LAYER, FusedLayer, first_norm, output_add_prepares_norm
from graphcore.graph.lowering import operations
from graphcore.graph.lowering.targets import lower_to_kernels
from graphcore.graph.lowering.tracing import Traced
from graphcore.graph.step import BlockFunction, FusionMemory, HeadFunction, Neighbours, RoutedBlock
from graphcore.kernels.gpu.experts.few_tokens import most_arrivals
from graphcore.kvcache.buffers import KVCache, LayerCache
from graphcore.nn.block import Block, Routed
from graphcore.nn.decoder import Head
from graphcore.nn.norm import RMSNorm
from graphcore.nn.span import Span
from graphcore.nn.spec import BlockSpec, ModelSpec


@dataclass(frozen=True)
class DeviceBlocks:
    """The decode kernels for blocks of any spec that has no obstacle.

    Attributes:
        arrivals: [at least B * K] int32 zeros, counters by which the Triton programs that share a reduction (attention
            splits, a router, a token's experts) find out which of them finishes last.
    """

    arrivals: Tensor
    _obstacles: dict[tuple[Block, int], str | None] = field(default_factory=dict)
    _operations: dict[BlockSpec, Traced] = field(default_factory=dict)

    @classmethod
    def allocate(cls, caches: Sequence[LayerCache], device: torch.device) -> "DeviceBlocks":
        """Return decode kernels for layers with these caches."""
        splits = max((one.table.shape[0] * one.k.shape[1] for one in caches if isinstance(one, KVCache)), default=0)
        return cls(torch.zeros(max(splits, most_arrivals(device)), dtype=torch.int32, device=device))

    def fusion_memory(self, spec: ModelSpec, dtype: torch.dtype, batch: int) -> FusionMemory:
        """Return norm-fusion buffers for a new program, allocated outside of any capture."""
        device = self.arrivals.device
        rows = torch.zeros(batch, spec.dim, dtype=dtype, device=device)
        squares = torch.zeros(RESIDUAL_ADDS_OF_LAYER * len(spec.blocks), batch, 2, dtype=torch.int64, device=device)
        return FusionMemory(rows, squares)

    def block_function(
        self, block: Block, batch: int, fetches: bool, neighbours: Neighbours | None = None
    ) -> BlockFunction | None:
        """Return the function that runs the block, or None if the block is unsupported."""
        if self._obstacle(block, batch) is not None:
            return None
        if fetches:
            return RoutedBlock(self.route, Block.add_experts)
        return (
            self.forward
            if neighbours is None
            else partial(self.forward, fused_layer=self._layer(block, batch, neighbours))
        )

    def _layer(self, block: Block, batch: int, neighbours: Neighbours) -> FusedLayer:
        """Return how a layer's norms are fused with those of its neighbours."""
        before, after = neighbours.before, neighbours.after
        return FusedLayer(
            neighbours.memory,
            neighbours.layer,
            is_first=before is None or self._obstacle(before, batch) is not None,
            first_norm_is_prepared=before is not None and self._handed(before, block, batch) is not None,
            next_layer_norm=None if after is None else self._handed(block, after, batch),
        )

    def _obstacle(self, block: Block, batch: int) -> str | None:
        """Return why a block is unsupported, or None; cached, because a layer's neighbours ask again."""
        key = block, batch
        if key not in self._obstacles:
            self._obstacles[key] = block_obstacle(block, batch)
        return self._obstacles[key]

    def _handed(self, first: Block, second: Block, batch: int) -> RMSNorm | None:
        """Return the first norm of `second` if it is fused into the last residual add of `first`, else None."""
        if self._obstacle(first, batch) is not None or self._obstacle(second, batch) is not None:
            return None
        if not output_add_prepares_norm(self._lowered(first), first):
            return None
        return first_norm(self._lowered(second), dict(second.named_modules()))

    def head_function(self, head: Head, batch: int) -> HeadFunction | None:
        """Return the function that runs the head, or None if the head is unsupported."""
        return run_head if head_obstacle(head, batch) is None else None

    def forward(
        self,
        block: Block,
        x: Tensor,
        rope: Tensor | None,
        span: Span,
        k_cache: Tensor,
        v_cache: Tensor,
        table: Tensor | None,
        fused_layer: FusedLayer | None = None,
    ) -> Tensor:
        """Run the block as `Block.forward` does, for one token of each sequence; changes `x` in place.

        Args:
            fused_layer: state of norm fusion with the neighbouring layers; None to launch every norm.
        """
        residual = x.view(len(x), -1)
        inputs = {"x": residual, "rope": rope, "span": span, "k_cache": k_cache, "v_cache": v_cache, "table": table}
        output = DeviceRun(dict(block.named_modules()), self.arrivals, fused_layer).run(self._lowered(block), inputs)
        assert output is residual, "the residual stream is changed in place"
        return x

    def route(
        self,
        block: Block,
        x: Tensor,
        rope: Tensor | None,
        span: Span,
        k_cache: Tensor,
        v_cache: Tensor,
        table: Tensor | None,
    ) -> Routed:
        """Run the block up to its experts, as `Block.route` does; changes `x` in place."""
        rows = x.view(len(x), -1)
        inputs = {"x": rows, "rope": rope, "span": span, "k_cache": k_cache, "v_cache": v_cache, "table": table}
        run = DeviceRun(dict(block.named_modules()), self.arrivals)
        _, fed, _, chosen, shares, _ = run.run(self._lowered(block), inputs, until=operations.add_experts)
        return Routed(x, fed[:, None], chosen[:, None], shares[:, None])

    def _lowered(self, block: Block) -> Traced:
        """Return the operations of the block's spec, traced once."""
        if block.spec not in self._operations:
            self._operations[block.spec] = lower_to_kernels(block)
        return self._operations[block.spec]


def run_head(head: Head, x: Tensor) -> Tensor:
    """Return logits [B, V] float32 of the residual stream `x` [B, D], as `Head.forward` does."""
    logits: Tensor = DeviceRun(dict(head.named_modules())).run(lower_to_kernels(head), {"x": x.contiguous()})
    return logits
