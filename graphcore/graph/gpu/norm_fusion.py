"""Fuses RMSNorms of a GPU's decode step into the preceding residual add and the following products.

Legend: B batch, D model dim, L layers.

    norm | q k v | attend | o, add | norm | gate up | down, add       alone
           q k v | attend | o, add        | gate up | down, add       fused: each add also prepares the next norm

A residual add also writes its sum times the norm's weight (rows [B, D], in the compute dtype) and its sum of squares
(squares [4 L, B, 2], for all adds). The next product multiplies these rows and divides by the root mean square.
Consecutive layers that run without the host are fused across layers, too: norms are never streamed, so that an add may
read the next layer's norm weight. Each decode program has its own buffers. The first layer clears the sums of squares,
one more launch per step. A norm without a fused add is launched separately, with the same bits
(kernels/gpu/mean_squares.py).
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
FUSABLE_DTYPES = (torch.float32, torch.bfloat16)  # fp16 might overflow: the rows are not normalised yet


@dataclass(frozen=True)
class FusedLayer:
    """One layer among the consecutive layers whose norms are fused.

    Attributes:
        memory: norm-fusion buffers of the decode program that the layer belongs to.
        layer: index of the layer.
        is_first: True for the first of these layers, which clears the sums of squares of all of them.
        first_norm_is_prepared: True if the layer before has prepared the first norm.
        next_layer_norm: norm in the next layer that reads this layer's output; None if this layer does not prepare it.
    """

    memory: FusionMemory
    layer: int
    is_first: bool
    first_norm_is_prepared: bool
    next_layer_norm: RMSNorm | None

    def fused_norm(self, norm: RMSNorm, add_index: int) -> FusedNorm:
        """Return the buffers of a residual add of this layer, by its index; -1 is the last add of the layer before."""
        return FusedNorm(
            norm.weight, self.memory.rows, self.memory.squares[RESIDUAL_ADDS_OF_LAYER * self.layer + add_index]
        )


class NormFusion:
    """Tracks, during one layer's run, which norm each residual add prepares."""

    def __init__(self, layer: FusedLayer, traced: Traced, modules: Mapping[str, nn.Module], residual: Tensor) -> None:
        assert len(residual) == len(layer.memory.rows), "a decode program has memory for its own sequences"
        self._layer = layer
        adds = [node for node in traced.nodes() if can_prepare_norm(node, layer.memory.rows.dtype)]
        self._output = traced.nodes()[-1].args[0]
        self._norms = {node: norm_after(traced, modules, node) for node in adds}
        self._norms[self._output] = layer.next_layer_norm
        if layer.is_first:
            layer.memory.squares.zero_()
        self._num_inner_adds = 0
        self._current_add: Call = None
        self._prepared: tuple[Tensor, RMSNorm, FusedNorm] | None = None
        first = first_norm(traced, modules) if layer.first_norm_is_prepared else None
        if first is not None:
            self._prepared = residual, first, layer.fused_norm(first, -1)

    def begin(self, node: Call) -> None:
        """Register the operation that runs next: a residual add invalidates what the previous one prepared."""
        if node.target in RESIDUAL_ADDS:
            self._current_add, self._prepared = node, None

    def next_norm(self, residual: Tensor) -> FusedNorm | None:
        """Return the buffers that the current residual add fills for the next norm; None if that norm is not fused."""
        norm, is_output = self._norms.get(self._current_add), self._current_add is self._output
        add_index = RESIDUAL_ADDS_OF_LAYER - 1 if is_output else self._num_inner_adds
        if norm is None or (not is_output and self._num_inner_adds == RESIDUAL_ADDS_OF_LAYER - 1):
            return None
        self._num_inner_adds += not is_output
        fused = self._layer.fused_norm(norm, add_index)
        self._prepared = residual, norm, fused
        return fused

    def prepared_for(self, norm: RMSNorm, x: Tensor) -> FusedNorm | None:
        """Return the buffers that the last residual add has filled for a norm of the residual stream `x`, or None."""
        if self._prepared is None or self._prepared[0] is not x or self._prepared[1] is not norm:
            return None
        return self._prepared[2]


def fusable_norm(modules: Mapping[str, nn.Module], node: Call) -> RMSNorm | None:
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
    return norm if fits and linear.int8_order is None and linear.dtype in FUSABLE_DTYPES else None


def norm_after(traced: Traced, modules: Mapping[str, nn.Module], node: Call) -> RMSNorm | None:
    """Return the norm that is fused into the first products which read the residual stream; None if there is none.

    Args:
        node: operation that computes the residual stream, or a block's input.
    """
    order = traced.order()
    readers = [user for user in sorted(node.users, key=order.__getitem__) if user.args and user.args[0] is node]
    return next((norm for user in readers if (norm := fusable_norm(modules, user)) is not None), None)


def first_norm(traced: Traced, modules: Mapping[str, nn.Module]) -> RMSNorm | None:
    """Return the norm of a block's input if it is fused into products, else None."""
    inputs = (node for node in traced.nodes() if node.op == "placeholder" and node.target == "x")
    return next((norm for node in inputs if (norm := norm_after(traced, modules, node)) is not None), None)


def output_add_prepares_norm(traced: Traced, block: Block) -> bool:
    """Return whether the block's last residual add can prepare the next layer's norm."""
    output = traced.nodes()[-1].args[0]
    return isinstance(output, fx.Node) and can_prepare_norm(output, block.dtype)


def can_prepare_norm(node: Call, dtype: torch.dtype) -> bool:
    """Return whether the operation is a residual add whose kernel can prepare a norm; adding float32 experts cannot."""
    if node.target is operations.add_experts:
        return dtype is not torch.float32
    return node.target in (operations.add_project, operations.add_normed)
