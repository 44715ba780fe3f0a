"""The two targets of lowering, a native program and a GPU's kernels: their rules, and the check for missing entries.

An entry is the function that runs an operation on a target: instruction_entries.py and kernel_entries.py.
"""

from collections.abc import Container

from torch import fx, nn

from graphcore.graph.lowering import residual_adds, rules
from graphcore.graph.lowering.operations import add_scaled, gate, project, scaled_sum
from graphcore.graph.lowering.residual_adds import is_stream
from graphcore.graph.lowering.tracing import Traced, is_call, operation_name, trace
from graphcore.nn.mlp import capped

# The arguments of a block's forward; a head has the first.
INPUTS = ("x", "rope", "span", "k_cache", "v_cache", "table", "per_layer")
INSTRUCTION_RULES = (
    rules.without_casts,
    rules.gate_and_up,
    rules.product_and_activation,
    rules.heads,
    rules.head_products,
    rules.latent_values,
    rules.latent_projections,
    rules.queries_keys_values,
    rules.queries_keys_values_before_norms,
    rules.inputs_of_delta_rules,
    rules.products,
    rules.scaled_products,
    rules.gates,
    residual_adds.experts_first,
    residual_adds.sums_when_read,
    residual_adds.low_rank_sums,
    residual_adds.product_and_sum,
    residual_adds.norm_and_sum,
    residual_adds.experts_and_sum,
    residual_adds.experts_alone,
    residual_adds.scaled_sums,
    rules.norm_and_products,
)
KERNEL_RULES = (
    rules.gate_and_up,
    rules.product_and_activation,
    rules.heads,
    rules.head_products,
    rules.queries_keys_values,
    rules.products,
    rules.wide_products,
    rules.scaled_products,
    rules.gates,
    residual_adds.sums_when_read,
    residual_adds.low_rank_sums,
    residual_adds.product_and_sum,
    residual_adds.norm_and_sum,
    residual_adds.experts_and_sum,
    rules.router_and_choice,
    residual_adds.scaled_sums,
    residual_adds.norm_of_sum,
    rules.norm_and_product,
)


def lower_to_instructions(module: nn.Module) -> Traced:
    """Return a module's operations, rewritten for a native program."""
    return trace(module, INSTRUCTION_RULES)


def lower_to_kernels(module: nn.Module) -> Traced:
    """Return a module's operations, rewritten for a GPU's kernels."""
    return trace(module, KERNEL_RULES)


def missing_entry(traced: Traced, entries: Container[object], what: str, changes_x: bool) -> str | None:
    """Return a message that names an operation without an entry, or an unusable output; None if all can run.

    Args:
        entries: operations and module classes that have an entry.
        what: name of an entry for the message, such as "native instruction".
        changes_x: True if the output must overwrite the module's input, as a block's does.
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
            return f"no {what} for {operation_name(node, traced.modules)}"
    answer = traced.nodes()[-1].args[0]
    while changes_x and is_stream(answer) and answer.op != "placeholder":
        answer = answer.args[0]
    if changes_x and (not is_stream(answer) or answer.op != "placeholder"):
        return f"no {what} for an answer that is no sum with the stream"
    if not changes_x and not any(is_call(answer, one) for one in (project, capped)):
        return f"no {what} for an answer that is no product"
    return None
