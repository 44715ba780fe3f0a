"""Lists the operations that a GPU's decode kernels support, and says why a module is unsupported.

`OPERATIONS` maps each operation to the method of `DeviceRun` (graph/gpu/kernel_entries.py) that runs it and to a check
of the call. Nothing here imports a kernel, because memory for a GPU is also planned on machines without Triton;
kernel_entries.py looks up its methods by these names at import.
"""

import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from graphcore.graph.lowering import operations
from graphcore.graph.lowering.operations import Call
from graphcore.graph.lowering.targets import lower_to_kernels, missing_entry
from graphcore.graph.lowering.tracing import Traced
from graphcore.kernels import limits
from graphcore.kernels.gpu.device_packing import DevicePacking
from graphcore.kernels.gpu.layout import DEVICE_LAYOUTS
from graphcore.kernels.gpu.matrix import MOST_COLUMNS
from graphcore.kernels.ops.gated_convolution import gated_convolution
from graphcore.kernels.ops.gated_delta import delta_heads
from graphcore.nn.attention import Attention
from graphcore.nn.decoder import Decoder, Head
from graphcore.nn.latent_attention import HeadLinear
from graphcore.nn.linear import Linear
from graphcore.nn.mlp import ActivationModule, capped
from graphcore.nn.moe import ExpertLinear, choose_experts, scaled_by_gate, without_padding
from graphcore.nn.norm import LayerNorm, RMSNorm

MOST_HEAD_DIM = 256


class KernelEntry(NamedTuple):
    """The implementation of one operation by decode kernels.

    Attributes:
        method: name of the method of `DeviceRun` that launches the kernels.
        obstacle: function that takes a call and the block's modules by name and returns why the call is unsupported, or
            None if it is supported; None if every call is.
    """

    method: str
    obstacle: Callable[[Call, Mapping[str, nn.Module]], str | None] | None = None


def _sum_obstacle(node: Call, modules: Mapping[str, nn.Module]) -> str | None:
    """Return why a call of `add_normed` is unsupported, or None."""
    if isinstance(modules[node.args[2].name], LayerNorm):
        return "a LayerNorm behind a sublayer has no decode kernel"
    return None


def _attention_obstacle(node: Call, modules: Mapping[str, nn.Module]) -> str | None:
    """Return why a call of `attend_heads` is unsupported, or None."""
    if node.args[1] is None:
        return "attention to another layer's keys has no decode kernel"
    if node.args[6] is not None:
        return "values that are normalised have no decode kernel"
    norms = [modules[norm.name] if norm else None for norm in node.args[4:6]]
    if any(isinstance(norm, LayerNorm) for norm in norms):
        return "heads that a LayerNorm normalises have no decode kernel"
    if len({(norm.eps, norm.scale_in_float32) if isinstance(norm, RMSNorm) else None for norm in norms}) > 1:
        return "queries and keys that are normalised in different ways have no decode kernel"
    return None


def _heads_obstacle(node: Call, modules: Mapping[str, nn.Module]) -> str | None:
    """Return why a call of `project_heads` is unsupported, or None."""
    heads = modules[node.args[2]]
    assert isinstance(heads, HeadLinear), f"{node.args[2]} is a {type(heads).__name__}"
    return None if heads.packing is None else f"packed matrices of heads ({heads.packing.format}) have no decode kernel"


def _choice_obstacle(node: Call, _modules: Mapping[str, nn.Module]) -> str | None:
    """Return why a call of `route` or `choose_experts` is unsupported, or None."""
    return None if node.args[-2] is None else "shares of experts that are scaled have no decode kernel"


OPERATIONS: Mapping[object, KernelEntry] = {
    operations.reorder: KernelEntry("reorder"),
    operations.project: KernelEntry("project"),
    operations.gated: KernelEntry("gated"),
    operations.add_project: KernelEntry("add_project"),
    operations.add_normed: KernelEntry("add_normed", _sum_obstacle),
    operations.add_normed_and_norm: KernelEntry("add_normed_and_norm"),
    operations.attend_heads: KernelEntry("attend_heads", _attention_obstacle),
    operations.project_heads: KernelEntry("project_heads", _heads_obstacle),
    operations.route: KernelEntry("route", _choice_obstacle),
    operations.add_experts: KernelEntry("add_experts"),
    operations.add_scaled: KernelEntry("add_scaled"),
    operations.scaled_sum: KernelEntry("scaled_sum"),
    operations.gate: KernelEntry("gate"),
    operations.parts: KernelEntry("parts"),
    RMSNorm: KernelEntry("normed"),
    LayerNorm: KernelEntry("normed"),
    ActivationModule: KernelEntry("activated"),
    capped: KernelEntry("capped"),
    delta_heads: KernelEntry("delta_heads"),
    gated_convolution: KernelEntry("gated_convolution"),
    scaled_by_gate: KernelEntry("scaled_by_gate"),
    choose_experts: KernelEntry("choose", _choice_obstacle),
    without_padding: KernelEntry("without_padding"),
    "float": KernelEntry("in_float32"),
    "to": KernelEntry("in_dtype"),
    getattr: KernelEntry("attribute"),
    operator.getitem: KernelEntry("item"),
}


def entries_of(kernels: type, besides: Collection[str] = ()) -> Mapping[object, Callable[..., Any]]:
    """Return the function that runs each operation: the method of the class that `OPERATIONS` names.

    Args:
        kernels: class whose public methods are the entries.
        besides: names of its other public methods.

    Raises:
        AssertionError: an operation has no method, or a method has no operation.
    """
    methods = {name: one for name, one in vars(kernels).items() if callable(one) and not name.startswith("_")}
    named = {entry.method for entry in OPERATIONS.values()}
    missing, unused = named - methods.keys(), methods.keys() - named - set(besides)
    assert not missing, f"{kernels.__name__} has no method {', '.join(sorted(missing))}, which OPERATIONS names"
    assert not unused, f"OPERATIONS names no {', '.join(sorted(unused))}, a method of {kernels.__name__}"
    return {operation: methods[entry.method] for operation, entry in OPERATIONS.items()}


def block_obstacle(block: nn.Module, batch: int) -> str | None:
    """Return why a GPU's decode kernels cannot run the block for that many sequences, or None."""
    if batch > limits.MOST_TOKENS:
        return f"batches of more than {limits.MOST_TOKENS} have no decode kernels, this is {batch}"
    traced = lower_to_kernels(block)
    return (
        missing_entry(traced, OPERATIONS, "GPU kernel", changes_x=True)
        or _obstacle_of_calls(traced)
        or _obstacle_of_attention(block)
        or _obstacle_of_matrices(block)
    )


def device_obstacle(decoder: Decoder, batch: int) -> str | None:
    """Return why the first unsupported block, or the head, cannot run; None if all can."""
    for index, block in enumerate(decoder.layers):
        obstacle = block_obstacle(block, batch)
        if obstacle is not None:
            return f"layer {index}: {obstacle}"
    return head_obstacle(decoder.head, batch)


def head_obstacle(head: Head, batch: int) -> str | None:
    """Return why the head cannot run on a GPU's decode kernels, or None."""
    if batch > limits.MOST_TOKENS:
        return f"batches of more than {limits.MOST_TOKENS} have no decode kernels, this is {batch}"
    missing = missing_entry(lower_to_kernels(head), OPERATIONS, "GPU kernel", changes_x=False)
    return missing or _obstacle_of_linear("lm_head", head.lm_head)


def _obstacle_of_calls(traced: Traced) -> str | None:
    """Return why a call is unsupported, for the first such call in the order of `OPERATIONS`, or None."""
    for operation, entry in OPERATIONS.items():
        if entry.obstacle is None:
            continue
        for node in traced.nodes():
            obstacle = entry.obstacle(node, traced.modules) if node.target is operation else None
            if obstacle is not None:
                return obstacle
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
