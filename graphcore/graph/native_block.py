"""A module's operations as instructions of a native program: one entry for each operation that there is.

    project (q k v) | attend_heads | add_project (o) | gated (gate up) | add_project (down)
                                                     | project (router) | choose | add_experts

What is fused is said by `RULES`. The program computes in float32 what the modules compute in the compute dtype. A sum
changes the stream where it lies, which asks that nobody reads the old stream any more.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from graphcore.activations import Activation
from graphcore.graph import fusing
from graphcore.graph.fusing import Call, NormCall, Traced, trace
from graphcore.graph.state import StepState
from graphcore.kernels import instructions
from graphcore.kernels import native_step as native
from graphcore.kernels.library import Matrix
from graphcore.kernels.packed import DTYPE_NUMBERS, ROUNDINGS
from graphcore.nn.activation import ActivationModule, capped
from graphcore.nn.linear import Linear
from graphcore.nn.moe import ExpertLinear, Experts, choose, without_padding
from graphcore.nn.norm import LayerNorm, RMSNorm
from graphcore.quant.packing import KernelPacking

RULES = (
    fusing.without_casts,
    fusing.gate_and_up,
    fusing.product_and_activation,
    fusing.heads,
    fusing.queries_keys_values,
    fusing.products,
    fusing.gates,
    fusing.sums_when_read,
    fusing.product_and_sum,
    fusing.norm_and_sum,
    fusing.experts_and_sum,
    fusing.scaled_sums,
    fusing.norm_and_products,
)
NO_NORM = instructions.Norm()


@dataclass(frozen=True)
class Choice:
    """Where a recorded block chooses experts, and where it looks for them.

    Attributes:
        layer: the block's.
        chosen: [C] int32, written by the instructions before `begin`.
        places: [C] int32, read from `begin` on: where each of them lies. `chosen` itself where all are at home.
        begin: the first of the instructions that run experts.
    """

    layer: int
    chosen: Tensor
    places: Tensor
    begin: int


def lowered(module: nn.Module) -> Traced:
    """Return a module's operations as far as they can be one."""
    return trace(module, RULES)


def obstacle_of_operations(module: nn.Module, changes_x: bool) -> str | None:
    """Return why there are no instructions for what a module computes, or None; `changes_x` as of a block."""
    return fusing.missing_entry(lowered(module), ENTRIES, "native instruction", changes_x)


@dataclass
class ModuleRecorder:
    """Appends a module's instructions to a program.

    Attributes:
        modules: by their names in the operations.
        layer: its number, where it is a layer.
        choices: of experts, as they are recorded.
    """

    program: native.NativeProgram
    state: StepState
    modules: Mapping[str, nn.Module]
    layer: int = -1
    fetches_experts: bool = False
    choices: list[Choice] = field(default_factory=list)
    _values: dict[Call, Any] = field(default_factory=dict)
    _places: dict[Call, Tensor] = field(default_factory=dict)

    def record(self, traced: Traced, inputs: Mapping[str, object], place: Tensor | None = None) -> Tensor:
        """Append everything; return where the answer is.

        Args:
            traced: `lowered`; of this module, or of one of the same spec.
            inputs: of the module's forward, by name; the stream, [D] float32, may be changed where it lies.
            place: of the answer, where it is a product.
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
                    self._values[node] = ENTRIES[node.target](self, node, *map(self._value, node.args))
        raise AssertionError("every graph has an output")

    def _value(self, argument: object) -> Any:
        return self._values[argument] if isinstance(argument, fx.Node) else argument

    def _attribute(self, name: str) -> object:
        owner, _, attribute = name.rpartition(".")
        return self.modules[owner].get_buffer(attribute).float()

    def project(
        self, node: Call, x: Tensor, norm: NormCall | None, linears: Sequence[str], activation: str | None, _wide: bool
    ) -> Tensor | list[Tensor]:
        """Append products of one input."""
        modules = [self._module(name, Linear) for name in linears]
        outs = [self._out(node, linear.outputs) for linear in modules]
        matrices = [matrix_of(self.program, linear, out) for linear, out in zip(modules, outs, strict=True)]
        kind = Activation.NONE if activation is None else self._module(activation, ActivationModule).kind
        native.linear(self.program, x, matrices, rounding_of(modules[0]), self._norm(norm), "put", kind)
        return outs if len(outs) > 1 else outs[0]

    def gated(
        self, node: Call, x: Tensor, norm: NormCall | None, gate: str, up: str, activation: str, _wide: bool
    ) -> Tensor:
        """Append activation(gate) * up."""
        modules = [self._module(name, Linear) for name in (gate, up)]
        out = self._out(node, modules[0].outputs)
        matrices = [matrix_of(self.program, linear, out) for linear in modules]
        kind = self._module(activation, ActivationModule).kind
        native.linear(self.program, x, matrices, rounding_of(modules[1]), self._norm(norm), "gated", kind)
        return out

    def add_project(self, node: Call, stream: Tensor, x: Tensor, norm: NormCall | None, linear: str) -> Tensor:
        """Append stream += linear(norm(x))."""
        module = self._module(linear, Linear)
        matrices = [matrix_of(self.program, module, stream)]
        native.linear(self.program, x, matrices, rounding_of(module), self._norm(norm), "add")
        return stream

    def add_normed(self, node: Call, stream: Tensor, x: Tensor, norm: NormCall) -> Tensor:
        """Append stream += norm(x)."""
        program, dim = self.program, stream.numel()
        program.needs(row_floats=dim)
        program.add(instructions.AddNorm(program.address(x), self._norm(norm), program.address(stream), dim))
        return stream

    def add_scaled(self, _node: Call, stream: Tensor, x: Tensor, factor: float) -> Tensor:
        """Append stream += factor * x."""
        return self._elementwise("add", stream, x, stream, factor=factor)

    def scaled_sum(self, _node: Call, x: Tensor, y: Tensor, factor: float) -> Tensor:
        """Append x + factor * y."""
        return self._elementwise("add", x, y, self.program.buffer(x.numel()), factor=factor)

    def gate(self, _node: Call, x: Tensor, activation: str | None, y: Tensor) -> Tensor:
        """Append activation(x) * y."""
        kind = Activation.NONE if activation is None else self._module(activation, ActivationModule).kind
        return self._elementwise("gate", x, y, self.program.buffer(y.numel()), kind)

    def capped(self, node: Call, x: Tensor, cap: float) -> Tensor:
        """Append cap * tanh(x / cap)."""
        return self._elementwise("cap", x, None, self._out(node, x.numel()), factor=cap)

    def parts(self, _node: Call, x: Tensor, how: str, sizes: Any) -> Sequence[Tensor]:
        """Return parts of a buffer; they move nothing."""
        return x.chunk(sizes) if isinstance(sizes, int) and how == "chunk" else torch.split(x, sizes)

    def _elementwise(
        self,
        elements: str,
        x: Tensor,
        y: Tensor | None,
        out: Tensor,
        kind: Activation = Activation.NONE,
        factor: float = 0.0,
    ) -> Tensor:
        address, number = self.program.address, instructions.ELEMENTS[elements]
        pointers = address(x), address(y), address(out)
        self.program.add(instructions.Elementwise(number, kind, *pointers, out.numel(), factor))
        return out

    def attend_heads(
        self,
        _node: Call,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rope: Tensor | None,
        q_norm: NormCall | None,
        k_norm: NormCall | None,
        k_cache: Tensor,
        v_cache: Tensor,
        _starts: object,
        _counts: object,
        window: int,
        scale: float,
        sinks: Tensor | None = None,
        _library: str = "",
        cap: float = 0.0,
    ) -> Tensor:
        """Append norms of heads, rotation, the cache's write and the softmax of one token."""
        program, (_, kv_heads, slots, width) = self.program, k_cache.shape
        out = program.buffer(q.numel())
        arguments = instructions.Attend()
        arguments.q, arguments.k, arguments.v, arguments.out = (program.address(part) for part in (q, k, v, out))
        arguments.q_norm, arguments.k_norm = self._norm(q_norm), self._norm(k_norm)
        arguments.rope, arguments.sinks = program.address(rope), program.address(sinks)
        arguments.position = program.address(self.state.span.starts, torch.int64)
        arguments.k_cache = program.address(k_cache, k_cache.dtype)
        arguments.v_cache = program.address(v_cache, v_cache.dtype)
        arguments.heads, arguments.kv_heads, arguments.head_dim = q.numel() // width, kv_heads, width
        arguments.slots, arguments.window = slots, window
        arguments.unrotated = 0 if rope is None else width - 2 * rope.shape[-1]
        arguments.cache_format, arguments.scale, arguments.cap = DTYPE_NUMBERS[k_cache.dtype], scale, cap
        program.needs_attention(width, slots)
        program.add(arguments)
        return out

    def choose(self, _node: Call, scores: Tensor, top_k: int) -> tuple[Choice, Tensor]:
        """Append the choice of experts; returns it, and the shares."""
        program, shares = self.program, self.program.buffer(top_k)
        chosen = torch.zeros(top_k, dtype=torch.int32)
        home = torch.zeros_like(chosen) if self.fetches_experts else chosen
        choice = Choice(self.layer, chosen, home, len(program.arguments) + 1)
        self.choices.append(choice)
        program.needs(row_floats=scores.numel() + 32)
        picks = program.address(chosen, torch.int32)
        program.add(
            instructions.Route(program.address(scores), scores.numel(), top_k, picks, program.address(shares)),
        )
        return choice, shares

    def add_experts(
        self, node: Call, stream: Tensor, x: Tensor, norm: NormCall | None, choice: Choice, shares: Tensor, name: str
    ) -> Tensor:
        """Append stream += the weighted sum of what the chosen experts make of norm(x)."""
        program = self.program
        assert choice.begin == len(program.arguments), "experts come right behind their choice"
        experts = self._module(name, Experts)
        parts = (experts.gate_proj, experts.up_proj, experts.down_proj)
        gate, up, down = (first_expert(program, part) for part in parts)
        biases = [program.address(part.bias.float()) for part in parts]
        rounding, used = ROUNDINGS[experts.gate_proj.rounding], shares.numel()
        where = [program.address(ids, torch.int32) for ids in (choice.chosen, choice.places)]
        hidden = program.address(program.buffer(used * gate.rows))
        program.needs(columns=gate.columns)
        program.needs(rows=used, columns=down.columns)
        given = (program.address(x), self._norm(norm), rounding)
        clamp = (experts.limit, experts.alpha)
        program.add(instructions.ExpertsUp(*given, gate, up, *biases[:2], *where, hidden, used, *clamp))
        sum_of = (program.address(shares), program.address(stream), used)
        program.add(instructions.ExpertsDown(hidden, rounding, down, biases[2], *where, *sum_of))
        return stream

    def _module(self, name: str, kind: type[fusing.M]) -> fusing.M:
        module = self.modules[name]
        assert isinstance(module, kind), f"{name} is a {type(module).__name__}"
        return module

    def _norm(self, norm: NormCall | None) -> instructions.Norm:
        return NO_NORM if norm is None else norm_of(self.program, self.modules[norm.name])

    def _out(self, node: Call, size: int) -> Tensor:
        """Return where a product goes: its place, or a buffer of its own."""
        return self._places[node] if node in self._places else self.program.buffer(size)


ENTRIES: Mapping[object, Callable[..., Any]] = {
    fusing.project: ModuleRecorder.project,
    fusing.gated: ModuleRecorder.gated,
    fusing.add_project: ModuleRecorder.add_project,
    fusing.add_normed: ModuleRecorder.add_normed,
    fusing.attend_heads: ModuleRecorder.attend_heads,
    fusing.add_experts: ModuleRecorder.add_experts,
    fusing.add_scaled: ModuleRecorder.add_scaled,
    fusing.scaled_sum: ModuleRecorder.scaled_sum,
    fusing.gate: ModuleRecorder.gate,
    fusing.parts: ModuleRecorder.parts,
    capped: ModuleRecorder.capped,
    choose: ModuleRecorder.choose,
    without_padding: lambda _recorder, _node, choice, _span: choice,  # its one token is real
    getattr: lambda _recorder, _node, owner, name: getattr(owner, name),
    operator.getitem: lambda _recorder, _node, values, index: values[index],
}


def matrix_of(program: native.NativeProgram, linear: Linear, out: Tensor) -> tuple[Matrix, Tensor | None, Tensor]:
    """Return a linear's matrix, its bias in float32 and where its product goes."""
    bias = None if linear.bias is None else linear.bias.float()
    if linear.packing is None:
        return program.dense(linear.weight), bias, out
    assert isinstance(linear.packing, KernelPacking), "checked by obstacle_of"
    program.kept.append(linear.weight)
    matrix = linear.packing.matrix(linear.weight)
    if linear.weight_scale is not None:
        scale = linear.weight_scale.item()
        matrix.scale = 1 / scale if linear.int8_order == "divided" else scale
    return matrix, bias, out


def first_expert(program: native.NativeProgram, part: ExpertLinear) -> Matrix:
    """Return the matrix of a layer's first expert; the kernels find the others behind it."""
    program.kept.append(part.weight)
    if part.packing is None:
        return program.dense(part.weight[0])
    assert isinstance(part.packing, KernelPacking), "checked by obstacle_of"
    return part.packing.matrix(part.weight[0])


def rounding_of(linear: Linear) -> int:
    """Return the number of the rounding that a linear's input undergoes."""
    return ROUNDINGS["token" if linear.int8_order is not None else linear.rounding]


def norm_of(program: native.NativeProgram, norm: nn.Module) -> instructions.Norm:
    """Return a module's normalisation as the kernels take it."""
    if isinstance(norm, RMSNorm):
        return native.norm(program, "rms", norm.eps, norm.weight, None)
    assert isinstance(norm, LayerNorm), f"{type(norm).__name__} is no normalisation"
    return native.norm(program, "layer", norm.eps, norm.weight, norm.bias)
