"""Rewrite rules for residual adds, which run in place if nothing reads the old stream later.

As in rules.py, a rule matches one pattern in a graph and replaces it by one operation.
"""

import operator
from collections.abc import Iterator

from torch import fx

from graphcore.graph.lowering.operations import (
    Call,
    add_experts,
    add_normed,
    add_normed_and_norm,
    add_project,
    add_scaled,
    norm_call,
    parts,
    project,
    scaled_sum,
    sum_experts,
)
from graphcore.graph.lowering.shapes import CASTS
from graphcore.graph.lowering.tracing import Traced, is_call, is_effect, is_read_once, uncast
from graphcore.nn.mlp import scaled
from graphcore.nn.moe import Experts, choose_experts, weighted_sum
from graphcore.nn.norm import RMSNorm

# Operations that change their first argument, the residual stream, in place.
RESIDUAL_ADDS = (add_project, add_normed, add_normed_and_norm, add_experts, add_scaled, scaled)


def sums_when_read(traced: Traced) -> None:
    """Move each sum to just before its first reader, so that the stream may be changed in place."""
    for node in reversed(traced.nodes(operator.add)):
        order = traced.order()
        if node.users:
            min(node.users, key=order.__getitem__).prepend(node)


def low_rank_sums(traced: Traced) -> None:
    """Turn stream + (product + B(A(x))) into (stream + product) + B(A(x)), and other such sums into `add_project`."""
    for node, stream, total in sums_in_place(traced):
        summands = _low_rank_summands(_uncast_once(total)) if is_read_once(total) else None
        if summands is None:
            continue
        with traced.graph.inserting_before(node):
            inner = traced.graph.call_function(operator.add, (stream, summands[0]))
        node.args = (inner, summands[1])
        traced.graph.eliminate_dead_code(is_impure_node=is_effect)
    for node in traced.nodes(operator.add):
        summands = _low_rank_summands(node)
        if summands is not None:
            product, added = summands
            traced.replace(node, add_project, product, *added.args[:2], added.args[2][0])


def _low_rank_summands(total: Call) -> tuple[Call, Call] | None:
    """Return the product of a projection and that of its second factor if a value is their sum; else None."""
    if not is_call(total, operator.add):
        return None
    product, added = map(uncast, total.args)
    if not (is_call(product, project) and is_call(added, project) and is_read_once(product) and is_read_once(added)):
        return None
    return (product, added) if added.args[2] == (f"{product.args[2][0]}.lora_B",) else None


def _uncast_once(node: Call) -> Call:
    """Return the value before a node's casts that nothing else reads, or the node itself."""
    while node.op == "call_method" and node.target in CASTS and is_read_once(node.args[0]):
        node = node.args[0]
    return node


def product_and_sum(traced: Traced) -> None:
    """Turn stream + linear(x), or stream + linear(x) * number, into `add_project`."""
    for node, stream, product in sums_in_place(traced):
        if is_call(product, project) and is_read_once(product) and product.args[3] is None:
            if source_of(traced, product.args[0]) is stream:
                continue  # the sum's rows would be written while other rows are still computed from the stream
            x, norm, (linear,), _, _, *factor = product.args
            traced.replace(node, add_project, stream, x, norm, linear, *factor)


def norm_and_sum(traced: Traced) -> None:
    """Turn stream + norm(x) into `add_normed`; the input of the norm stays float32."""
    for node, stream, normed in sums_in_place(traced):
        if traced.is_norm(normed) and is_read_once(normed):
            x = normed.args[0]
            call = traced.replace(node, add_normed, stream, x, norm_call(normed))
            if is_call(x, project) and is_read_once(x):
                x.args = (*x.args[:4], True, *x.args[5:])
            assert call.args[1] is x, "the answer that is normalised"


def norm_of_sum(traced: Traced) -> None:
    """Turn stream + norm(x), and the norm of that sum, into `add_normed_and_norm`."""
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


def experts_alone(traced: Traced) -> None:
    """Turn any other weighted sum of experts' outputs into `sum_experts`."""
    for node in traced.nodes(weighted_sum):
        experts, shares = node.args
        choice = shares.args[0]
        if traced.leaf(experts, Experts) and is_read_once(experts) and is_call(choice, choose_experts):
            x, chosen, *_ = experts.args
            call = traced.replace(node, sum_experts, x, None, chosen, shares, experts.target)
            for one in (choice, *choice.users, chosen):
                call.prepend(one)  # the experts directly follow their choice


def experts_first(traced: Traced) -> None:
    """Turn (stream + x) + the weighted sum of experts' outputs into (stream + the weighted sum) + x.

    The experts' input is a norm of the stream, which a target that folds norms must compute before the stream changes.
    """
    for node in traced.nodes(operator.add):
        first, answer = node.args
        if is_call(answer, weighted_sum) and is_call(first, operator.add) and is_read_once(first):
            stream, x = first.args
            node.args = (stream, answer)
            with traced.graph.inserting_after(node):
                total = traced.graph.call_function(operator.add)
            node.replace_all_uses_with(total)
            total.args = (node, x)
            traced.graph.erase_node(first)


def experts_and_sum(traced: Traced) -> None:
    """Replace a residual add of the weighted sum of experts' outputs by `add_experts`."""
    for node, stream, answer in sums_in_place(traced):
        if not is_call(answer, weighted_sum) or not is_read_once(answer):
            continue
        experts, shares = answer.args
        choice = shares.args[0]
        if traced.leaf(experts, Experts) and is_read_once(experts) and is_call(choice, choose_experts):
            x, chosen, *_ = experts.args
            call = traced.replace(node, add_experts, stream, x, None, chosen, shares, experts.target)
            for one in (choice, *choice.users, chosen):
                call.prepend(one)  # the experts directly follow their choice


def scaled_sums(traced: Traced) -> None:
    """Turn any other stream + x, or stream + x * number, into `add_scaled`, or `scaled_sum` if not in place."""
    in_place = {node: stream is node.args[1] for node, stream, _ in sums_in_place(traced)}
    for node in traced.nodes(operator.add):
        stream, x = reversed(node.args) if in_place.get(node) else node.args
        factor: object = 1.0
        if not isinstance(stream, fx.Node) or not isinstance(x, fx.Node):
            continue
        if is_call(x, operator.mul) and is_read_once(x):
            x, factor = x.args if isinstance(x.args[0], fx.Node) else x.args[::-1]
        traced.replace(node, add_scaled if node in in_place else scaled_sum, stream, x, factor)


def sums_in_place(traced: Traced) -> Iterator[tuple[Call, Call, Call]]:
    """Yield each residual add that can run in place (node, stream, x): nothing reads the old stream after it."""
    for node in traced.nodes(operator.add):
        stream, x = node.args
        if not is_stream(stream):
            stream, x = x, stream
        if is_stream(stream) and dict(last_readers(traced.graph))[stream] is node:
            yield node, stream, x


def is_stream(node: object) -> bool:
    """Return whether a node is the residual stream: the module's input, or a sum with the stream."""
    if not isinstance(node, fx.Node):
        return False
    is_part = is_call(node, operator.getitem) and is_call(node.args[0], add_normed_and_norm) and node.args[1] == 0
    return bool(node.op == "placeholder" or is_part) or node.target in (operator.add, *RESIDUAL_ADDS)


def source_of(traced: Traced, node: Call) -> Call:
    """Return the value before a node's norms and casts, or the node itself if it is neither."""
    while traced.is_norm(node) or (isinstance(node, fx.Node) and node.op == "call_method" and node.target in CASTS):
        node = node.args[0]
    return node


def last_readers(graph: fx.Graph) -> Iterator[tuple[Call, Call]]:
    """Yield each node that is read, with the last node that reads it."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node.users:
            yield node, max(readers(node), key=order.__getitem__)


def readers(node: Call) -> Iterator[Call]:
    """Yield the nodes that read a node, or a part or cast of it, which may share its memory."""
    for user in node.users:
        yield user
        is_view = user.target in (parts, operator.getitem) or (user.op == "call_method" and user.target in CASTS)
        if is_view and user.target not in RESIDUAL_ADDS:
            yield from readers(user)
