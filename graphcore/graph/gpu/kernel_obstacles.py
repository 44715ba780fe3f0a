"""Says which modules a GPU's decode kernels (graph/gpu/kernel_entries.py) can run, and why others cannot.

Imports no kernel: these functions are also called where Triton is not installed.
"""

import operator

import torch
from torch import nn

from graphcore.graph.lowering import operations
from graphcore.graph.lowering.targets import lower_to_kernels, missing_entry
from graphcore.graph.lowering.tracing import Traced
from graphcore.kernels import limits
from graphcore.kernels.gpu.device_packing import DevicePacking
from graphcore.kernels.gpu.layout import DEVICE_LAYOUTS
from graphcore.kernels.gpu.matrix import MOST_COLUMNS
from graphcore.kernels.ops.gated_delta import delta_heads
from graphcore.nn.attention import Attention
from graphcore.nn.decoder import Decoder, Head
from graphcore.nn.linear import Linear
from graphcore.nn.mlp import capped
from graphcore.nn.moe import ExpertLinear, choose_experts, scaled_by_gate, without_padding
from graphcore.nn.norm import LayerNorm, RMSNorm

MOST_HEAD_DIM = 256
OPERATIONS = frozenset(  # operations that graph/gpu/kernel_entries.py has an entry for
    {
        operations.project,
        operations.gated,
        operations.add_project,
        operations.add_normed,
        operations.add_normed_and_norm,
        operations.attend_heads,
        operations.route,
        operations.add_experts,
        operations.add_scaled,
        operations.scaled_sum,
        operations.gate,
        operations.parts,
        "float",
        "to",
        capped,
        choose_experts,
        delta_heads,
        scaled_by_gate,
        without_padding,
        getattr,
        operator.getitem,
        RMSNorm,
        LayerNorm,
    }
)


def block_obstacle(block: nn.Module, batch: int) -> str | None:
    """Return why the block cannot run a decode step of that many sequences on a GPU's decode kernels, or None."""
    if batch > limits.MOST_TOKENS:
        return f"batches of more than {limits.MOST_TOKENS} have no decode kernels, this is {batch}"
    traced = lower_to_kernels(block)
    return (
        missing_entry(traced, OPERATIONS, "GPU kernel", changes_x=True)
        or _obstacle_of_norms(traced)
        or _obstacle_of_choice(traced)
        or _obstacle_of_attention(block)
        or _obstacle_of_matrices(block)
    )


def device_obstacle(decoder: Decoder, batch: int) -> str | None:
    """Return the obstacle of the first block or head that has one; None if all can run."""
    for index, block in enumerate(decoder.layers):
        obstacle = block_obstacle(block, batch)
        if obstacle is not None:
            return f"layer {index}: {obstacle}"
    return head_obstacle(decoder.head, batch)


def head_obstacle(head: Head, batch: int) -> str | None:
    """Return why the head cannot run on a GPU's decode kernels, or None."""
    if batch > limits.MOST_TOKENS:
        return f"batches of more than {limits.MOST_TOKENS} have no decode kernels, this is {batch}"
    operations = missing_entry(lower_to_kernels(head), OPERATIONS, "GPU kernel", changes_x=False)
    return operations or _obstacle_of_linear("lm_head", head.lm_head)


def _obstacle_of_norms(traced: Traced) -> str | None:
    for node in traced.nodes(operations.add_normed):
        if isinstance(traced.modules[node.args[2].name], LayerNorm):
            return "a LayerNorm behind a sublayer has no decode kernel"
    for node in traced.nodes(operations.attend_heads):
        if node.args[1] is None:
            return "attention to another layer's keys has no decode kernel"
        if node.args[6] is not None:
            return "values that are normalised have no decode kernel"
        norms = [traced.modules[norm.name] if norm else None for norm in node.args[4:6]]
        if any(isinstance(norm, LayerNorm) for norm in norms):
            return "heads that a LayerNorm normalises have no decode kernel"
        if len({(norm.eps, norm.scale_in_float32) if isinstance(norm, RMSNorm) else None for norm in norms}) > 1:
            return "queries and keys that are normalised in different ways have no decode kernel"
    return None


def _obstacle_of_choice(traced: Traced) -> str | None:
    for node in (*traced.nodes(operations.route), *traced.nodes(choose_experts)):
        if node.args[-1] is not None:
            return "shares of experts that are scaled have no decode kernel"
    return None


def _obstacle_of_attention(block: nn.Module) -> str | None:
    for module in block.modules():
        width = module.spec.head_dim if isinstance(module, Attention) else 2
        if width % 2 or width > MOST_HEAD_DIM:
            return f"heads of {width} have no decode kernel, only even ones up to {MOST_HEAD_DIM}"
    return None


def _obstacle_of_matrices(block: nn.Module) -> str | None:
    for name, module in block.named_modules():
        obstacle = _obstacle_of_linear(name, module) if isinstance(module, Linear | ExpertLinear) else None
        if obstacle is not None:
            return obstacle
    return None


def _obstacle_of_linear(name: str, linear: Linear | ExpertLinear) -> str | None:
    """Return why no decode kernel multiplies with the matrix `name`, or None."""
    packing = linear.packing
    if packing is not None and not (isinstance(packing, DevicePacking) and packing.format in DEVICE_LAYOUTS):
        return f"no GPU kernel multiplies {packing.format}, the format of {name}"
    if isinstance(linear, ExpertLinear):
        return None
    if linear.int8_order is not None and linear.dtype is torch.float32:
        return "float32 keeps to the reference's order of operations where activations are int8"
    if max(linear.inputs, linear.outputs) > MOST_COLUMNS and name != "lm_head":
        return f"rows of {max(linear.inputs, linear.outputs)}, the norm kernel holds {MOST_COLUMNS}"
    return None
