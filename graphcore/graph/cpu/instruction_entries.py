"""Turns a module's operations into instructions of a native program; `ENTRIES` has one method for each operation.

    project (q k v) | attend_heads | add_project (o) | gated (gate up) | add_project (down)
                                                     | project (router) | choose | add_experts

lowering/targets.py says what is fused. The program computes in float32 what the modules compute in the compute dtype. A
sum changes the stream in place, so nothing may read the old stream after it.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, fx, nn

from graphcore.activations import Activation
from graphcore.graph.cpu.expert_instructions import append_choice, append_experts
from graphcore.graph.cpu.operands import Routing, native_matrix, norm_of, rounding_of
from graphcore.graph.lowering import operations
from graphcore.graph.lowering.operations import Call, NormCall
from graphcore.graph.lowering.targets import lower_to_instructions, missing_entry
from graphcore.graph.lowering.tracing import M, Traced
from graphcore.graph.state import StepState
from graphcore.kernels.cpu import instructions
from graphcore.kernels.cpu import program as native
from graphcore.kernels.cpu.attention import cache_number
from graphcore.kernels.cpu.library import ROUNDINGS
from graphcore.kernels.ops.attention_parameters import AttentionParameters
from graphcore.kernels.ops.gated_convolution import ConvParts, gated_convolution
from graphcore.kernels.ops.gated_delta import DeltaParts, delta_heads
from graphcore.kernels.ops.kv_formats import head_dim_of
from graphcore.nn.latent_attention import HeadLinear
from graphcore.nn.linear import Linear, projection_of
from graphcore.nn.mlp import ActivationModule, capped, scaled
from graphcore.nn.moe import Experts, choose_experts, scaled_by_gate, without_padding
from graphcore.nn.norm import LayerNorm, RMSNorm
from graphcore.nn.spec import Shares
from graphcore.routing import ScoredRouting

NO_NORM = instructions.Norm()


def obstacle_of_operations(module: nn.Module, changes_x: bool) -> str | None:
    """Return why a module cannot be recorded, or None; `changes_x`: whether its output overwrites x, as a block's."""
    return missing_entry(lower_to_instructions(module), ENTRIES, "native instruction", changes_x)


@dataclass
class GroupEnds:
    """The layer groups of a program's instructions, in order, each with the number of instructions up to its end.

    Attributes:
        arguments: the program's instructions so far.
    """

    arguments: Sequence[object]
    _begins: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])  # group, index of its first instruction
    _of_matrix: Mapping[str, int] = field(default_factory=dict)

    def begin(self, group: int, of_matrix: Mapping[str, int] | None = None) -> None:
        """Note that the next instructions belong to a group.

        Args:
            of_matrix: numbers of the groups of the projections that follow, by name; None if all are in the group.
        """
        self._of_matrix = of_matrix or {}
        if self._begins[-1][0] != group:
            self._begins.append((group, len(self.arguments)))

    def group_of(self, linear: str) -> int:
        """Return the number of the group of a projection's matrix."""
        return self._of_matrix.get(projection_of(linear), self._begins[-1][0])

    def enter(self, linear: str) -> None:
        """Note that the next instructions read the group of a projection's matrix."""
        self.begin(self.group_of(linear), self._of_matrix)

    def found(self) -> list[tuple[int, int]]:
        """Return the number of each group that has instructions, and the number of instructions up to its end."""
        ends = [*(begin for _, begin in self._begins[1:]), len(self.arguments)]
        return [(group, end) for (group, begin), end in zip(self._begins, ends, strict=True) if begin < end]


@dataclass
class ModuleRecorder:
    """Appends a module's instructions to a program.

    Attributes:
        modules: modules by their names in the operations.
        layer: index of the layer if the module is a block; -1 for a head.
        ends: gets the groups of the matrices that instructions read; None if the module is in one group.
        choices: routing of the blocks recorded so far.
    """

    program: native.NativeProgram
    state: StepState
    modules: Mapping[str, nn.Module]
    layer: int = -1
    fetches_experts: bool = False
    ends: GroupEnds | None = None
    choices: list[Routing] = field(default_factory=list)
    _values: dict[Call, Any] = field(default_factory=dict)
    _places: dict[Call, Tensor] = field(default_factory=dict)

    def record(self, traced: Traced, inputs: Mapping[str, object], place: Tensor | None = None) -> Tensor:
        """Append all instructions; return the output tensor.

        Args:
            traced: `lower_to_instructions` of this module, or of one of the same spec.
            inputs: inputs of the module's forward, by name; the stream, [B, D] float32, may be changed in place.
            place: tensor for the output if the output is a product or a cap; None to allocate it.
        """
        answer = traced.nodes()[-1].args[0]
        for node in traced.nodes():
            match node.op:
                case "placeholder":
                    self._values[node] = inputs.get(node.target)
                case "get_attr":
                    self._values[node] = self._attribute(node.target)
                case "output":
                    found: Tensor = self._values[answer]
                    assert place is None or found is place, "an answer that has a place is a product or a cap"
                    return found
                case _:
                    if place is not None and node is answer:
                        self._places[node] = place
                    is_module = node.op == "call_module"
                    entry = ENTRIES[type(self.modules[node.target]) if is_module else node.target]
                    self._values[node] = entry(self, node, *map(self._value, node.args))
        raise AssertionError("every graph has an output")

    def _value(self, argument: object) -> Any:
        return self._values[argument] if isinstance(argument, fx.Node) else argument

    def _attribute(self, name: str) -> object:
        owner, _, attribute = name.rpartition(".")
        return self.program.in_float32(self.modules[owner].get_buffer(attribute))

    def reorder(self, _node: Call, x: Tensor, linear: str) -> Tensor:
        """Append the input of a linear with its features in the linear's order."""
        program, order = self.program, self._module(linear, Linear).input_order
        assert order is not None, f"{linear} has no order"
        out = program.block_buffer(len(order))
        columns = program.address(order, torch.int32)
        program.add(instructions.Reorder(program.per_row(x), columns, program.per_row(out), len(order)))
        return out

    def project(
        self,
        node: Call,
        x: Tensor,
        norm: NormCall | None,
        linears: Sequence[str],
        activation: str | None,
        _wide: bool,
        factor: float = 1.0,
    ) -> Tensor | list[Tensor]:
        """Append (activations of) products of one normalised input."""
        rounding = rounding_of(self._module(linears[0], Linear))
        outs = self._products(node, x, norm, linears, activation, rounding, factor)
        return outs if len(outs) > 1 else outs[0]

    def _products(
        self,
        node: Call,
        x: Tensor,
        norm: NormCall | None,
        linears: Sequence[str],
        activation: str | None,
        rounding: int,
        factor: float = 1.0,
    ) -> list[Tensor]:
        """Append (activations of) products of one normalised input, as one instruction for each layer group."""
        outs: list[Tensor] = []
        kind = Activation.NONE if activation is None else self._module(activation, ActivationModule).kind
        for names in self._by_group(linears):
            self._enter(names[0])
            modules = [self._module(name, Linear) for name in names]
            matrices = [native_matrix(self.program, one, self.out(node, one.outputs)) for one in modules]
            native.append_project(self.program, x, matrices, rounding, self._norm(norm), "put", kind, factor=factor)
            outs += [out for *_, out in matrices]
        return outs

    def gated(
        self, node: Call, x: Tensor, norm: NormCall | None, gate: str, up: str, activation: str, _wide: bool
    ) -> Tensor:
        """Append activation(gate(norm(x))) * up(norm(x)); if the two are in different groups, one after the other."""
        modules = [self._module(name, Linear) for name in (gate, up)]
        if len(self._by_group((gate, up))) > 1:
            how = rounding_of(modules[1])
            (gates,) = self._products(node, x, norm, (gate,), activation, how)
            (ups,) = self._products(node, x, norm, (up,), None, how)
            return self.gate(node, gates, None, ups)
        self._enter(gate)
        out = self.out(node, modules[0].outputs)
        matrices = [native_matrix(self.program, linear, out) for linear in modules]
        kind = self._module(activation, ActivationModule).kind
        native.append_project(self.program, x, matrices, rounding_of(modules[1]), self._norm(norm), "gated", kind)
        return out

    def add_project(
        self, node: Call, stream: Tensor, x: Tensor, norm: NormCall | None, linear: str, factor: float = 1.0
    ) -> Tensor:
        """Append stream += factor * linear(norm(x))."""
        module = self._module(linear, Linear)
        self._enter(linear)
        matrices = [native_matrix(self.program, module, stream)]
        native.append_project(self.program, x, matrices, rounding_of(module), self._norm(norm), "add", factor=factor)
        return stream

    def add_normed(self, node: Call, stream: Tensor, x: Tensor, norm: NormCall) -> Tensor:
        """Append stream += norm(x)."""
        program, dim = self.program, stream.shape[-1]
        program.needs(row_floats=dim)
        program.add(instructions.AddNorm(program.per_row(x), self._norm(norm), program.per_row(stream), dim, False, 1))
        return stream

    def normed(self, node: Call, x: Tensor, _dtype: torch.dtype | None = None) -> Tensor:
        """Append norm(x)."""
        program, out = self.program, self.program.block_buffer(x.shape[-1])
        program.needs(row_floats=x.shape[-1])
        norm = norm_of(program, self.modules[node.target])
        program.add(instructions.AddNorm(program.per_row(x), norm, program.per_row(out), x.shape[-1], True, 1))
        return out

    def add_scaled(self, _node: Call, stream: Tensor, x: Tensor, factor: float) -> Tensor:
        """Append stream += factor * x."""
        return self.elementwise("add", stream, x, stream, factor=factor)

    def scaled_sum(self, _node: Call, x: Tensor, y: Tensor, factor: float) -> Tensor:
        """Append x + factor * y."""
        return self.elementwise("add", x, y, self.program.block_buffer(x.shape[-1]), factor=factor)

    def gate(self, _node: Call, x: Tensor, activation: str | None, y: Tensor) -> Tensor:
        """Append activation(x) * y."""
        kind = Activation.NONE if activation is None else self._module(activation, ActivationModule).kind
        return self.elementwise("gate", x, y, self.program.block_buffer(y.shape[-1]), kind)

    def activated(self, node: Call, x: Tensor) -> Tensor:
        """Append activation(x), as a gate of ones."""
        kind, ones = (
            self._module(node.target, ActivationModule).kind,
            torch.ones(x.shape[-1], dtype=torch.float32, device="cpu"),
        )
        return self.elementwise("gate", x, self.program.own(ones), self.program.block_buffer(x.shape[-1]), kind)

    def capped(self, node: Call, x: Tensor, cap: float) -> Tensor:
        """Append cap * tanh(x / cap)."""
        return self.elementwise("cap", x, None, self.out(node, x.shape[-1]), factor=cap)

    def scaled(self, _node: Call, stream: Tensor, factor: Tensor) -> Tensor:
        """Append stream *= factor, a number in memory."""
        return self.elementwise("scale", factor, stream, stream)

    def parts(self, _node: Call, x: Tensor, how: str, sizes: Any) -> Sequence[Tensor]:
        """Return views of a buffer's parts; nothing is copied."""
        return x.chunk(sizes, -1) if isinstance(sizes, int) and how == "chunk" else torch.split(x, sizes, -1)

    def elementwise(
        self,
        elements: str,
        x: Tensor,
        y: Tensor | None,
        out: Tensor,
        kind: Activation = Activation.NONE,
        factor: float = 0.0,
    ) -> Tensor:
        """Append an elementwise instruction (instructions.Elementwise); return `out`."""
        number, arrays = instructions.ELEMENTS[elements], (self.program.per_row(one) for one in (x, y, out))
        self.program.add(instructions.Elementwise(number, kind, *arrays, out.shape[-1], factor))
        return out

    def project_heads(self, _node: Call, prefix: Tensor | None, x: Tensor, name: str) -> Tensor:
        """Append a product for each head with the head's own matrix; a prefix is copied before each result."""
        program, module = self.program, self._module(name, HeadLinear)
        self._enter(name)
        heads, matrix = len(module.weight), program.matrix(module.weight[0], module.packing)  # the others follow
        prefix_dim = 0 if prefix is None else prefix.shape[-1] // heads
        out = program.block_buffer(heads * (prefix_dim + matrix.rows))
        rows, rounding = (program.per_row(one) for one in (x, prefix)), ROUNDINGS[module.rounding]
        program.needs(rows=program.rows, columns=matrix.columns)
        program.add(instructions.ProjectHeads(*rows, rounding, matrix, program.per_row(out), heads, prefix_dim))
        return out

    def attend_heads(
        self,
        _node: Call,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        rope: Tensor | None,
        q_norm: NormCall | None,
        k_norm: NormCall | None,
        v_norm: NormCall | None,
        q_scale: tuple[float, int] | None,
        k_cache: Tensor,
        v_cache: Tensor,
        table: Tensor,
        *rest: Any,
    ) -> Tensor:
        """Append norms, rotation, scale of queries, cache write (if there are keys) and attention.

        Args:
            rest: starts, counts, and the fields of `AttentionParameters`.
        """
        program, scoring = self.program, AttentionParameters(*rest[2:])
        (kv_heads, page), width = k_cache.shape[1:3], head_dim_of(k_cache)
        heads, values_from = q.shape[-1] // width, scoring.values_from
        out = program.block_buffer(heads * (width - values_from))
        arguments = instructions.Attend()
        arguments.q, arguments.k, arguments.v, arguments.out = (program.per_row(part) for part in (q, k, v, out))
        arguments.q_norm, arguments.k_norm, arguments.v_norm = map(self._norm, (q_norm, k_norm, v_norm))
        arguments.rope, arguments.sinks = program.address(rope), program.address(scoring.sinks)
        arguments.starts = program.address(self.state.span.starts, torch.int64)
        arguments.sequences = program.address(program.sequences, torch.int64)
        v_cache = k_cache if values_from else v_cache
        arguments.k_cache, arguments.v_cache = (program.address(one, one.dtype) for one in (k_cache, v_cache))
        arguments.table = program.address(table, torch.int32)
        arguments.heads, arguments.kv_heads = heads, kv_heads
        arguments.head_dim, arguments.values_from = width, values_from
        arguments.unrotated = 0 if rope is None else width - 2 * rope.shape[-1]
        arguments.page, arguments.num_pages = page, table.shape[1]
        arguments.k_format, arguments.v_format = cache_number(k_cache), cache_number(v_cache)
        arguments.window, arguments.scale, arguments.cap = scoring.window, scoring.scale, scoring.cap
        arguments.beta, arguments.period = q_scale or (0.0, 0)
        program.needs_attention(width, page * table.shape[1])
        program.add(arguments)
        return out

    def delta_heads(self, _node: Call, mixed: Tensor, z: Tensor, a: Tensor, b: Tensor, *rest: Any) -> Tensor:
        """Append the short convolution and the delta rule. Args: rest: fields of `DeltaParts` after `b`."""
        rows = [one[:, None] for one in (mixed, z, a, b)]  # [B, 1, ...]
        parts = DeltaParts(rows[0], rows[1], rows[2], rows[3], *rest)
        span = self.state.span
        parts = parts._replace(starts=span.starts, counts=span.counts)
        return native.append_delta_heads(self.program, parts)

    def gated_convolution(self, _node: Call, mixed: Tensor, *rest: Any) -> Tensor:
        """Append a gated short convolution. Args: rest: fields of `ConvParts` after `mixed`."""
        span = self.state.span
        parts = ConvParts(mixed[:, None], *rest)._replace(starts=span.starts, counts=span.counts)
        return native.append_gated_convolution(self.program, parts)

    def scaled_by_gate(self, _node: Call, gate: Tensor, x: Tensor) -> Tensor:
        """Append sigmoid(gate) * x, with one gate for each row."""
        return self.elementwise("scale", gate, x, self.program.block_buffer(x.shape[-1]), Activation.SIGMOID)

    def choose(
        self, _node: Call, scores: Tensor, top_k: int, shares: Shares | ScoredRouting, *vectors: Tensor | None
    ) -> tuple[Routing, Tensor]:
        """Append the routing; return its buffers and the shares. Args: vectors: factors and selection biases."""
        weights, (scales, bias) = self.program.block_buffer(top_k), vectors
        how = shares, (scales, bias), self.fetches_experts
        choice = append_choice(self.program, self.layer, scores, weights, *how)
        self.choices.append(choice)
        return choice, weights

    def add_experts(
        self, node: Call, stream: Tensor, x: Tensor, norm: NormCall | None, choice: Routing, shares: Tensor, name: str
    ) -> Tensor:
        """Append stream += the weighted sum of the chosen experts' outputs for norm(x)."""
        append_experts(self.program, self._module(name, Experts), self._norm(norm), choice, x, shares, stream)
        return stream

    def sum_experts(
        self, _node: Call, x: Tensor, norm: NormCall | None, choice: Routing, shares: Tensor, name: str
    ) -> Tensor:
        """Append the weighted sum of the chosen experts' outputs for norm(x)."""
        experts, out = self._module(name, Experts), self.program.block_buffer(x.shape[-1])
        append_experts(self.program, experts, self._norm(norm), choice, x, shares, out, puts=True)
        return out

    def _by_group(self, linears: Sequence[str]) -> list[list[str]]:
        """Return projections in their order, those of one layer group together."""
        if self.ends is None:
            return [[*linears]]
        return [[*names] for _, names in groupby(linears, key=self.ends.group_of)]

    def _enter(self, linear: str) -> None:
        """Note that the next instruction reads a projection's matrix."""
        if self.ends is not None:
            self.ends.enter(linear)

    def _module(self, name: str, kind: type[M]) -> M:
        module = self.modules[name]
        assert isinstance(module, kind), f"{name} is a {type(module).__name__}"
        return module

    def _norm(self, norm: NormCall | None) -> instructions.Norm:
        return NO_NORM if norm is None else norm_of(self.program, self.modules[norm.name])

    def out(self, node: Call, size: int) -> Tensor:
        """Return the output tensor of a product: the one that `record` was given, or a new buffer."""
        return self._places[node] if node in self._places else self.program.block_buffer(size)


ENTRIES: Mapping[object, Callable[..., Any]] = {
    operations.reorder: ModuleRecorder.reorder,
    operations.project: ModuleRecorder.project,
    operations.gated: ModuleRecorder.gated,
    operations.add_project: ModuleRecorder.add_project,
    operations.add_normed: ModuleRecorder.add_normed,
    operations.attend_heads: ModuleRecorder.attend_heads,
    operations.project_heads: ModuleRecorder.project_heads,
    operations.add_experts: ModuleRecorder.add_experts,
    operations.sum_experts: ModuleRecorder.sum_experts,
    RMSNorm: ModuleRecorder.normed,
    LayerNorm: ModuleRecorder.normed,
    ActivationModule: ModuleRecorder.activated,
    scaled: ModuleRecorder.scaled,
    operations.add_scaled: ModuleRecorder.add_scaled,
    operations.scaled_sum: ModuleRecorder.scaled_sum,
    operations.gate: ModuleRecorder.gate,
    operations.parts: ModuleRecorder.parts,
    capped: ModuleRecorder.capped,
    delta_heads: ModuleRecorder.delta_heads,
    gated_convolution: ModuleRecorder.gated_convolution,
    scaled_by_gate: ModuleRecorder.scaled_by_gate,
    choose_experts: ModuleRecorder.choose,
    without_padding: lambda _recorder, _node, choice, _span: choice,  # rows without a token do not run
    getattr: lambda _recorder, _node, owner, name: getattr(owner, name),
    operator.getitem: lambda _recorder, _node, values, index: values[index],
}
