"""What a module computes as a graph of operations, and the rules by which several operations become one.

    module --trace--> linear, norm, rotate, attend, activation, +, ...   --rules--> what a target has an entry for

`trace` follows a module's own forward with torch.fx; the building blocks of nn/ are its leaves. A rule looks for one
pattern, and puts one of the functions below in its place. They are never called: they name what the targets of a decode
step, the native program (native_block.py) and a GPU's kernels (device_block.py), have entries for. Modules stand in the
graph by their names, so that layers of one spec share one graph.
"""

import inspect
import operator
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import TraceError

from graphcore.graph.shapes import CASTS, PARTS, VIEWS, misfit
from graphcore.kernels.attend import attend
from graphcore.nn.activation import ActivationModule, capped
from graphcore.nn.int8_rows import quantize_rows
from graphcore.nn.linear import Linear
from graphcore.nn.moe import Experts, choose, weighted_sum, without_padding
from graphcore.nn.norm import LayerNorm, RMSNorm
from graphcore.nn.rope import rotate

LEAVES = (Linear, RMSNorm, LayerNorm, ActivationModule, Experts)
FUNCTIONS = (attend, rotate, choose, without_padding, weighted_sum, capped)
INPUTS = ("x", "rope", "span", "k_cache", "v_cache")  # of a block's forward; a head has the first
NARROW = (torch.float32, torch.bfloat16, torch.float16)
Rule = Callable[["Traced"], None]


class NormCall(NamedTuple):
    """A call of a normalisation.

    Attributes:
        name: the module's.
        dtype: of its answer; None: that of what it gets.
    """

    name: str
    dtype: torch.dtype | None


M = TypeVar("M", bound=nn.Module)
Call = Any  # an fx.Node, whose arguments torch types as all that there may be


def project(x: Call, norm: NormCall | None, linears: tuple[str, ...], activation: str | None, wide: bool) -> NoReturn:
    """Stand for (activation of) linear(norm(x)), for each of the linears; `wide`: answers stay float32."""
    raise NotImplementedError


def gated(x: Call, norm: NormCall | None, gate: str, up: str, activation: str, wide: bool) -> NoReturn:
    """Stand for activation(gate(norm(x))) * up(norm(x)); `wide`: it stays float32."""
    raise NotImplementedError


def add_project(stream: Call, x: Call, norm: NormCall | None, linear: str) -> NoReturn:
    """Stand for stream + linear(norm(x))."""
    raise NotImplementedError


def add_normed(stream: Call, x: Call, norm: NormCall) -> NoReturn:
    """Stand for stream + norm(x)."""
    raise NotImplementedError


def add_normed_and_norm(stream: Call, x: Call, norm: NormCall, norm_of_sum: NormCall) -> NoReturn:
    """Stand for s = stream + norm(x), and norm_of_sum(s)."""
    raise NotImplementedError


def add_experts(stream: Call, x: Call, norm: NormCall | None, chosen: Call, shares: Call, experts: str) -> NoReturn:
    """Stand for stream + the weighted sum of what the chosen experts make of norm(x)."""
    raise NotImplementedError


def add_scaled(stream: Call, x: Call, factor: float) -> NoReturn:
    """Stand for stream + factor * x."""
    raise NotImplementedError


def scaled_sum(x: Call, y: Call, factor: float) -> NoReturn:
    """Stand for x + factor * y, where x must stay as it is."""
    raise NotImplementedError


def gate(x: Call, activation: str | None, y: Call) -> NoReturn:
    """Stand for activation(x) * y."""
    raise NotImplementedError


def parts(x: Call, how: str, sizes: int | list[int]) -> NoReturn:
    """Stand for x.split(sizes, -1) or x.chunk(sizes, -1), as `how` says: one behind another."""
    raise NotImplementedError


def attend_heads(
    q: Call, k: Call, v: Call, rope: Call | None, q_norm: NormCall | None, k_norm: NormCall | None, *rest: Any
) -> NoReturn:
    """Stand for attend(rotate(q_norm(q)), rotate(k_norm(k)), v, *rest), which writes the cache."""
    raise NotImplementedError


@dataclass(frozen=True)
class Traced:
    """A module's operations.

    Attributes:
        modules: of the module that was traced, by the names that the graph has.
        misfit: what there can be no entry for, in words: an operation of sizes that do not fit, or what the trace
            itself could not follow; None: nothing.
    """

    graph: fx.Graph
    modules: Mapping[str, nn.Module]
    misfit: str | None = None

    def nodes(self, target: Callable[..., object] | None = None) -> list[Call]:
        """Return the operations, or the calls of one function, in order."""
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
        """Return whether nodes are products of one input, each read once, that round it and their answers alike."""
        linears = [self.leaf(node, Linear) for node in nodes]
        if not all(linears) or len(set(nodes)) < len(nodes) or not all(map(is_read_once, nodes)):
            return False
        alike = {(linear.int8_order, linear.dtype) for linear in linears if linear is not None}
        return len(alike) == 1 and len({node.args for node in nodes}) == 1

    def replace(self, node: Call, target: Callable[..., object], *arguments: Any) -> Call:
        """Put a call of a function in the place of a node; what only that node read goes."""
        with self.graph.inserting_before(node):
            call = self.graph.call_function(target, arguments)
        node.replace_all_uses_with(call)
        self.graph.erase_node(node)
        self.graph.eliminate_dead_code(is_impure_node=is_effect)
        return call

    def order(self) -> dict[Call, int]:
        """Return the place of each node."""
        return {node: place for place, node in enumerate(self.graph.nodes)}


def is_effect(node: Call) -> bool:
    """Return whether a node must stay though nobody reads it: inputs, the output, attention, which writes the cache."""
    return node.op in ("placeholder", "output") or node.target in (attend, attend_heads)


class LeafTracer(fx.Tracer):
    """Follows a forward down to the building blocks of nn/."""

    def __init__(self) -> None:
        super().__init__(autowrap_functions=FUNCTIONS)

    def is_leaf_module(self, module: nn.Module, _name: str) -> bool:
        """Return whether a call of the module is one operation; a subclass may compute something else."""
        return type(module) in LEAVES

    def create_arg(self, a: Any) -> Any:
        """Return an argument as the graph has it.

        Raises:
            TraceError: it is a tensor that was computed from weights: layers would share the first one's.
        """
        if isinstance(a, Tensor) and all(a is not one for one in (*self.root.buffers(), *self.root.parameters())):
            raise TraceError("a tensor that the forward computes from weights")
        return super().create_arg(a)


def trace(module: nn.Module, rules: Sequence[Rule] = ()) -> Traced:
    """Return what the module's forward computes, for one token of a sequence, rewritten by the rules in their order.

    What cannot be followed (a forward that asks for values, say) has no operations, and a misfit that says why.
    """
    modules = dict(module.named_modules())
    try:
        graph = LeafTracer().trace(module)
        with_positional_arguments(graph, modules)
    except (TraceError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        return Traced(fx.Graph(), modules, str(error).partition("\n")[0])
    node = misfit(graph, modules)
    traced = Traced(graph, modules, None if node is None else name_of(node, modules))
    if node is None:
        for rule in (without_views, *rules):
            rule(traced)
    return traced


def with_positional_arguments(graph: fx.Graph, modules: Mapping[str, nn.Module]) -> None:
    """Building blocks get all their arguments, by place."""
    node: Call
    for node in graph.nodes:
        function = modules[node.target].forward if node.op == "call_module" else node.target
        if node.op == "call_module" or node.target in (*FUNCTIONS, quantize_rows):
            given = inspect.signature(function).bind(*node.args, **node.kwargs)
            given.apply_defaults()
            node.args, node.kwargs = given.args, {}


def without_views(traced: Traced) -> None:
    """x.flatten(), x.unflatten(), and codes, which a linear knows how to make, become x; cuts become `parts`."""
    for node in traced.nodes():
        if node.op == "call_method" and node.target in PARTS:
            traced.replace(node, parts, node.args[0], node.target, node.args[1])
            continue
        is_view = node.op == "call_method" and node.target in VIEWS
        if is_view or node.target is quantize_rows:
            node.replace_all_uses_with(node.args[0])
            traced.graph.erase_node(node)


def without_casts(traced: Traced) -> None:
    """x.float() and x.to(a float dtype) become x: for targets that compute in float32."""
    for node in traced.nodes():
        is_narrow = node.op == "call_method" and node.args[1:] and node.args[1] in NARROW
        if is_cast(node) or is_narrow:
            node.replace_all_uses_with(node.args[0])
            traced.graph.erase_node(node)


def gate_and_up(traced: Traced) -> None:
    """activation(gate(x)) * up(x) becomes `gated`."""
    for node in traced.nodes(operator.mul):
        activation, up = node.args
        if traced.leaf(activation, ActivationModule) is None:
            continue
        gate = activation.args[0]
        wide, gate, up = is_cast(gate) or is_cast(up), uncast(gate), uncast(up)
        if traced.can_join(gate, up):
            traced.replace(node, gated, *gate.args, None, gate.target, up.target, activation.target, wide)


def product_and_activation(traced: Traced) -> None:
    """activation(linear(x)) becomes `project`."""
    for node in traced.nodes():
        if traced.leaf(node, ActivationModule) is None:
            continue
        product = uncast(node.args[0])
        if traced.leaf(product, Linear) and is_read_once(product):
            x = product.args[0]
            traced.replace(node, project, x, None, (product.target,), node.target, is_cast(node.args[0]))


def gates(traced: Traced) -> None:
    """Any other activation(x) * y, and x * y, become `gate`."""
    for node in traced.nodes(operator.mul):
        x, y = node.args
        if not isinstance(x, fx.Node) or not isinstance(y, fx.Node):
            continue
        if traced.leaf(x, ActivationModule) is None:
            x, y = y, x
        activation = traced.leaf(x, ActivationModule) and is_read_once(x)
        traced.replace(node, gate, x.args[0] if activation else x, x.target if activation else None, y)


def heads(traced: Traced) -> None:
    """Norms of heads, their rotation and attention, which writes the cache, become `attend_heads`."""
    for node in traced.nodes(attend):
        (q, k, v), rest = node.args[:3], node.args[3:]
        ropes = [one.args[1] for one in (q, k) if one.target is rotate]
        if len(set(ropes)) > 1 or len(ropes) == 1:
            continue
        if ropes:
            q, k = q.args[0], k.args[0]
        norms = [norm_call(one) if traced.is_norm(one) and one.meta["is_heads"] else None for one in (q, k)]
        q, k = (one if norm is None else one.args[0] for one, norm in zip((q, k), norms, strict=True))
        traced.replace(node, attend_heads, q, k, v, ropes[0] if ropes else None, *norms, *rest)


def queries_keys_values(traced: Traced) -> None:
    """The three products of one input that one attention reads become one `project`."""
    for node in traced.nodes(attend_heads):
        products = node.args[:3]
        if not traced.can_join(*products):
            continue
        first = min(products, key=traced.order().__getitem__)
        with traced.graph.inserting_before(first):
            names = tuple(one.target for one in products)
            joined = traced.graph.call_function(project, (first.args[0], None, names, None, False))
            parts = [traced.graph.call_function(operator.getitem, (joined, index)) for index in range(3)]
        for product, part in zip(products, parts, strict=True):
            product.replace_all_uses_with(part)
            traced.graph.erase_node(product)


def products(traced: Traced) -> None:
    """Any other linear(x) becomes `project`."""
    for node in traced.nodes():
        if traced.leaf(node, Linear) is not None:
            traced.replace(node, project, *node.args, None, (node.target,), None, False)


def wide_products(traced: Traced) -> None:
    """A product that is cast to float32 and read by nobody else stays float32 instead."""
    for node in traced.nodes(project):
        if is_read_once(node) and is_cast(next(iter(node.users))):
            cast = next(iter(node.users))
            node.args = (*node.args[:4], True)
            cast.replace_all_uses_with(node)
            traced.graph.erase_node(cast)


def product_and_sum(traced: Traced) -> None:
    """stream + linear(x) becomes `add_project`."""
    for node, stream, product in sums_in_place(traced):
        if is_call(product, project) and is_read_once(product) and product.args[3] is None:
            if source_of(traced, product.args[0]) is stream:
                continue  # rows of the sum would be written while others are still computed from the stream
            x, norm, (linear,), *_ = product.args
            traced.replace(node, add_project, stream, x, norm, linear)


def norm_and_sum(traced: Traced) -> None:
    """stream + norm(x) becomes `add_normed`; what is normalised stays float32."""
    for node, stream, normed in sums_in_place(traced):
        if traced.is_norm(normed) and is_read_once(normed):
            x = normed.args[0]
            call = traced.replace(node, add_normed, stream, x, norm_call(normed))
            if is_call(x, project) and is_read_once(x):
                x.args = (*x.args[:4], True)
            assert call.args[1] is x, "the answer that is normalised"


def experts_and_sum(traced: Traced) -> None:
    """stream + the weighted sum of experts' answers becomes `add_experts`."""
    for node, stream, answer in sums_in_place(traced):
        if not is_call(answer, weighted_sum) or not is_read_once(answer):
            continue
        experts, shares = answer.args
        choice = shares.args[0]
        if traced.leaf(experts, Experts) and is_read_once(experts) and is_call(choice, choose):
            x, chosen, *_ = experts.args
            call = traced.replace(node, add_experts, stream, x, None, chosen, shares, experts.target)
            for one in (choice, *choice.users, chosen):
                call.prepend(one)  # the experts come right behind their choice


def scaled_sums(traced: Traced) -> None:
    """Any other stream + x, or stream + x * number, becomes `add_scaled`; `scaled_sum` where the stream must stay."""
    in_place = {node: stream is node.args[1] for node, stream, _ in sums_in_place(traced)}
    for node in traced.nodes(operator.add):
        stream, x = reversed(node.args) if in_place.get(node) else node.args
        factor: object = 1.0
        if not isinstance(stream, fx.Node) or not isinstance(x, fx.Node):
            continue
        if is_call(x, operator.mul) and is_read_once(x):
            x, factor = x.args if isinstance(x.args[0], fx.Node) else x.args[::-1]
        traced.replace(node, add_scaled if node in in_place else scaled_sum, stream, x, factor)


def sums_when_read(traced: Traced) -> None:
    """A sum moves behind whatever comes before its first reader, so that the stream may be changed where it lies."""
    for node in reversed(traced.nodes(operator.add)):
        order = traced.order()
        if node.users:
            min(node.users, key=order.__getitem__).prepend(node)


def sums_in_place(traced: Traced) -> Iterator[tuple[Call, Call, Call]]:
    """Yield stream + x with its operands, for each sum that nobody reads the old stream behind."""
    for node in traced.nodes(operator.add):
        stream, x = node.args
        if not is_stream(stream):
            stream, x = x, stream
        if is_stream(stream) and dict(last_readers(traced.graph))[stream] is node:
            yield node, stream, x


def source_of(traced: Traced, node: Call) -> Call:
    """Return what a node normalises and casts, or the node."""
    while traced.is_norm(node) or (isinstance(node, fx.Node) and node.op == "call_method" and node.target in CASTS):
        node = node.args[0]
    return node


def is_stream(node: object) -> bool:
    """Return whether a node is the residual stream: what the module is given, or a sum with that."""
    if not isinstance(node, fx.Node):
        return False
    is_part = is_call(node, operator.getitem) and is_call(node.args[0], add_normed_and_norm) and node.args[1] == 0
    return bool(node.op == "placeholder" or is_part) or node.target in (operator.add, *SUMS)


def norm_and_products(traced: Traced) -> None:
    """What reads norm(x) reads x and normalises it itself, however many there are."""
    for node in traced.nodes():
        place = NORM_PLACES.get(node.target)
        if place is not None and traced.is_norm(node.args[place]) and node.args[place + 1] is None:
            _fold_norm(traced, node, place)
    traced.graph.eliminate_dead_code(is_impure_node=is_effect)


def norm_and_product(traced: Traced) -> None:
    """The only product that reads norm(x) reads x and normalises it itself."""
    for node in traced.nodes():
        place = NORM_PLACES.get(node.target)
        if place is None or node.target is add_experts or not traced.is_norm(node.args[place]):
            continue
        if is_read_once(node.args[place]) and node.args[place + 1] is None:
            _fold_norm(traced, node, place)
    traced.graph.eliminate_dead_code(is_impure_node=is_effect)


def norm_of_sum(traced: Traced) -> None:
    """A normalised answer, its sum with the stream and that sum's norm become `add_normed_and_norm`."""
    for node in traced.nodes(add_normed):
        after = traced.modules[node.args[2].name]
        norms = [user for user in node.users if traced.is_norm(user)]
        if len(norms) != 1 or not isinstance(after, RMSNorm) or traced.modules[norms[0].target].eps != after.eps:
            continue
        with traced.graph.inserting_before(node):
            both = traced.graph.call_function(add_normed_and_norm, (*node.args, norm_call(norms[0])))
            total, normed = (traced.graph.call_function(operator.getitem, (both, index)) for index in range(2))
        for old, new in ((norms[0], normed), (node, total)):
            old.replace_all_uses_with(new)
            traced.graph.erase_node(old)


SUMS = (add_project, add_normed, add_normed_and_norm, add_experts, add_scaled)  # with the stream, the first argument
NORM_PLACES: Mapping[object, int] = {
    project: 0,
    gated: 0,
    add_project: 1,
    add_experts: 1,
}  # of x; the norm is behind it


def _fold_norm(traced: Traced, node: Call, place: int) -> None:
    """Have a product normalise what it reads, if that is still there: a sum may change the stream before."""
    arguments, order = list(node.args), traced.order()
    norm = arguments[place]
    if any(user.target in SUMS and order[user] < order[node] for user in norm.args[0].users if user is not node):
        return
    arguments[place : place + 2] = [norm.args[0], norm_call(norm)]
    node.args = tuple(arguments)


def norm_call(node: Call) -> NormCall:
    """Return how a node normalises."""
    return NormCall(node.target, node.args[1] if len(node.args) > 1 else None)


def is_call(node: object, target: Callable[..., object]) -> bool:
    """Return whether a node calls a function."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target is target


def is_read_once(node: Call) -> bool:
    """Return whether one node alone reads a node."""
    return len(node.users) == 1


def is_cast(node: object) -> bool:
    """Return whether a node is x.float()."""
    return isinstance(node, fx.Node) and node.op == "call_method" and node.target == "float"


def uncast(node: Any) -> Any:
    """Return what a node casts, or the node."""
    return node.args[0] if is_cast(node) else node


def missing_entry(traced: Traced, entries: Container[object], what: str, changes_x: bool) -> str | None:
    """Return which operation has no entry, or that the answer is not where it is wanted; None if all can run.

    Args:
        entries: functions, and classes of modules.
        what: an entry is, such as "native instruction".
        changes_x: the answer is to lie where the module's input does, as a block's.
    """
    if traced.misfit is not None:
        return f"no {what} for {traced.misfit}"
    for node in traced.nodes():
        is_weight = any(isinstance(one, fx.Node) and one.op == "get_attr" for one in node.args)
        is_unknown = node.op == "placeholder" and node.users and node.target not in INPUTS
        if is_unknown or (is_weight and node.target in (gate, add_scaled, scaled_sum)):
            return f"no {what} for {node.target if is_unknown else 'a weight in a gate or a sum'}"
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        key = type(traced.modules[node.target]) if node.op == "call_module" else node.target
        if key not in entries:
            return f"no {what} for {name_of(node, traced.modules)}"
    answer = traced.nodes()[-1].args[0]
    while changes_x and is_stream(answer) and answer.op != "placeholder":
        answer = answer.args[0]
    if changes_x and (not is_stream(answer) or answer.op != "placeholder"):
        return f"no {what} for an answer that is no sum with the stream"
    if not changes_x and not any(is_call(answer, one) for one in (project, capped)):
        return f"no {what} for an answer that is no product"
    return None


def name_of(node: Call, modules: Mapping[str, nn.Module]) -> str:
    """Return what a node is called in messages: a function, a method, or a module by its class and name."""
    if node.op == "call_module":
        return f"{type(modules[node.target]).__name__} {node.target}"
    return node.target if isinstance(node.target, str) else str(node.target.__name__)


def last_readers(graph: fx.Graph) -> Iterator[tuple[Call, Call]]:
    """Yield each node that is read, and the last node that reads it."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node.users:
            yield node, max(readers(node), key=order.__getitem__)


def readers(node: Call) -> Iterator[Call]:
    """Yield who reads a node, or what may be the same memory: its parts and casts."""
    for user in node.users:
        yield user
        is_view = user.target in (parts, operator.getitem) or (user.op == "call_method" and user.target in CASTS)
        if is_view and user.target not in SUMS:
            yield from readers(user)
