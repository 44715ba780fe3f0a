"""What a token's values look like at each operation of a trace, as far as it follows from the modules.

Legend: D model dim, H heads, E head dim, C experts chosen for a token.

A decode step's targets know vectors, and heads on their way to attention. So a trace is taken only if every size is
known and fits what reads it, and if heads are read as heads by nobody but their norms, rotation and attention.
"""

import operator
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from torch import fx, nn

from graphcore.kernels.attend import attend
from graphcore.nn.activation import ActivationModule, capped
from graphcore.nn.int8_rows import quantize_rows
from graphcore.nn.linear import Linear
from graphcore.nn.moe import Experts, choose, weighted_sum, without_padding
from graphcore.nn.norm import LayerNorm, RMSNorm
from graphcore.nn.rope import rotate

VIEWS = ("flatten", "unflatten")  # of a decode step's single token, they move nothing
CASTS = ("float", "to")
PARTS = ("split", "chunk")
INPUT = "x"
SAME = (rotate, attend, capped, quantize_rows, without_padding)  # their answer looks like their first argument
READ_BY: Mapping[object, tuple[object, ...]] = {  # who may read what looks like heads
    "unflatten": (RMSNorm, LayerNorm, rotate, attend),
    RMSNorm: (rotate, attend),
    LayerNorm: (rotate, attend),
    rotate: (attend,),
    attend: ("flatten",),
    Experts: (weighted_sum,),
}
Node = Any  # an fx.Node, whose arguments torch types as all that there may be
Shape = Any  # sizes behind [B, T], such as (D,) or (H, E); a list where there are several answers; None: not known


def misfit(graph: fx.Graph, modules: Mapping[str, nn.Module]) -> Node | None:
    """Return the first operation whose sizes are not known or do not fit, or that may not read heads; None: all fit.

    Nodes get "is_heads" in their meta: whether their answers are heads side by side.
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
                is_value = kinds[user] is attend and user.args[2] is node and kinds[node] != "unflatten"
                if kinds[user] not in READ_BY.get(kinds[node], ()) or is_value:
                    return user
    return None


def _shape_of(node: Node, modules: Mapping[str, nn.Module], shapes: Mapping[Node, Shape]) -> Shape:
    given = [shapes.get(one) for one in node.args if isinstance(one, fx.Node)]
    first = given[0] if given else None
    match node.op:
        case "placeholder":
            return _input_shape(node, modules) if node.target == INPUT else None
        case "call_module":
            return _shape_after(modules[str(node.target)], given)
        case "call_method":
            return _shape_of_view(node, first)
        case "call_function" if node.target in SAME:
            return first
        case "call_function" if node.target is weighted_sum:
            return first[1:] if first else None
        case "call_function" if node.target is choose:
            return [(node.args[1],), (node.args[1],)]
        case "call_function" if node.target is operator.getitem and isinstance(first, list):
            return first[node.args[1]] if isinstance(node.args[1], int) else None
        case "call_function" if node.target in (operator.add, operator.mul):
            return first if all(shape == first for shape in given) else None
    return None


def _shape_after(module: nn.Module, given: Sequence[Shape]) -> Shape:
    """Return the shape of a building block's answer."""
    first = given[0] if given else None
    match module:
        case Linear():
            return (module.outputs,) if first == (module.inputs,) else None
        case RMSNorm() | LayerNorm():
            is_computed = len(given) > 1  # the dtype, from another tensor
            return first if first and first[-1] == module.weight.numel() and not is_computed else None
        case Experts():
            return (*given[1], *first) if first and given[1] else None
        case ActivationModule():
            return first
    return None


def _shape_of_view(node: Node, shape: Shape) -> Shape:
    """Return the shape behind a method that moves or rounds values."""
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
    """Return what the module's input looks like: as what reads it, or its activation, expects."""
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
