"""Rewrite rules that fuse several operations of a traced module into one (operations.py).

A rule matches one pattern in a graph (tracing.py) and replaces it by one operation. targets.py lists the rules of each
target in their order.
"""

import operator
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import fx

from graphcore.graph.lowering.operations import (
    Call,
    NormCall,
    add_experts,
    add_project,
    attend_heads,
    gate,
    gated,
    norm_call,
    project,
    project_heads,
    route,
    sum_experts,
)
from graphcore.graph.lowering.residual_adds import RESIDUAL_ADDS
from graphcore.graph.lowering.tracing import Traced, is_call, is_cast, is_effect, is_read_once, uncast
from graphcore.kernels.ops.attend import attend
from graphcore.kernels.ops.gated_delta import delta_heads
from graphcore.nn.latent_attention import HeadLinear, joined_heads
from graphcore.nn.linear import Linear
from graphcore.nn.mlp import ActivationModule
from graphcore.nn.moe import choose_experts
from graphcore.nn.norm import RMSNorm, UnitNorm
from graphcore.nn.rope import rotate, scale_queries

MOST_JOINED = 4  # projections of one `project` (kernels/cpu/instructions.py)
NARROW = (torch.float32, torch.bfloat16, torch.float16)


def without_casts(traced: Traced) -> None:
    """Turn x.float() and x.to(a float dtype) into x, for targets that compute in float32."""
    for node in traced.nodes():
        is_narrow = node.op == "call_method" and node.args[1:] and node.args[1] in NARROW
        if is_cast(node) or is_narrow:
            node.replace_all_uses_with(node.args[0])
            traced.graph.erase_node(node)


def gate_and_up(traced: Traced) -> None:
    """Turn activation(gate(x)) * up(x) into `gated`."""
    for node in traced.nodes(operator.mul):
        activation, up = node.args
        if traced.leaf(activation, ActivationModule) is None:
            continue
        gate = activation.args[0]
        wide, gate, up = is_cast(gate) or is_cast(up), uncast(gate), uncast(up)
        if traced.can_join(gate, up):
            traced.replace(node, gated, *gate.args, None, gate.target, up.target, activation.target, wide)


def product_and_activation(traced: Traced) -> None:
    """Turn activation(linear(x)) into `project`."""
    for node in traced.nodes():
        if traced.leaf(node, ActivationModule) is None:
            continue
        product = uncast(node.args[0])
        if traced.leaf(product, Linear) and is_read_once(product):
            x = product.args[0]
            traced.replace(node, project, x, None, (product.target,), node.target, is_cast(node.args[0]))


def gates(traced: Traced) -> None:
    """Turn any other activation(x) * y, and x * y, into `gate`."""
    for node in traced.nodes(operator.mul):
        x, y = node.args
        if not isinstance(x, fx.Node) or not isinstance(y, fx.Node):
            continue
        if traced.leaf(x, ActivationModule) is None:
            x, y = y, x
        activation = traced.leaf(x, ActivationModule) and is_read_once(x)
        traced.replace(node, gate, x.args[0] if activation else x, x.target if activation else None, y)


def heads(traced: Traced) -> None:
    """Turn norms, rotation and scales of heads, and attention (which writes the cache) into `attend_heads`."""
    for node in traced.nodes(attend):
        (q, k, v), rest = node.args[:3], node.args[3:]
        q, scale = (q.args[0], tuple(q.args[2:])) if is_call(q, scale_queries) else (q, None)
        turned = [q] if k is None else [q, k]
        ropes = [one.args[1] for one in turned if one.target is rotate]
        if len(set(ropes)) > 1 or 0 < len(ropes) < len(turned):
            continue
        if ropes:
            q, k = q.args[0], None if k is None else k.args[0]
        norms = [_norm_of_heads(traced, one) for one in (q, k)]
        norms.append(norm_call(v) if traced.leaf(v, UnitNorm) else None)
        q, k, v = (one if norm is None else one.args[0] for one, norm in zip((q, k, v), norms, strict=True))
        traced.replace(node, attend_heads, q, k, v, ropes[0] if ropes else None, *norms, scale, *rest)


def _norm_of_heads(traced: Traced, node: Call) -> NormCall | None:
    """Return the normalisation that a node applies to heads; None if it is another operation."""
    return norm_call(node) if traced.is_norm(node) and node.meta["is_heads"] else None


def head_products(traced: Traced) -> None:
    """Turn products of heads with matrices of their own into `project_heads`, joined with what precedes each head."""
    for node in traced.nodes(joined_heads):
        prefix, product, _ = node.args
        if traced.leaf(product, HeadLinear) and is_read_once(product):
            traced.replace(node, project_heads, prefix, *product.args, product.target)
    for node in traced.nodes():
        if traced.leaf(node, HeadLinear):
            traced.replace(node, project_heads, None, *node.args, node.target)


def latent_values(traced: Traced) -> None:
    """Fuse the norm of latent features into the attention that writes them to the cache."""
    for node in _latent_attentions(traced):
        value = node.args[2]
        if traced.leaf(value, RMSNorm) and is_read_once(value) and node.args[6] is None:
            node.args = (*node.args[:2], value.args[0], *node.args[3:6], norm_call(value), *node.args[7:])
            traced.graph.eliminate_dead_code(is_impure_node=is_effect)


def latent_projections(traced: Traced) -> None:
    """Turn the projections of latent attention that share an input into one `project`."""
    for node in _latent_attentions(traced):
        queries, key = node.args[:2]
        for one in (key, *(queries.args[:1] if is_call(queries, project_heads) else ())):
            if traced.leaf(one, Linear):
                alike = [other for other in traced.nodes() if traced.leaf(other, Linear) and other.args == one.args]
                _join(traced, alike)


def _latent_attentions(traced: Traced) -> list[Call]:
    """Return the attentions whose last argument, the first feature of values in the keys' rows, is not 0."""
    return [node for node in traced.nodes(attend_heads) if node.args[-1]]


def queries_keys_values(traced: Traced) -> None:
    """Turn the q, k and v projections of one attention, if they share their input, into one `project`."""
    _join_products(traced, attend_heads, 3)


def queries_keys_values_before_norms(traced: Traced) -> None:
    """Turn such projections into one `project` also where norms over all heads of q and k follow them."""
    _join_products(traced, attend_heads, 3, through_norms=True)


def inputs_of_delta_rules(traced: Traced) -> None:
    """Turn the four projections of one delta rule, if they share their input, into one `project`."""
    _join_products(traced, delta_heads, 4)


def _join_products(traced: Traced, reader: Callable[..., object], count: int, through_norms: bool = False) -> None:
    """Turn linears that are the first `count` arguments of a reader, if they share their input, into one `project`.

    Args:
        through_norms: True if norms may be between a linear and the reader.
    """
    for node in traced.nodes(reader):
        is_past = [through_norms and traced.is_norm(one) and is_read_once(one) for one in node.args[:count]]
        products = [one.args[0] if past else one for one, past in zip(node.args[:count], is_past, strict=True)]
        if None not in products:
            _join(traced, products)


def _join(traced: Traced, products: Sequence[Call]) -> None:
    """Turn up to four linears, if they share their input, into one `project`."""
    if not 2 <= len(products) <= MOST_JOINED or not traced.can_join(*products):
        return
    first = min(products, key=traced.order().__getitem__)
    with traced.graph.inserting_before(first):
        names = tuple(one.target for one in products)
        joined = traced.graph.call_function(project, (first.args[0], None, names, None, False))
        parts = [traced.graph.call_function(operator.getitem, (joined, index)) for index in range(len(products))]
    for product, part in zip(products, parts, strict=True):
        product.replace_all_uses_with(part)
        traced.graph.erase_node(product)


def products(traced: Traced) -> None:
    """Turn any other linear(x) into `project`."""
    for node in traced.nodes():
        if traced.leaf(node, Linear) is not None:
            traced.replace(node, project, *node.args, None, (node.target,), None, False)


def wide_products(traced: Traced) -> None:
    """Make a product's output float32 if its only reader is a cast to float32, and drop the cast."""
    for node in traced.nodes(project):
        if is_read_once(node) and is_cast(next(iter(node.users))):
            cast = next(iter(node.users))
            node.args = (*node.args[:4], True)
            cast.replace_all_uses_with(node)
            traced.graph.erase_node(cast)


def scaled_products(traced: Traced) -> None:
    """Turn linear(x) * number into a `project` with that factor."""
    for node in traced.nodes(operator.mul):
        product, factor = node.args if isinstance(node.args[0], fx.Node) else node.args[::-1]
        is_number = isinstance(factor, int | float)
        if is_number and is_call(product, project) and is_read_once(product) and len(product.args[2]) == 1:
            traced.replace(node, project, *product.args[:5], float(factor))


def router_and_choice(traced: Traced) -> None:
    """Turn a linear router and `choose_experts` of its scores into `route`."""
    for node in traced.nodes(choose_experts):
        scores, *how = node.args
        if is_call(scores, project) and is_read_once(scores):
            x, norm, linears, *rest = scores.args
            if len(linears) == 1 and (norm, *rest) == (None, None, False):
                traced.replace(node, route, x, linears[0], *how)


def norm_and_products(traced: Traced) -> None:
    """Fuse norm(x) into every product that reads it, even if there are several; each then normalises x itself."""
    for node in traced.nodes():
        place = NORM_PLACES.get(node.target)
        if place is not None and traced.is_norm(node.args[place]) and node.args[place + 1] is None:
            _fold_norm(traced, node, place)
    traced.graph.eliminate_dead_code(is_impure_node=is_effect)


def norm_and_product(traced: Traced) -> None:
    """Fuse norm(x) into the product that reads it, if there is only one; the product then normalises x itself."""
    for node in traced.nodes():
        place = NORM_PLACES.get(node.target)
        if place is None or node.target is add_experts or not traced.is_norm(node.args[place]):
            continue
        if is_read_once(node.args[place]) and node.args[place + 1] is None:
            _fold_norm(traced, node, place)
    traced.graph.eliminate_dead_code(is_impure_node=is_effect)


NORM_PLACES: Mapping[object, int] = {
    project: 0,
    gated: 0,
    add_project: 1,
    add_experts: 1,
    sum_experts: 0,
}  # index of the argument x; the argument after it is the norm


def _fold_norm(traced: Traced, node: Call, place: int) -> None:
    """Make a product normalise its input, unless an in-place sum overwrites that input before the product runs."""
    arguments, order = list(node.args), traced.order()
    norm = arguments[place]
    if any(
        user.target in RESIDUAL_ADDS and order[user] < order[node] for user in norm.args[0].users if user is not node
    ):
        return
    arguments[place : place + 2] = [norm.args[0], norm_call(norm)]
    node.args = tuple(arguments)
