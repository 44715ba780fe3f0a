"""Runs a decode step on a GPU as a sequence of kernels; `DeviceRun` has one method for each operation.

Legend: B batch (one token of each), D model dim, H heads, K kv heads, E head dim, S cache slots, F hidden features.

    q k v | rotate, write, attend | o, add | gate up | down, add                                      5 kernels
    sandwich:  ... | o | norm, add, norm | gate up | down | norm, add                                 7
    experts:   ... | o, add | norm | router, choose | gate up of the chosen | down of the chosen, add      7
    cached:    ... | router, choose | find slots | fill them | gate up | down                             9

The counts are for layers with fused norms (norm_fusion.py): products apply the norm to rows that the preceding residual
add has written. The first layer also launches its first norm and clears the counters.

The residual stream is changed in place, in float32, and sublayers' outputs are added to it unrounded. The experts'
outputs and their sum are rounded to the compute dtype, so that the bits are the same as with fetched experts, whose
outputs are stored first. lowering/targets.py says which operations are fused, kernel_obstacles.py which method runs an
operation and which calls are unsupported.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from graphcore.activations import Activation
from graphcore.graph.gpu.kernel_obstacles import entries_of
from graphcore.graph.gpu.norm_fusion import FusedLayer, NormFusion
from graphcore.graph.gpu.product_inputs import device_matrix, normalised, product_input
from graphcore.graph.lowering import operations
from graphcore.graph.lowering.operations import Call, NormCall
from graphcore.graph.lowering.tracing import M, Traced
from graphcore.kernels.gpu.attention.decode import NO_NORMS, HeadNorms, attend_token
from graphcore.kernels.gpu.attention.latent import attend_latent_token, project_heads
from graphcore.kernels.gpu.elementwise import add_elements, cap_elements, gate_elements, scale_rows
from graphcore.kernels.gpu.experts.fetch import take_slots
from graphcore.kernels.gpu.experts.launch import add_expert_answers
from graphcore.kernels.gpu.experts.router import choose_decode_experts, route_decode_experts
from graphcore.kernels.gpu.mean_squares import FusedNorm
from graphcore.kernels.gpu.norm import add_rms_normed, prepare_norm
from graphcore.kernels.gpu.products.decode_products import add_product, gated_product, product
from graphcore.kernels.ops.attend import attend
from graphcore.kernels.ops.attention_parameters import AttentionParameters
from graphcore.kernels.ops.gated_convolution import gated_convolution
from graphcore.kernels.ops.gated_delta import delta_heads
from graphcore.kernels.ops.kv_formats import head_dim_of, is_mixed
from graphcore.nn.latent_attention import HeadLinear
from graphcore.nn.linear import Float32Linear, Linear
from graphcore.nn.mlp import ActivationModule
from graphcore.nn.moe import Experts
from graphcore.nn.norm import RMSNorm
from graphcore.nn.rope import rotate
from graphcore.nn.span import Span
from graphcore.nn.spec import Shares
from graphcore.routing import ScoredRouting


class Joined(NamedTuple):
    """The concatenated products of one input, [B, sum of their output features], which stands for each of them."""

    rows: Tensor


@dataclass
class DeviceRun:
    """One run of a module: launches its kernels in order.

    Attributes:
        modules: modules by their names in the operations.
        arrivals: counters, as in `DeviceBlocks`; None for a head, which has neither attention nor experts.
        fused_layer: state of norm fusion with the neighbouring layers; None to launch every norm.
    """

    modules: Mapping[str, nn.Module]
    arrivals: Tensor | None = None
    fused_layer: FusedLayer | None = None
    _fusion: NormFusion | None = None
    _values: dict[Call, Any] = field(default_factory=dict)
    _counts: Tensor | None = None  # [B] int64, 0 for a row without a token

    def run(self, traced: Traced, inputs: Mapping[str, object], until: Callable[..., object] | None = None) -> Any:
        """Return the module's output; if `until` is given, stop before that operation and return its arguments.

        Args:
            inputs: inputs of the module's forward, by name; `x` is [B, D], changed if it is the residual stream.
        """
        span = inputs.get("span")
        self._counts = span.counts if isinstance(span, Span) else None
        x = inputs["x"]
        if self.fused_layer is not None and isinstance(x, Tensor):
            self._fusion = NormFusion(self.fused_layer, traced, self.modules, x)
        for node in traced.nodes():
            arguments = [self._values[one] if isinstance(one, fx.Node) else one for one in node.args]
            match node.op:
                case "placeholder":
                    self._values[node] = inputs.get(node.target)
                case "get_attr":
                    owner, _, attribute = node.target.rpartition(".")
                    self._values[node] = getattr(self.modules[owner], attribute)
                case "call_module":
                    entry = ENTRIES[type(self.modules[node.target])]
                    self._values[node] = entry(self, operations.norm_call(node), arguments[0])
                case "call_function" if node.target is until:
                    return arguments
                case "call_function" | "call_method":
                    if self._fusion is not None:
                        self._fusion.begin(node)
                    self._values[node] = ENTRIES[node.target](self, *arguments)
        return arguments[0]

    def reorder(self, x: Tensor, name: str) -> Tensor:
        """Return the input of a linear with its features in the linear's order."""
        order = self._module(name, Linear).input_order
        assert order is not None, f"{name} has no order"
        return x.index_select(-1, order)

    def project(
        self,
        x: Tensor,
        norm: NormCall | None,
        names: Sequence[str],
        activation: str | None,
        wide: bool,
        factor: float = 1.0,
    ) -> Tensor | Joined:
        """Return a product, or the concatenated products of one input."""
        linears = [self._module(name, Linear) for name in names]
        kind = "" if activation is None else self._module(activation, ActivationModule).kind.kernel_name
        fed = product_input(self.modules, x, norm, linears[0], self._fusion)
        matrices = [device_matrix(linear) for linear in linears]
        how = _dtype(linears[0], wide), _divides(linears[0]), kind, fed.eps, factor
        y = product(fed.rows, fed.scale, matrices, *how)
        return y if len(linears) == 1 else Joined(y)

    def gated(self, x: Tensor, norm: NormCall | None, gate: str, up: str, activation: str, wide: bool) -> Tensor:
        """Return activation(gate) * up."""
        first, second = (self._module(name, Linear) for name in (gate, up))
        kind = self._module(activation, ActivationModule).kind.kernel_name
        rows, scale, eps = product_input(self.modules, x, norm, second, self._fusion)
        matrices = device_matrix(first), device_matrix(second)
        return gated_product(rows, scale, *matrices, _dtype(second, wide), _divides(second), kind, eps)

    def add_project(self, stream: Tensor, x: Tensor, norm: NormCall | None, name: str, factor: float = 1.0) -> Tensor:
        """Add factor * a product to the stream."""
        linear = self._module(name, Linear)
        fed = product_input(self.modules, x, norm, linear, self._fusion)
        how = _divides(linear), fed.eps, self._next_norm(stream), factor
        add_product(stream, fed.rows, fed.scale, device_matrix(linear), *how)
        return stream

    def add_normed(self, stream: Tensor, x: Tensor, norm: NormCall) -> Tensor:
        """Add a normalised sublayer output to the stream."""
        after, fused = self._module(norm.name, RMSNorm), self._next_norm(stream)
        if fused is None:
            add_rms_normed(stream, x, after.weight, after.eps)
        else:
            prepare_norm(stream, fused, x, after.weight, after.eps)
        return stream

    def add_scaled(self, stream: Tensor, x: Tensor, factor: float) -> Tensor:
        """Add factor * x to the stream."""
        add_elements(stream, stream, x, factor)
        return stream

    def scaled_sum(self, x: Tensor, y: Tensor, factor: float) -> Tensor:
        """Return x + factor * y in float32."""
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        add_elements(out, x, y, factor)
        return out

    def gate(self, x: Tensor, activation: str | None, y: Tensor) -> Tensor:
        """Return activation(x) * y."""
        kind = "" if activation is None else self._module(activation, ActivationModule).kind.kernel_name
        return gate_elements(x, y, kind)

    def activated(self, called: NormCall, x: Tensor) -> Tensor:
        """Return activation(x), as a gate of ones."""
        kind = self._module(called.name, ActivationModule).kind.kernel_name
        return gate_elements(x, torch.ones_like(x), kind)

    def parts(self, x: Tensor, how: str, sizes: Any) -> Sequence[Tensor]:
        """Return contiguous parts of a row."""
        cut = x.chunk(sizes, dim=-1) if isinstance(sizes, int) and how == "chunk" else torch.split(x, sizes, dim=-1)
        return tuple(part.contiguous() for part in cut)  # a no-op for one sequence; kernels find rows by shape alone

    def add_normed_and_norm(
        self, stream: Tensor, x: Tensor, norm: NormCall, norm_of_sum: NormCall
    ) -> tuple[Tensor, Tensor]:
        """Add a normalised sublayer output to the stream; return the stream, and the norm of the sum."""
        return stream, self.normed(norm_of_sum, stream, x, self._module(norm.name, RMSNorm).weight)

    def normed(self, norm: NormCall, x: Tensor, *added: Tensor) -> Tensor:
        """Return norm(x); `added` is the same as in `normalised`, followed by its `weight_after`."""
        return normalised(self.modules[norm.name], x, norm.dtype or x.dtype, *added)

    def attend_heads(
        self,
        q: Tensor | Joined,
        k: Tensor | Joined,
        v: Tensor | Joined,
        rope: Tensor | None,
        q_norm: NormCall | None,
        k_norm: NormCall | None,
        _v_norm: None,
        q_scale: tuple[float, int] | None,
        k_cache: Tensor,
        v_cache: Tensor,
        table: Tensor,
        starts: Tensor,
        counts: Tensor,
        *how: Any,
    ) -> Tensor:
        """Write the new key and value to the cache; return the concatenated outputs of the heads.

        Args:
            how: fields of `AttentionParameters`.
        """
        scoring = AttentionParameters(*how)
        if scoring.values_from:
            assert isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor), "they are not joined"  # noqa: PT018
            return _attend_latent(q, k, v, rope, (k_cache, v_cache, table), (starts, counts), scoring)
        apart = [one for one in (q, k, v) if not isinstance(one, Joined)]
        rows = q.rows if isinstance(q, Joined) else torch.cat(apart, dim=-1)
        kv_heads, head_dim = k_cache.shape[1], head_dim_of(k_cache)
        projected = rows.view(len(rows), 1, -1, head_dim)
        query, key, value = torch.split(projected, [projected.shape[2] - 2 * kv_heads, kv_heads, kv_heads], dim=2)
        norms = NO_NORMS
        if q_norm is not None and k_norm is not None:
            first, second = (self._module(norm.name, RMSNorm) for norm in (q_norm, k_norm))
            norms = HeadNorms(first.weight, second.weight, first.eps, first.scale_in_float32)
        place = (k_cache, v_cache, table, starts, counts)
        how_run, (beta, period) = (scoring, self.arrivals, rope, norms), q_scale or (0.0, 0)
        return attend_token(query, key, value, *place, *how_run, beta, period).view(len(rows), -1)

    def project_heads(self, prefix: Tensor | None, x: Tensor, name: str) -> Tensor:
        """Return products of heads with matrices of their own, each after its part of the prefix."""
        given = None if prefix is None else prefix.contiguous()
        return project_heads(x.contiguous(), self._module(name, HeadLinear).weight, given)

    def delta_heads(self, mixed: Tensor, z: Tensor, a: Tensor, b: Tensor, *rest: Any) -> Tensor:
        """Return the concatenated outputs of a delta rule's heads. Args: rest: fields of `DeltaParts` after `b`."""
        return delta_heads(mixed[:, None], z[:, None], a[:, None], b[:, None], *rest)[:, 0]

    def gated_convolution(self, mixed: Tensor, *rest: Any) -> Tensor:
        """Return the outputs of a gated short convolution. Args: rest: fields of `ConvParts` after `mixed`."""
        return gated_convolution(mixed[:, None], *rest)[:, 0]

    def scaled_by_gate(self, gate: Tensor, x: Tensor) -> Tensor:
        """Return sigmoid(gate) * x, with one gate for each row."""
        return scale_rows(gate, x, Activation.SIGMOID.kernel_name)

    def choose(
        self, scores: Tensor, top_k: int, shares: Shares | ScoredRouting, _scales: None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the experts chosen for each token (-1 for padding), and their shares."""
        return choose_decode_experts(scores, self._counts, top_k, *_routing(shares), bias)

    def route(
        self, x: Tensor, name: str, top_k: int, shares: Shares | ScoredRouting, _scales: None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the experts that a router chooses, as `choose` does: in one launch, unless the router is packed."""
        router = self._module(name, Linear)
        if router.packing is not None or router.int8_order is not None or router.weight_scale is not None:
            fed = product_input(self.modules, x, None, router, None)
            dtype = torch.float32 if isinstance(router, Float32Linear) else router.dtype
            scores = product(fed.rows, fed.scale, [device_matrix(router)], dtype)
            return self.choose(scores, top_k, shares, None, bias)
        over_all, routing = _routing(shares)
        how = over_all, self.arrivals, routing, bias, isinstance(router, Float32Linear)
        return route_decode_experts(x, router.weight, router.bias, self._counts, top_k, *how)

    def add_experts(self, stream: Tensor, x: Tensor, _norm: None, chosen: Tensor, shares: Tensor, name: str) -> Tensor:
        """Add the chosen experts' weighted outputs to the stream; cached experts are first copied to their slots."""
        experts = self._module(name, Experts)
        parts = (experts.gate_proj, experts.up_proj, experts.down_proj)
        weights, biases = [part.weight for part in parts], [part.bias for part in parts if part.bias is not None]
        places, waiting = None, None
        if experts.cached is not None:
            take_slots(chosen, experts.cached)
            places, waiting = experts.cached.places, experts.cached.waiting
        how = experts.hidden, experts.gating, experts.formats, self.arrivals, waiting, self._next_norm(stream)
        add_expert_answers(stream, x, chosen, shares, weights, biases, places, *how)
        return stream

    def capped(self, x: Tensor, cap: float) -> Tensor:
        """Return cap * tanh(x / cap)."""
        return cap_elements(x, cap)

    def without_padding(self, chosen: Tensor, _span: object) -> Tensor:
        """Return the chosen experts unchanged: `choose` has already set those of rows without a token to -1."""
        return chosen

    def in_float32(self, x: Tensor) -> Tensor:
        """Return x in float32."""
        return x.float()

    def in_dtype(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return x in that dtype."""
        return x.to(dtype)

    def attribute(self, owner: object, name: str) -> Any:
        """Return an attribute of an input, such as the positions of the span."""
        return getattr(owner, name)

    def item(self, values: Any, index: int) -> Any:
        """Return one of several values; concatenated products stay together."""
        return values if isinstance(values, Joined) else values[index]

    def _next_norm(self, stream: Tensor) -> FusedNorm | None:
        """Return the buffers for the norm that is fused with the current residual add; None if there is none."""
        return None if self._fusion is None else self._fusion.next_norm(stream)

    def _module(self, name: str, kind: type[M]) -> M:
        module = self.modules[name]
        assert isinstance(module, kind), f"{name} is a {type(module).__name__}"
        return module


ENTRIES = entries_of(DeviceRun, besides=("run",))


def _dtype(linear: Linear, wide: bool) -> torch.dtype:
    return torch.float32 if wide else linear.dtype


def _routing(shares: Shares | ScoredRouting) -> tuple[bool, ScoredRouting | None]:
    """Return whether a softmax is over all scores, and the rule of scores that are no softmax of the chosen."""
    return (False, shares) if isinstance(shares, ScoredRouting) else (shares == "all", None)


def _attend_latent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rope: Tensor | None,
    caches: tuple[Tensor, Tensor, Tensor],
    span: tuple[Tensor, Tensor],
    scoring: AttentionParameters,
) -> Tensor:
    """Rotate queries and key, write a token's row, and attend: [B, H C]. A quantised row takes the op of prompts."""
    assert rope is not None, "latent attention rotates"
    pool, _, table = caches
    query = q.view(len(q), -1, head_dim_of(pool))
    if not is_mixed(pool):
        place = pool, table, *span, rope
        return attend_latent_token(query, k.contiguous(), v.contiguous(), *place, scoring.scale).flatten(1)
    turned = rotate(query[:, None], rope), rotate(k[:, None, None], rope), v[:, None, None]
    return attend(*turned, *caches, *span, 0, scoring.scale, values_from=scoring.values_from).flatten(1)


def _divides(linear: Linear) -> bool:
    return linear.int8_order == "divided"
