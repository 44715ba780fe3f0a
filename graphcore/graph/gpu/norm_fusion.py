"""Fuses RMSNorms of a GPU's decode step into the preceding residual add and the following products.

Legend: N tokens, D model dim, L layers.

    norm | q k v | attend | o, add | norm | gate up | down, add       alone
           q k v | attend | o, add        | gate up | down, add       fused: each sum leaves its row for a norm

Consecutive layers of a program that run without the host are fused. A sum reads the next layer's norm, which it may,
because norms never move; its row waits in memory that only this program has. The first layer clears the counters,
one more launch for a step. A norm that no sum was left for is a launch, with the same bits
(kernels/gpu/mean_squares.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from graphcore.graph.lowering import operations
from graphcore.graph.lowering.operations import Call, NormCall
from graphcore.graph.lowering.sums import SUMS
from graphcore.graph.lowering.tracing import Traced
from graphcore.graph.step import FusionMemory
from graphcore.kernels.gpu.mean_squares import LEAST_EPS, MOST_SUMMED, FusedNorm
from graphcore.nn.block import Block
from graphcore.nn.linear import Linear
from graphcore.nn.norm import RMSNorm

SUMS_OF_LAYER = 4  # sums of one layer that may be left for norms; the last place is that of the layer's answer
FOLDED = (torch.float32, torch.bfloat16)  # fp16 might not hold a row that is not scaled


@dataclass(frozen=True)
class FusedLayer:
    """One layer among the consecutive layers whose norms are fused.

    Attributes:
        memory: memory of the program that the layer belongs to.
        layer: index of the layer.
        begins: True for the first of these layers, which makes the squares of all its sums zeros.
        takes: True if the layer before leaves a row for the first norm.
        following: the norm that reads the layer's answer, in the next layer; None for the last of these layers.
    """

    memory: FusionMemory
    layer: int
    begins: bool
    takes: bool
    following: RMSNorm | None

    def fused_norm(self, norm: RMSNorm, place: int) -> FusedNorm:
        """Return where a sum of this layer is left for a norm; place -1 is that of the layer before's answer."""
        return FusedNorm(norm.weight, self.memory.rows, self.memory.squares[SUMS_OF_LAYER * self.layer + place])


class NormFusion:
    """The residual adds of one layer in their order, each left for the norm that is fused with it."""

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
        """Take note of the operation that runs next: a sum changes the stream, whose row is then of no use."""
        if node.target in SUMS:
            self._sum, self._left = node, None

    def next_norm(self, stream: Tensor) -> FusedNorm | None:
        """Return where the sum that is made now in a stream is left; None if no norm follows that products apply."""
        norm = self._following.get(self._sum)
        place = SUMS_OF_LAYER - 1 if self._sum is self._answer else self._made
        if norm is None or (self._sum is not self._answer and self._made == SUMS_OF_LAYER - 1):
            return None
        self._made += self._sum is not self._answer
        fused = self._layer.fused_norm(norm, place)
        self._left = stream, norm, fused
        return fused

    def left_for(self, norm: RMSNorm, x: Tensor) -> FusedNorm | None:
        """Return what the last sum has left for a norm of the stream `x`."""
        if self._left is None or self._left[0] is not x or self._left[1] is not norm:
            return None
        return self._left[2]


def folded_norm(modules: Mapping[str, nn.Module], node: Call) -> RMSNorm | None:
    """Return the norm that an operation's products apply themselves, or None."""
    if node.target not in (operations.project, operations.gated) or node.args[1] is None:
        return None
    linear = node.args[2][0] if node.target is operations.project else node.args[3]
    return applied_norm(modules, node.args[1], modules[linear])


def applied_norm(modules: Mapping[str, nn.Module], call: NormCall, linear: nn.Module) -> RMSNorm | None:
    """Return the norm of a linear's input, if the linear's product can apply it; None if the norm needs a launch."""
    norm = modules[call.name]
    if not isinstance(norm, RMSNorm) or not isinstance(linear, Linear):
        return None
    fits = norm.weight.numel() <= MOST_SUMMED and norm.eps >= LEAST_EPS and call.dtype in (None, linear.dtype)
    return norm if fits and linear.int8_order is None and linear.dtype in FOLDED else None


def norm_after(traced: Traced, modules: Mapping[str, nn.Module], node: Call) -> RMSNorm | None:
    """Return the norm that the first products of a stream apply themselves; None if none do.

    Args:
        node: operation that makes the stream, or a block's input.
    """
    order = traced.order()
    readers = [user for user in sorted(node.users, key=order.__getitem__) if user.args and user.args[0] is node]
    return next((norm for user in readers if (norm := folded_norm(modules, user)) is not None), None)


def first_norm(traced: Traced, modules: Mapping[str, nn.Module]) -> RMSNorm | None:
    """Return the norm of a block's input, if products apply it."""
    inputs = (node for node in traced.nodes() if node.op == "placeholder" and node.target == "x")
    return next((norm for node in inputs if (norm := norm_after(traced, modules, node)) is not None), None)


def leaves_answer(traced: Traced, block: Block) -> bool:
    """Return whether the sum that is a block's answer can be left for a norm."""
    answer = traced.nodes()[-1].args[0]
    return isinstance(answer, fx.Node) and leaves_sum(answer, block.dtype)


def leaves_sum(node: Call, dtype: torch.dtype) -> bool:
    """Return whether the operation's kernel can leave its sum for a norm; float32 experts are summed without one."""
    if node.target is operations.add_experts:
        return dtype is not torch.float32
    return node.target in (operations.add_project, operations.add_normed)
