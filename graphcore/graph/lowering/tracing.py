"""Traces a module into a graph of operations, and applies rewrite rules.

    module --trace--> linear, norm, rotate, attend, activation, +, ...   --rules--> operations that a target implements

`trace` runs torch.fx over a module's own forward; the building blocks of nn/ are leaves. The graph refers to modules by
name, so that layers of one spec share one graph.

torch.fx patches `nn.Module.__call__` of the whole process while it traces. So only one thread traces at a time, and
module calls from other threads, such as those of a running engine, are executed as usual.
"""

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, fx, nn
from torch.fx.proxy import TraceError

from graphcore.errors import GraphError
from graphcore.graph.lowering.operations import Call, attend_heads, parts, reorder
from graphcore.graph.lowering.shapes import FUNCTIONS, PARTS, VIEWS, misfit
from graphcore.kernels.backend import KernelTracer
from graphcore.kernels.ops.attend import attend
from graphcore.kernels.ops.gated_convolution import gated_convolution
from graphcore.kernels.ops.gated_delta import delta_heads
from graphcore.kernels.ops.int8_rows import quantize_rows
from graphcore.nn.latent_attention import HeadLinear
from graphcore.nn.linear import Float32Linear, Linear
from graphcore.nn.mlp import ActivationModule
from graphcore.nn.moe import Experts
from graphcore.nn.norm import LayerNorm, RMSNorm, UnitNorm
from graphcore.routing import ScoredRouting

LEAVES = (Linear, Float32Linear, HeadLinear, RMSNorm, LayerNorm, UnitNorm, ActivationModule, Experts)
Rule = Callable[["Traced"], None]
M = TypeVar("M", bound=nn.Module)
TRACE_ERRORS = TraceError, TypeError, ValueError, RuntimeError, AttributeError
_TRACING = threading.RLock()


@dataclass(frozen=True)
class Traced:
    """The traced operations of a module.

    Attributes:
        modules: submodules by their names in the graph.
        misfit: name of an operation that cannot be lowered because its sizes do not fit, or torch.fx's error if
            tracing failed; None if neither.
    """

    graph: fx.Graph
    modules: Mapping[str, nn.Module]
    misfit: str | None = None

    def nodes(self, target: Callable[..., object] | None = None) -> list[Call]:
        """Return the operations, or the calls of `target`, in order."""
        return [node for node in self.graph.nodes if target is None or is_call(node, target)]

    def leaf(self, node: Call, *kinds: type[M]) -> M | None:
        """Return the module that a node calls, if it calls one of those kinds."""
        if not isinstance(node, fx.Node) or node.op != "call_module":
            return None
        module = self.modules[str(node.target)]
        return module if isinstance(module, kinds) else None

    def is_norm(self, node: Call) -> bool:
        """Return whether a node calls a normalisation."""
        return self.leaf(node, RMSNorm, LayerNorm) is not None

    def can_join(self, *nodes: Call) -> bool:
        """Return whether the nodes are products of one input, each read once, with the same rounding and dtype."""
        linears = [self.leaf(node, Linear) for node in nodes]
        if not all(linears) or len(set(nodes)) < len(nodes) or not all(map(is_read_once, nodes)):
            return False
        alike = {(linear.int8_order, linear.dtype) for linear in linears if linear is not None}
        return len(alike) == 1 and len({node.args for node in nodes}) == 1

    def replace(self, node: Call, target: Callable[..., object], *arguments: Any) -> Call:
        """Replace a node by a call of a function; nodes that only it read are removed."""
        with self.graph.inserting_before(node):
            call = self.graph.call_function(target, arguments)
        node.replace_all_uses_with(call)
        self.graph.erase_node(node)
        self.graph.eliminate_dead_code(is_impure_node=is_effect)
        return call

    def order(self) -> dict[Call, int]:
        """Return the position of each node."""
        return {node: place for place, node in enumerate(self.graph.nodes)}


def is_effect(node: Call) -> bool:
    """Return whether dead-code elimination must keep a node: inputs, the output, and operations that write a cache."""
    writers = attend, attend_heads, delta_heads, gated_convolution
    return node.op in ("placeholder", "output") or node.target in writers


class LeafTracer(fx.Tracer):
    """The torch.fx tracer, whose leaf modules are the building blocks of nn/."""

    def __init__(self) -> None:
        super().__init__(autowrap_functions=FUNCTIONS)
        self._thread = threading.get_ident()

    def is_leaf_module(self, module: nn.Module, _name: str) -> bool:
        """Return whether a call of the module is one operation; a subclass is traced, since it may differ."""
        return type(module) in LEAVES

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Record a module call in the graph; a call from another thread runs as usual and is not recorded.

        A projection with low-rank factors is three products: its own, and those of the factors.
        """
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        called = super().call_module(m, forward, args, kwargs)
        if not isinstance(m, Linear) or m.lora_A is None:
            return called
        (x,) = (*args, *kwargs.values())
        return m.with_low_rank(called, x)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Return the proxy of a module's attribute while tracing; other threads get the attribute itself."""
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_arg(self, a: Any) -> Any:
        """Return an argument in the form that the graph stores; a `ScoredRouting` is a constant.

        Raises:
            TraceError: the argument is a tensor computed from weights, and layers would share the first one's.
        """
        if isinstance(a, Tensor) and all(a is not one for one in (*self.root.buffers(), *self.root.parameters())):
            raise TraceError("a tensor that the forward computes from weights")
        if isinstance(a, ScoredRouting):
            return a
        return super().create_arg(a)


class EagerTracer(LeafTracer, KernelTracer):
    """The tracer of a graph that runs on tensors: eager kernels stay calls, and a projection has its factors inside."""

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Record a module call in the graph; a call from another thread runs as usual and is not recorded."""
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return fx.Tracer.call_module(self, m, forward, args, kwargs)


def trace_eager(module: nn.Module) -> fx.Graph:
    """Return the operations of a module's forward as it runs on tensors, without any rewriting.

    Raises:
        GraphError: torch.fx cannot trace the forward.
    """
    try:
        with _TRACING:
            return EagerTracer().trace(module)
    except TRACE_ERRORS as error:
        raise GraphError(f"{type(module).__name__} cannot be traced: {error}") from error


def trace(module: nn.Module, rules: Sequence[Rule] = ()) -> Traced:
    """Return what the module's forward computes for one token of a sequence, rewritten by the rules in their order.

    A forward that cannot be traced (because it branches on values, say) gives an empty graph, and `misfit` says why.
    """
    modules = dict(module.named_modules())
    try:
        with _TRACING:
            graph = LeafTracer().trace(module)
        with_positional_arguments(graph, modules)
    except TRACE_ERRORS as error:
        return Traced(fx.Graph(), modules, str(error).partition("\n")[0])
    node = misfit(graph, modules)
    traced = Traced(graph, modules, None if node is None else operation_name(node, modules))
    if node is None:
        for rule in (without_views, reordered_inputs, *rules):
            rule(traced)
    return traced


def with_positional_arguments(graph: fx.Graph, modules: Mapping[str, nn.Module]) -> None:
    """Pass all arguments of building blocks by position."""
    node: Call
    for node in graph.nodes:
        function = modules[node.target].forward if node.op == "call_module" else node.target
        if node.op == "call_module" or node.target in (*FUNCTIONS, quantize_rows):
            given = inspect.signature(function).bind(*node.args, **node.kwargs)
            given.apply_defaults()
            node.args, node.kwargs = given.args, {}


def without_views(traced: Traced) -> None:
    """Turn views and int8 rounding (which a linear does itself) of x into x, and split and chunk into `parts`."""
    for node in traced.nodes():
        if node.op == "call_method" and node.target in PARTS:
            traced.replace(node, parts, node.args[0], node.target, node.args[1])
            continue
        is_view = node.op == "call_method" and node.target in VIEWS
        if is_view or node.target is quantize_rows:
            node.replace_all_uses_with(node.args[0])
            traced.graph.erase_node(node)


def reordered_inputs(traced: Traced) -> None:
    """Compute the ordered input of each linear that has an input order, apart from the linear.

    So no rule makes it share its input with other linears, or apply the norm before it after the order.
    """
    for node in traced.nodes():
        linear = traced.leaf(node, Linear)
        if linear is not None and linear.input_order is not None:
            with traced.graph.inserting_before(node):
                node.args = (traced.graph.call_function(reorder, (node.args[0], node.target)),)


def is_call(node: object, target: Callable[..., object]) -> bool:
    """Return whether a node calls a function."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target is target


def is_read_once(node: Call) -> bool:
    """Return whether exactly one node reads a node."""
    return len(node.users) == 1


def is_cast(node: object) -> bool:
    """Return whether a node is x.float()."""
    return isinstance(node, fx.Node) and node.op == "call_method" and node.target == "float"


def uncast(node: Any) -> Any:
    """Return the input of a node that is a cast, or the node itself."""
    return node.args[0] if is_cast(node) else node


def operation_name(node: Call, modules: Mapping[str, nn.Module]) -> str:
    """Return the name of a node for messages: a function, a method, or a module by its class and name."""
    if node.op == "call_module":
        return f"{type(modules[node.target]).__name__} {node.target}"
    return node.target if isinstance(node.target, str) else str(node.target.__name__)
