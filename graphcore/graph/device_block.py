"""A decode step on a GPU as kernels called one after another, one entry for each operation: what a captured graph has.

Legend: B batch (one token of each), D model dim, H heads, K kv heads, E head dim, S cache slots, F hidden features.

    norm | q k v | rotate, write | attend | o, add | norm | gate up | down, add                       8 kernels
    sandwich:  ... | o | norm, add, norm | gate up | down | norm, add                                 9
    experts:   ... | o, add | norm | router | choose | gate up of the chosen | down of the chosen, add     10

Nothing here is compiled: between these kernels there is nothing left to fuse. The residual stream is changed in place,
in float32, and sublayers' answers reach it unrounded; but those of experts are rounded to the compute dtype, each and
their sum, so that the bits are the same where experts are fetched and their answers lie in memory first. What is
computed is the module's matter, what is fused and what cannot run is said by graph/device_obstacle.py.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from graphcore.graph import fusing
from graphcore.graph.device_obstacle import OPERATIONS, lowered, obstacle_of, obstacle_of_head
from graphcore.graph.fusing import Call, NormCall, Traced
from graphcore.graph.step import BlockFunction, HeadFunction, RoutedBlock
from graphcore.kernels.gpu.codes import norm_to_codes
from graphcore.kernels.gpu.decode_attend import attend_written
from graphcore.kernels.gpu.elementwise import add_scaled, gate
from graphcore.kernels.gpu.elementwise import cap as capped_elements
from graphcore.kernels.gpu.experts import add_experts
from graphcore.kernels.gpu.matrix import DENSE, Matrix
from graphcore.kernels.gpu.norm import add_normed, residual_norm
from graphcore.kernels.gpu.product import add_product, gated, product
from graphcore.kernels.gpu.rotate_write import rotate_and_write
from graphcore.kernels.gpu.router import choose_experts
from graphcore.nn.activation import ActivationModule, capped
from graphcore.nn.block import Block, Routed
from graphcore.nn.decoder import Head
from graphcore.nn.kv_cache import LayerCache
from graphcore.nn.linear import Linear
from graphcore.nn.moe import Experts, choose, without_padding
from graphcore.nn.norm import LayerNorm, RMSNorm
from graphcore.nn.span import Span
from graphcore.nn.spec import BlockSpec

NO_NORM = (None, None, 0.0, True, True)
Fed = tuple[Tensor, Tensor | None]  # rows, and what they were multiplied with where they are int8 codes


@dataclass(frozen=True)
class DeviceBlocks:
    """Runs blocks of any spec that has no obstacle.

    Attributes:
        arrivals: [B * K or more] int32 zeros, where the parts of one attention count each other.
    """

    arrivals: Tensor
    _operations: dict[BlockSpec, Traced] = field(default_factory=dict)

    @classmethod
    def allocate(cls, caches: Sequence[LayerCache], device: torch.device) -> "DeviceBlocks":
        """Return what runs the layers of those caches."""
        most = max(cache.k.shape[0] * cache.k.shape[1] for cache in caches)
        return cls(torch.zeros(most, dtype=torch.int32, device=device))

    def block_function(self, block: Block, batch: int, fetches: bool) -> BlockFunction | None:
        """Return what runs the block, or None where it has an obstacle."""
        if obstacle_of(block, batch) is not None:
            return None
        return RoutedBlock(self.route, Block.add_experts) if fetches else self.forward

    def head_function(self, head: Head, batch: int) -> HeadFunction | None:
        """Return what runs the head, or None where it has an obstacle."""
        return run_head if obstacle_of_head(head, batch) is None else None

    def forward(
        self, block: Block, x: Tensor, rope: Tensor | None, span: Span, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        """Run the block for one token of each sequence; arguments as of `Block.forward`, and `x` is changed."""
        stream = x.view(len(x), -1)
        inputs = {"x": stream, "rope": rope, "span": span, "k_cache": k_cache, "v_cache": v_cache}
        answer = DeviceRun(dict(block.named_modules()), self.arrivals).run(self._lowered(block), inputs)
        assert answer is stream, "the stream is changed where it lies"
        return x

    def route(
        self, block: Block, x: Tensor, rope: Tensor | None, span: Span, k_cache: Tensor, v_cache: Tensor
    ) -> Routed:
        """Run the block up to its experts, as `Block.route` does; `x` is changed."""
        inputs = {"x": x.view(len(x), -1), "rope": rope, "span": span, "k_cache": k_cache, "v_cache": v_cache}
        run = DeviceRun(dict(block.named_modules()), self.arrivals)
        _, fed, _, chosen, shares, _ = run.run(self._lowered(block), inputs, until=fusing.add_experts)
        return Routed(x, fed[:, None], chosen[:, None], shares[:, None])

    def _lowered(self, block: Block) -> Traced:
        """Return the operations of the block's spec, traced once."""
        if block.spec not in self._operations:
            self._operations[block.spec] = lowered(block)
        return self._operations[block.spec]


def run_head(head: Head, x: Tensor) -> Tensor:
    """Return logits [B, V] float32 of the residual stream `x` [B, D], as `Head.forward` does."""
    logits: Tensor = DeviceRun(dict(head.named_modules())).run(lowered(head), {"x": x.contiguous()})
    return logits


def run_block(block: nn.Module, x: Tensor, rope: Tensor | None, span: Span, k_cache: Tensor, v_cache: Tensor) -> Tensor:
    """Run any module for one token of each sequence; arguments as of `Block.forward`, and `x` is changed."""
    inputs = {"x": x.view(len(x), -1), "rope": rope, "span": span, "k_cache": k_cache, "v_cache": v_cache}
    arrivals = torch.zeros(k_cache.shape[0] * k_cache.shape[1], dtype=torch.int32, device=x.device)
    DeviceRun(dict(block.named_modules()), arrivals).run(lowered(block), inputs)
    return x


class Joined(NamedTuple):
    """Products of one input, side by side, [B, sum of their rows]; as one of them it stands for all."""

    rows: Tensor


@dataclass
class DeviceRun:
    """Calls a module's kernels in order.

    Attributes:
        modules: by their names in the operations.
        arrivals: as of `DeviceBlocks`; None where nothing is attended.
    """

    modules: Mapping[str, nn.Module]
    arrivals: Tensor | None = None
    _values: dict[Call, Any] = field(default_factory=dict)
    _counts: Tensor | None = None  # [B] int64, 0 of a row without a token

    def run(self, traced: Traced, inputs: Mapping[str, object], until: Callable[..., object] | None = None) -> Any:
        """Return the answer, or the arguments of the call of `until`, which is not made.

        Args:
            inputs: of the module's forward, by name; `x` is [B, D], and changed where it is the residual stream.
        """
        span = inputs.get("span")
        self._counts = span.counts if isinstance(span, Span) else None
        for node in traced.nodes():
            arguments = [self._values[one] if isinstance(one, fx.Node) else one for one in node.args]
            match node.op:
                case "placeholder":
                    self._values[node] = inputs.get(node.target)
                case "get_attr":
                    owner, _, attribute = node.target.rpartition(".")
                    self._values[node] = getattr(self.modules[owner], attribute)
                case "call_module":
                    self._values[node] = self._norm(arguments[0], None, fusing.norm_call(node))
                case "call_function" if node.target is until:
                    return arguments
                case "call_function" | "call_method":
                    self._values[node] = ENTRIES[node.target](self, *arguments)
        return arguments[0]

    def project(
        self, x: Tensor, norm: NormCall | None, names: Sequence[str], activation: str | None, wide: bool
    ) -> Tensor | Joined:
        """Return a product, or several of one input, side by side."""
        linears = [self._module(name, Linear) for name in names]
        kind = "" if activation is None else self._module(activation, ActivationModule).kind.kernel_name
        rows, scale = self._fed(x, norm, linears[0])
        matrices = [matrix_of(linear) for linear in linears]
        y = product(rows, scale, matrices, _dtype(linears[0], wide), _divides(linears[0]), kind)
        return y if len(linears) == 1 else Joined(y)

    def gated(self, x: Tensor, norm: NormCall | None, gate: str, up: str, activation: str, wide: bool) -> Tensor:
        """Return activation(gate) * up."""
        first, second = (self._module(name, Linear) for name in (gate, up))
        kind = self._module(activation, ActivationModule).kind.kernel_name
        matrices = matrix_of(first), matrix_of(second)
        return gated(*self._fed(x, norm, second), *matrices, _dtype(second, wide), _divides(second), kind)

    def add_project(self, stream: Tensor, x: Tensor, norm: NormCall | None, name: str) -> Tensor:
        """Add a product to the stream."""
        linear = self._module(name, Linear)
        add_product(stream, *self._fed(x, norm, linear), matrix_of(linear), _divides(linear))
        return stream

    def add_normed(self, stream: Tensor, x: Tensor, norm: NormCall) -> Tensor:
        """Add a normalised answer to the stream."""
        after = self._module(norm.name, RMSNorm)
        add_normed(stream, x, after.weight, after.eps)
        return stream

    def add_scaled(self, stream: Tensor, x: Tensor, factor: float) -> Tensor:
        """Add x, scaled, to the stream."""
        add_scaled(stream, stream, x, factor)
        return stream

    def scaled_sum(self, x: Tensor, y: Tensor, factor: float) -> Tensor:
        """Return x + y, scaled, in float32."""
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        add_scaled(out, x, y, factor)
        return out

    def gate(self, x: Tensor, activation: str | None, y: Tensor) -> Tensor:
        """Return activation(x) * y."""
        kind = "" if activation is None else self._module(activation, ActivationModule).kind.kernel_name
        return gate(x, y, kind)

    def parts(self, x: Tensor, how: str, sizes: Any) -> Sequence[Tensor]:
        """Return the parts of a row."""
        cut = x.chunk(sizes, dim=-1) if isinstance(sizes, int) and how == "chunk" else torch.split(x, sizes, dim=-1)
        return tuple(part.contiguous() for part in cut)  # of one sequence it is; kernels find rows by shape alone

    def add_normed_and_norm(
        self, stream: Tensor, x: Tensor, norm: NormCall, norm_of_sum: NormCall
    ) -> tuple[Tensor, Tensor]:
        """Add a normalised answer to the stream; return it, and it normalised."""
        return stream, self._norm(stream, None, norm_of_sum, x, self._module(norm.name, RMSNorm).weight)

    def attend_heads(
        self,
        q: Tensor | Joined,
        k: Tensor | Joined,
        v: Tensor | Joined,
        rope: Tensor | None,
        q_norm: NormCall | None,
        k_norm: NormCall | None,
        k_cache: Tensor,
        v_cache: Tensor,
        starts: Tensor,
        counts: Tensor,
        window: int,
        scale: float,
        sinks: Tensor | None = None,
        _library: str = "",
        cap: float = 0.0,
    ) -> Tensor:
        """Write the new key and value; return what the heads answer, side by side."""
        place = (k_cache, v_cache, starts, counts)
        apart = [one for one in (q, k, v) if not isinstance(one, Joined)]
        projected = q.rows if isinstance(q, Joined) else torch.cat(apart, dim=-1)
        if q_norm is None or k_norm is None:
            query = rotate_and_write(projected, rope, *place)
        else:
            first, second = (self._module(norm.name, RMSNorm) for norm in (q_norm, k_norm))
            norms = (first.weight, second.weight, first.eps, first.scale_in_float32)
            query = rotate_and_write(projected, rope, *place, *norms)
        return attend_written(query, *place, window, scale, sinks, self.arrivals, cap).view(len(query), -1)

    def choose(self, scores: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """Return the experts chosen for each token, nobody for padding, and their shares."""
        return choose_experts(scores, self._counts, top_k)

    def add_experts(self, stream: Tensor, x: Tensor, _norm: None, chosen: Tensor, shares: Tensor, name: str) -> Tensor:
        """Add what the chosen experts answer to the stream."""
        experts = self._module(name, Experts)
        parts = (experts.gate_proj, experts.up_proj, experts.down_proj)
        weights, biases = [part.weight for part in parts], [part.bias for part in parts]
        formats = [DENSE if part.packing is None else part.packing.format for part in parts]
        add_experts(stream, x, chosen, shares, weights, biases, None, (experts.limit, experts.alpha), formats)
        return stream

    def _fed(self, x: Tensor, norm: NormCall | None, linear: Linear) -> Fed:
        """Return `x` [B, I], normalised where there is a norm, as the projection reads it: codes if int8."""
        if linear.int8_order is None:
            return (x if norm is None else self._norm(x, linear.dtype, norm)), None
        if norm is None:
            return norm_to_codes(x, *NO_NORM, linear.dtype)
        return norm_to_codes(x, *_weights(self.modules[norm.name]), norm.dtype or linear.dtype)

    def _norm(
        self,
        x: Tensor,
        dtype: torch.dtype | None,
        norm: NormCall,
        added: Tensor | None = None,
        weight_after: Tensor | None = None,
    ) -> Tensor:
        """Return `x` normalised, in the norm's dtype or this; `added` is added before, as kernels/gpu/norm.py does."""
        weight, bias, eps, is_rms, wide = _weights(self.modules[norm.name])
        kept = norm.dtype or dtype or x.dtype
        return residual_norm(x, added, weight, bias, eps, is_rms, kept, wide, weight_after)

    def _module(self, name: str, kind: type[fusing.M]) -> fusing.M:
        module = self.modules[name]
        assert isinstance(module, kind), f"{name} is a {type(module).__name__}"
        return module


ENTRIES: Mapping[object, Callable[..., Any]] = {
    fusing.project: DeviceRun.project,
    fusing.gated: DeviceRun.gated,
    fusing.add_project: DeviceRun.add_project,
    fusing.add_normed: DeviceRun.add_normed,
    fusing.add_normed_and_norm: DeviceRun.add_normed_and_norm,
    fusing.attend_heads: DeviceRun.attend_heads,
    fusing.add_experts: DeviceRun.add_experts,
    fusing.add_scaled: DeviceRun.add_scaled,
    fusing.scaled_sum: DeviceRun.scaled_sum,
    fusing.gate: DeviceRun.gate,
    fusing.parts: DeviceRun.parts,
    "float": lambda _run, x: x.float(),
    "to": lambda _run, x, dtype: x.to(dtype),
    capped: lambda _run, x, limit: capped_elements(x, limit),
    choose: DeviceRun.choose,
    without_padding: lambda _run, chosen, _span: chosen,  # `choose` has seen to it
    getattr: lambda _run, owner, name: getattr(owner, name),
    operator.getitem: lambda _run, values, index: values if isinstance(values, Joined) else values[index],
}
assert ENTRIES.keys() | {RMSNorm, LayerNorm} == OPERATIONS, "graph/device_obstacle.py says what has an entry here"


def matrix_of(linear: Linear) -> Matrix:
    """Return a projection as the product kernels take it."""
    name = DENSE if linear.packing is None else linear.packing.format
    return Matrix(linear.weight, linear.bias, linear.weight_scale, name, linear.outputs)


def _weights(norm: nn.Module) -> tuple[Tensor, Tensor | None, float, bool, bool]:
    """Return weight, bias, eps, whether it is an RMSNorm, and whether it multiplies before it rounds."""
    if isinstance(norm, RMSNorm):
        return norm.weight, None, norm.eps, True, norm.scale_in_float32
    assert isinstance(norm, LayerNorm), f"{type(norm).__name__} is no normalisation"
    return norm.weight, norm.bias, norm.eps, False, True


def _dtype(linear: Linear, wide: bool) -> torch.dtype:
    return torch.float32 if wide else linear.dtype


def _divides(linear: Linear) -> bool:
    return linear.int8_order == "divided"
