"""What of a module the GPU's own decode kernels compute (graph/device_block.py), and why others cannot run.

Knows no kernel: this is asked where nothing of Triton may be there.
"""

import operator

import torch
from torch import nn

from graphcore.graph import fusing
from graphcore.graph.fusing import Traced, trace
from graphcore.kernels.device_layout import DEVICE_LAYOUTS
from graphcore.kernels.gpu.matrix import MOST_COLUMNS, MOST_TOKENS
from graphcore.nn.activation import capped
from graphcore.nn.attention import Attention
from graphcore.nn.decoder import Decoder, Head
from graphcore.nn.linear import Linear
from graphcore.nn.moe import ExpertLinear, choose, without_padding
from graphcore.nn.norm import LayerNorm, RMSNorm
from graphcore.quant.device_packing import DevicePacking

MOST_HEAD_DIM = 256
RULES = (
    fusing.gate_and_up,
    fusing.product_and_activation,
    fusing.heads,
    fusing.queries_keys_values,
    fusing.products,
    fusing.wide_products,
    fusing.gates,
    fusing.sums_when_read,
    fusing.product_and_sum,
    fusing.norm_and_sum,
    fusing.experts_and_sum,
    fusing.scaled_sums,
    fusing.norm_of_sum,
    fusing.norm_and_product,
)
OPERATIONS = frozenset(  # that graph/device_block.py has an entry for
    {
        fusing.project,
        fusing.gated,
        fusing.add_project,
        fusing.add_normed,
        fusing.add_normed_and_norm,
        fusing.attend_heads,
        fusing.add_experts,
        fusing.add_scaled,
        fusing.scaled_sum,
        fusing.gate,
        fusing.parts,
        "float",
        "to",
        capped,
        choose,
        without_padding,
        getattr,
        operator.getitem,
        RMSNorm,
        LayerNorm,
    }
)


def lowered(module: nn.Module) -> Traced:
    """Return a module's operations as a GPU's kernels take them."""
    return trace(module, RULES)


def obstacle_of(block: nn.Module, batch: int) -> str | None:
    """Return why a decode step of that many sequences cannot run through the block on a GPU's kernels, or None."""
    if batch > MOST_TOKENS:
        return f"batches of more than {MOST_TOKENS} have no decode kernels, this is {batch}"
    traced = lowered(block)
    return (
        fusing.missing_entry(traced, OPERATIONS, "GPU kernel", changes_x=True)
        or _obstacle_of_norms(traced)
        or _obstacle_of_attention(block)
        or _obstacle_of_matrices(block)
    )


def first_obstacle(decoder: Decoder, batch: int) -> str | None:
    """Return the obstacle of the first block that has one, or of the head, or None: all of them run."""
    for index, block in enumerate(decoder.layers):
        obstacle = obstacle_of(block, batch)
        if obstacle is not None:
            return f"layer {index}: {obstacle}"
    return obstacle_of_head(decoder.head, batch)


def obstacle_of_head(head: Head, batch: int) -> str | None:
    """Return why a decode step's head cannot run on a GPU's kernels, or None."""
    if batch > MOST_TOKENS:
        return f"batches of more than {MOST_TOKENS} have no decode kernels, this is {batch}"
    operations = fusing.missing_entry(lowered(head), OPERATIONS, "GPU kernel", changes_x=False)
    return operations or _obstacle_of_linear("lm_head", head.lm_head)


def _obstacle_of_norms(traced: Traced) -> str | None:
    for node in traced.nodes(fusing.add_normed):
        if isinstance(traced.modules[node.args[2].name], LayerNorm):
            return "a LayerNorm behind a sublayer has no decode kernel"
    for node in traced.nodes(fusing.attend_heads):
        norms = [traced.modules[norm.name] if norm else None for norm in node.args[4:6]]
        if any(isinstance(norm, LayerNorm) for norm in norms):
            return "heads that a LayerNorm normalises have no decode kernel"
        if len({(norm.eps, norm.scale_in_float32) if isinstance(norm, RMSNorm) else None for norm in norms}) > 1:
            return "queries and keys that are normalised in different ways have no decode kernel"
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
