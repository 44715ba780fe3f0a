"""Fuses RMSNorms of a GPU's decode step into the preceding residual add and the following products.

Legend: N tokens, D model dim, L layers.

    norm | q k v | attend | o, add | norm | gate up | down, add       alone
           q k v | attend | o, add        | gate up | down, add       fused: each add also prepares the next norm

A residual add also writes its sum times the norm's weight, in the compute dtype, and the sum of its squares; the next
product multiplies these rows and divides by the root mean square. Consecutive layers that run without the host are
fused across layers, too: norms are never streamed, so that an add may read the next layer's norm weight. Each program
has its own buffers. The first layer clears the sums of squares, one more launch per step. A norm without a fused add is
launched separately, with the same bits (kernels/gpu/mean_squares.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from graphcore.graph.lowering import operations
from graphcore.graph.lowering.operations import Call, NormCall
from graphcore.graph.lowering.residual_adds import RESIDUAL_ADDS
from graphcore.graph.lowering.tracing import Traced
from graphcore.graph.step import FusionMemory
from graphcore.kernels.gpu.mean_squares import LEAST_EPS, MOST_SUMMED, FusedNorm
from graphcore.nn.block import Block
from graphcore.nn.linear import Linear
from graphcore.nn.norm import RMSNorm

RESIDUAL_ADDS_OF_LAYER = 4  # adds of one layer that norms can be fused with; the last index is the layer output
FOLDED = (torch.float32, torch.bfloat16)  # fp16 might overflow: the rows are not normalised yet


@dataclass(frozen=True)
class FusedLayer:
    """One layer among the consecutive layers whose norms are fused.

    Attributes:
        memory: norm-fusion buffers of the program that the layer belongs to.
        layer: index of the layer.
        begins: True for the first of these layers, which clears the sums of squares of all of them.
        takes: True if the layer before has prepared the first norm.
        following: norm in the next layer that reads this layer's output; None for the last of these layers.
    """

    memory: FusionMemory
    layer: int
    begins: bool
    takes: bool
    following: RMSNorm | None

    def fused_norm(self, norm: RMSNorm, place: int) -> FusedNorm:
        """Return the buffers of residual add `place` of this layer; -1 is the last add of the layer before."""
        return FusedNorm(
            norm.weight, self.memory.rows, self.memory.squares[RESIDUAL_ADDS_OF_LAYER * self.layer + place]
        )


class NormFusion:
    """Tracks, during one layer's run, which norm each residual add prepares."""

    def __init__(self, layer: FusedLayer, traced: Traced, modules: Mapping[str, nn.Module], stream: Tensor) -> None:
        assert len(stream) == len(layer.memory.rows), "a program has memory for its own sequences"
        self._layer = layer
        sums = [node for node in traced.nodes() if leaves_sum(node, layer.memory.rows.dtype)]
        self._answer = traced.nodes()[-1].args[0]
        self._following = {node: norm_after(traced, modules, node) for node in sums}
        self._following[self._answer] = layer.following
        if layer.begins:
            layer.memory.squares.zero_()
        self._made = 0
        self._sum: Call = None
        self._left: tuple[Tensor, RMSNorm, FusedNorm] | None = None
        first = first_norm(traced, modules) if layer.takes else None
        if first is not None:
            self._left = stream, first, layer.fused_norm(first, -1)

    def begin(self, node: Call) -> None:
        """Register the operation that runs next: a residual add invalidates what the previous one prepared."""
        if node.target in RESIDUAL_ADDS:
            self._sum, self._left = node, None

    def next_norm(self, stream: Tensor) -> FusedNorm | None:
        """Return the buffers that the current residual add fills for the next norm; None if that norm is not fused."""
        norm = self._following.get(self._sum)
        place = RESIDUAL_ADDS_OF_LAYER - 1 if self._sum is self._answer else self._made
        if norm is None or (self._sum is not self._answer and self._made == RESIDUAL_ADDS_OF_LAYER - 1):
            return None
        self._made += self._sum is not self._answer
        fused = self._layer.fused_norm(norm, place)
        self._left = stream, norm, fused
        return fused

    def left_for(self, norm: RMSNorm, x: Tensor) -> FusedNorm | None:
        """Return the buffers that the last residual add has filled for a norm of the stream `x`, or None."""
        if self._left is None or self._left[0] is not x or self._left[1] is not norm:
            return None
        return self._left[2]


def folded_norm(modules: Mapping[str, nn.Module], node: Call) -> RMSNorm | None:
    """Return the norm that is fused into an operation's products, or None."""
    if node.target not in (operations.project, operations.gated) or node.args[1] is None:
        return None
    linear = node.args[2][0] if node.target is operations.project else node.args[3]
    return applied_norm(modules, node.args[1], modules[linear])


def applied_norm(modules: Mapping[str, nn.Module], call: NormCall, linear: nn.Module) -> RMSNorm | None:
    """Return the norm of a linear's input if it can be fused into the linear's product; None if it needs a launch."""
    norm = modules[call.name]
    if not isinstance(norm, RMSNorm) or not isinstance(linear, Linear):
        return None
    fits = norm.weight.numel() <= MOST_SUMMED and norm.eps >= LEAST_EPS and call.dtype in (None, linear.dtype)
    return norm if fits and linear.int8_order is None and linear.dtype in FOLDED else None


def norm_after(traced: Traced, modules: Mapping[str, nn.Module], node: Call) -> RMSNorm | None:
    """Return the norm that is fused into the first products which read a stream; None if there is none.

    Args:
        node: operation that computes the stream, or a block's input.
    """
    order = traced.order()
    readers = [user for user in sorted(node.users, key=order.__getitem__) if user.args and user.args[0] is node]
    return next((norm for user in readers if (norm := folded_norm(modules, user)) is not None), None)


def first_norm(traced: Traced, modules: Mapping[str, nn.Module]) -> RMSNorm | None:
    """Return the norm of a block's input if it is fused into products, else None."""
    inputs = (node for node in traced.nodes() if node.op == "placeholder" and node.target == "x")
    return next((norm for node in inputs if (norm := norm_after(traced, modules, node)) is not None), None)


def leaves_answer(traced: Traced, block: Block) -> bool:
    """Return whether the block's last residual add can prepare the next layer's norm."""
    answer = traced.nodes()[-1].args[0]
    return isinstance(answer, fx.Node) and leaves_sum(answer, block.dtype)


def leaves_sum(node: Call, dtype: torch.dtype) -> bool:
    """Return whether the operation is a residual add whose kernel can prepare a norm; adding float32 experts cannot."""
    if node.target is operations.add_experts:
        return dtype is not torch.float32
    return node.target in (operations.add_project, operations.add_normed)
