"""The fused operations of a decode step; each replaces several operations of a module.

The functions are never called: they are call targets in a traced graph (tracing.py), where the rules (rules.py) insert
them. Two backends implement them: the native program (instruction_entries.py) and a GPU's kernels (kernel_entries.py).
Modules are arguments by their names in the graph.
"""

from typing import Any, NamedTuple, NoReturn

import torch

from graphcore.nn.spec import Shares
from graphcore.routing import ScoredRouting

Call = Any  # an fx.Node; torch's types for its arguments are too wide to be of use


class NormCall(NamedTuple):
    """A call of a normalisation.

    Attributes:
        name: the module's name.
        dtype: dtype of the output; None for the dtype of the input.
    """

    name: str
    dtype: torch.dtype | None


def norm_call(node: Call) -> NormCall:
    """Return the normalisation that a node calls."""
    return NormCall(node.target, node.args[1] if len(node.args) > 1 else None)


def reorder(x: Call, linear: str) -> NoReturn:
    """Stand for x[..., input_order of the linear]; products of it multiply without an order."""
    raise NotImplementedError


def project(
    x: Call, norm: NormCall | None, linears: tuple[str, ...], activation: str | None, wide: bool, factor: float = 1.0
) -> NoReturn:
    """Stand for factor * (activation of) linear(norm(x)), for each of the linears; `wide`: the outputs stay float32."""
    raise NotImplementedError


def gated(x: Call, norm: NormCall | None, gate: str, up: str, activation: str, wide: bool) -> NoReturn:
    """Stand for activation(gate(norm(x))) * up(norm(x)); `wide`: the output stays float32."""
    raise NotImplementedError


def add_project(stream: Call, x: Call, norm: NormCall | None, linear: str, factor: float = 1.0) -> NoReturn:
    """Stand for stream + factor * linear(norm(x))."""
    raise NotImplementedError


def add_normed(stream: Call, x: Call, norm: NormCall) -> NoReturn:
    """Stand for stream + norm(x)."""
    raise NotImplementedError


def add_normed_and_norm(stream: Call, x: Call, norm: NormCall, norm_of_sum: NormCall) -> NoReturn:
    """Stand for s = stream + norm(x), and norm_of_sum(s)."""
    raise NotImplementedError


def route(
    x: Call, linear: str, top_k: int, shares: Shares | ScoredRouting, scales: Call | None, bias: Call | None
) -> NoReturn:
    """Stand for choose_experts(linear(x), top_k, shares, scales, bias)."""
    raise NotImplementedError


def add_experts(stream: Call, x: Call, norm: NormCall | None, chosen: Call, shares: Call, experts: str) -> NoReturn:
    """Stand for stream + the weighted sum of the chosen experts' outputs for norm(x)."""
    raise NotImplementedError


def sum_experts(x: Call, norm: NormCall | None, chosen: Call, shares: Call, experts: str) -> NoReturn:
    """Stand for the weighted sum of the chosen experts' outputs for norm(x)."""
    raise NotImplementedError


def add_scaled(stream: Call, x: Call, factor: float) -> NoReturn:
    """Stand for stream + factor * x."""
    raise NotImplementedError


def scaled_sum(x: Call, y: Call, factor: float) -> NoReturn:
    """Stand for x + factor * y, out of place: x is not overwritten."""
    raise NotImplementedError


def gate(x: Call, activation: str | None, y: Call) -> NoReturn:
    """Stand for activation(x) * y."""
    raise NotImplementedError


def parts(x: Call, how: str, sizes: int | list[int]) -> NoReturn:
    """Stand for x.split(sizes, -1) or x.chunk(sizes, -1): `how` is the method's name."""
    raise NotImplementedError


def project_heads(prefix: Call | None, x: Call, linear: str) -> NoReturn:
    """Stand for joined_heads(prefix, linear(x), heads) of a `HeadLinear`, or for linear(x) if there is no prefix."""
    raise NotImplementedError


def attend_heads(
    q: Call,
    k: Call | None,
    v: Call | None,
    rope: Call | None,
    q_norm: NormCall | None,
    k_norm: NormCall | None,
    v_norm: NormCall | None,
    q_scale: tuple[float, int] | None,
    *rest: Any,
) -> NoReturn:
    """Stand for attend(rotate(q_norm(q)), rotate(k_norm(k)), v_norm(v), *rest), which writes the cache.

    The rotated queries are scaled by `scale_queries` if there is a `q_scale`, its arguments beta and period. In latent
    attention, v_norm may have weights, and k is narrower than q.

    Without k and v it stands for attend(rotate(q_norm(q)), None, None, *rest), which reads keys already in the cache.
    """
    raise NotImplementedError
