"""Shape inference for one token through a trace, from the sizes of the modules.

Legend: D model dim, H heads, E head dim, C experts chosen for a token.

The targets of a decode step support vectors and, up to attention, tensors of heads. So a trace is accepted only if
every size is known and fits its readers, and if only norms of heads, rotation and attention read tensors of heads.
"""

import operator
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from torch import fx, nn

from graphcore.kernels.ops.attend import attend
from graphcore.kernels.ops.gated_convolution import gated_convolution
from graphcore.kernels.ops.gated_delta import delta_heads
from graphcore.kernels.ops.int8_rows import quantize_rows
from graphcore.nn.latent_attention import HeadLinear, joined_heads
from graphcore.nn.linear import Linear
from graphcore.nn.mlp import ActivationModule, capped, scaled
from graphcore.nn.moe import Experts, choose_experts, scaled_by_gate, weighted_sum, without_padding
from graphcore.nn.norm import LayerNorm, RMSNorm, UnitNorm
from graphcore.nn.rope import rotate, scale_queries

VIEWS = ("flatten", "unflatten")  # no data is moved: a decode step has one token per row
CASTS = ("float", "to")
PARTS = ("split", "chunk")
INPUT = "x"
FEATURES, FEATURES_GATE = "per_layer", "per_layer.gate"  # an input, and the Linear whose output has its shape
LIKE_FIRST = (rotate, scale_queries, capped, scaled, without_padding)  # output shaped as the first argument
LIKE_SECOND = (delta_heads, scaled_by_gate)  # output shaped as the second argument
# Functions of nn/ and kernels/; each is one operation.
FUNCTIONS = (*LIKE_FIRST, *LIKE_SECOND, attend, joined_heads, gated_convolution, choose_experts, weighted_sum)
READ_BY: Mapping[object, tuple[object, ...]] = {  # operations that may read values with the shape of heads
    "unflatten": (RMSNorm, LayerNorm, UnitNorm, rotate, scale_queries, attend),
    RMSNorm: (rotate, scale_queries, attend),
    LayerNorm: (rotate, scale_queries, attend),
    UnitNorm: (attend,),
    joined_heads: (rotate, attend),
    rotate: (scale_queries, attend),
    scale_queries: (attend,),
    attend: ("flatten",),
    Experts: (weighted_sum,),
}
VALUES = ("unflatten", UnitNorm)  # operations whose heads attention may read as values
Node = Any  # an fx.Node; torch's types for its arguments are too wide to be of use
Shape = Any  # sizes after [B, T], such as (D,) or (H, E); a list if there are several outputs; None if unknown


def misfit(graph: fx.Graph, modules: Mapping[str, nn.Module]) -> Node | None:
    """Return the first operation whose sizes are unknown or do not fit, or that must not read heads; None if all fit.

    Sets "is_heads" in each node's meta: True if its output has an axis of heads.
    """
    shapes: dict[Node, Shape] = {}
    kinds = {node: type(modules[str(node.target)]) if node.op == "call_module" else node.target for node in graph.nodes}
    for node in list(graph.nodes):
        if node.op == "output" or node.target is getattr:
            continue
        shapes[node] = _shape_of(node, modules, shapes)
        node.meta["is_heads"] = isinstance(shapes[node], tuple) and len(shapes[node]) > 1
        if node.op.startswith("call") and shapes[node] is None:
            return node
    for node in shapes:
        if node.meta["is_heads"]:
            for user in node.users:
                is_value = kinds[user] is attend and user.args[2] is node and kinds[node] not in VALUES
                if kinds[user] not in READ_BY.get(kinds[node], ()) or is_value:
                    return user
    return None


def _shape_of(node: Node, modules: Mapping[str, nn.Module], shapes: Mapping[Node, Shape]) -> Shape:
    given = [shapes.get(one) for one in node.args if isinstance(one, fx.Node)]
    first = given[0] if given else None
    match node.op:
        case "placeholder":
            gate = modules.get(FEATURES_GATE) if node.target == FEATURES else None
            if isinstance(gate, Linear):
                return (gate.outputs,)
            return _input_shape(node, modules) if node.target == INPUT else None
        case "call_module":
            return _shape_after(modules[str(node.target)], given)
        case "call_method":
            return _shape_of_view(node, first)
        case "call_function" if node.target in (*LIKE_FIRST, quantize_rows):
            return first
        case "call_function" if node.target in LIKE_SECOND:
            return given[1] if first else None
        case "call_function" if node.target is attend:  # whose last argument is the first feature of values
            return (*first[:-1], first[-1] - node.args[-1]) if first else None
        case "call_function" if node.target is joined_heads:
            return _shape_of_joined(given, node.args[2])
        case "call_function" if node.target is gated_convolution:
            return (first[0] // 3,) if first else None
        case "call_function" if node.target is weighted_sum:
            return first[1:] if first else None
        case "call_function" if node.target is choose_experts:
            return [(node.args[1],), (node.args[1],)]
        case "call_function" if node.target is operator.getitem and isinstance(first, list):
            return first[node.args[1]] if isinstance(node.args[1], int) else None
        case "call_function" if node.target in (operator.add, operator.mul):
            return first if all(shape == first for shape in given) else None
    return None


def _shape_after(module: nn.Module, given: Sequence[Shape]) -> Shape:
    """Return the shape of a building block's output."""
    first = given[0] if given else None
    match module:
        case Linear() | HeadLinear():
            return (module.outputs,) if first == (module.inputs,) else None
        case RMSNorm() | LayerNorm():
            is_computed = len(given) > 1  # the dtype comes from another tensor
            return first if first and first[-1] == module.weight.numel() and not is_computed else None
        case Experts():
            return (*given[1], *first) if first and given[1] else None
        case ActivationModule() | UnitNorm():
            return first
    return None


def _shape_of_joined(parts: Sequence[Shape], heads: int) -> Shape:
    """Return the shape of heads of two parts, each given as a vector."""
    if not all(isinstance(part, tuple) and len(part) == 1 for part in parts):
        return None
    return heads, sum(part[0] // heads for part in parts)


def _shape_of_view(node: Node, shape: Shape) -> Shape:
    """Return the shape of the output of a tensor method: a view, a split or a cast."""
    if not isinstance(shape, tuple):
        return None
    size = node.args[1] if len(node.args) > 1 else None
    match node.target:
        case "float" | "to" if not node.kwargs:
            return shape
        case "flatten" if size == -2:
            return (prod(shape),)
        case "unflatten" if size == -1 and len(shape) == 1:
            heads, width = node.args[2]
            return (shape[0] // width, width) if heads in (-1, shape[0] // width) else None
        case "split" if node.kwargs.get("dim") == -1 and isinstance(size, list | tuple) and len(shape) == 1:
            return [(part,) for part in size] if sum(size) == shape[0] else None
        case "chunk" if node.kwargs.get("dim") == -1 and isinstance(size, int) and len(shape) == 1:
            return [(shape[0] // size,)] * size if shape[0] % size == 0 else None
    return None


def _input_shape(node: Node, modules: Mapping[str, nn.Module]) -> Shape:
    """Return the shape of the module's input, as the linears and norms that read it (or its activation) expect it."""
    widths, read = set(), [node]
    for value in read:
        for user in value.users:
            module = modules[str(user.target)] if user.op == "call_module" else None
            if isinstance(module, Linear):
                widths.add(module.inputs)
            elif isinstance(module, RMSNorm | LayerNorm):
                widths.add(module.weight.numel())
            elif (user.target in CASTS or isinstance(module, ActivationModule)) and user not in read:
                read.append(user)
    return (widths.pop(),) if len(widths) == 1 else None
