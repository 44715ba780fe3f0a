"""One block's instructions of a native program, recorded from its modules.

norm q k v | attend | o, add | norm gate up | down, add
                             | norm router | route | up of the chosen | down of the chosen, add
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from graphcore.graph.state import StepState
from graphcore.kernels import instructions
from graphcore.kernels import native_step as native
from graphcore.kernels.library import Matrix
from graphcore.kernels.packed import DTYPE_NUMBERS, ROUNDINGS
from graphcore.nn.attention import Attention
from graphcore.nn.block import Block
from graphcore.nn.kv_cache import LayerCache
from graphcore.nn.linear import Linear
from graphcore.nn.mlp import MLP
from graphcore.nn.moe import ExpertLinear, MoE
from graphcore.nn.norm import LayerNorm, RMSNorm
from graphcore.quant.packing import KernelPacking

ACTIVATION_NAMES = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
NO_NORM = instructions.Norm()
AnyNorm = RMSNorm | LayerNorm


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


@dataclass
class BlockRecorder:
    """Appends one block's instructions to a program; `x` is the residual stream, `choices` what it has recorded."""

    program: native.NativeProgram
    x: Tensor
    state: StepState
    layer: int
    fetches_experts: bool
    choices: list[Choice] = field(default_factory=list)

    def record(self, block: Block, rope: Tensor | None, cache: LayerCache) -> None:
        """Append attention and MLP, with the norms where the block has them."""
        attention, mlp = block.self_attn, block.mlp
        attended = self._attention(attention, block.input_layernorm, rope, cache)
        norm_after = block.post_attention_layernorm if block.sandwich else None
        self._add(attention.o_proj, attended, attention.attn_sub_norm, norm_after)
        norm = block.pre_feedforward_layernorm if block.sandwich else block.post_attention_layernorm
        if isinstance(mlp, MoE):
            assert not block.sandwich, "no model has experts between sandwich norms"
            self._experts(mlp, norm)
        else:
            self._mlp(mlp, norm, block.post_feedforward_layernorm if block.sandwich else None)

    def _attention(self, attention: Attention, norm: AnyNorm, rope: Tensor | None, cache: LayerCache) -> Tensor:
        """Append the projections and the softmax; returns what comes before the output projection."""
        spec, program = attention.spec, self.program
        width = spec.head_dim
        q, k, v = (program.buffer(heads * width) for heads in (spec.heads, spec.kv_heads, spec.kv_heads))
        out = program.buffer(spec.heads * width)
        projections = ((attention.q_proj, q), (attention.k_proj, k), (attention.v_proj, v))
        matrices = [matrix_of(program, linear, buffer) for linear, buffer in projections]
        native.linear(program, self.x, matrices, rounding_of(attention.q_proj), norm_of(program, norm))
        arguments = instructions.Attend()
        arguments.q, arguments.k, arguments.v, arguments.out = (program.address(part) for part in (q, k, v, out))
        arguments.q_norm, arguments.k_norm = norm_of(program, attention.q_norm), norm_of(program, attention.k_norm)
        arguments.rope, arguments.sinks = program.address(rope), program.address(attention.sinks)
        arguments.position = program.address(self.state.span.starts, torch.int64)
        arguments.k_cache = program.address(cache.k, cache.k.dtype)
        arguments.v_cache = program.address(cache.v, cache.v.dtype)
        arguments.heads, arguments.kv_heads, arguments.head_dim = spec.heads, spec.kv_heads, width
        arguments.slots, arguments.window = cache.k.shape[2], spec.window or 0
        arguments.cache_format, arguments.scale = DTYPE_NUMBERS[cache.k.dtype], spec.scale
        program.needs_attention(width, cache.k.shape[2])
        program.add(arguments)
        return out

    def _mlp(self, mlp: MLP, norm: AnyNorm, norm_after: AnyNorm | None) -> None:
        program = self.program
        hidden = program.buffer(mlp.up_proj.outputs)
        activation = ACTIVATION_NAMES[mlp.spec.activation]
        up = matrix_of(program, mlp.up_proj, hidden)
        store = "put"
        matrices = [up]
        if mlp.gate_proj is not None:
            store, matrices = "gated", [matrix_of(program, mlp.gate_proj, hidden), up]
        rounding = rounding_of(mlp.up_proj)
        native.linear(program, self.x, matrices, rounding, norm_of(program, norm), store, activation)
        self._add(mlp.down_proj, hidden, mlp.ffn_sub_norm, norm_after)

    def _experts(self, moe: MoE, norm: AnyNorm) -> None:
        """Append residual += experts(norm(residual))."""
        program, router = self.program, moe.router
        logits, weights = program.buffer(router.outputs), program.buffer(moe.top_k)
        matrices = [matrix_of(program, router, logits)]
        native.linear(program, self.x, matrices, rounding_of(router), norm_of(program, norm))
        chosen = torch.zeros(moe.top_k, dtype=torch.int32)
        home = torch.zeros_like(chosen) if self.fetches_experts else chosen
        self.choices.append(Choice(self.layer, chosen, home, len(program.arguments) + 1))
        picks, places = (program.address(ids, torch.int32) for ids in (chosen, home))
        shares = program.address(weights)
        program.needs(row_floats=router.outputs + 32)
        program.add(instructions.Route(program.address(logits), router.outputs, moe.top_k, picks, shares))
        experts = moe.experts
        parts = (experts.gate_proj, experts.up_proj, experts.down_proj)
        gate, up, down = (first_expert(program, part) for part in parts)
        biases = [program.address(part.bias.float()) for part in parts]
        rounding, x = ROUNDINGS[experts.gate_proj.rounding], program.address(self.x)
        hidden = program.address(program.buffer(moe.top_k * gate.rows))
        program.needs(columns=gate.columns)
        program.needs(rows=moe.top_k, columns=down.columns)
        where, clamp = (picks, places), (experts.limit, experts.alpha)
        before = norm_of(program, norm)
        program.add(
            instructions.ExpertsUp(x, before, rounding, gate, up, *biases[:2], *where, hidden, moe.top_k, *clamp)
        )
        program.add(instructions.ExpertsDown(hidden, rounding, down, biases[2], *where, shares, x, moe.top_k))

    def _add(self, linear: Linear, x: Tensor, norm: AnyNorm | None, norm_after: AnyNorm | None) -> None:
        """Append residual += linear(norm(x)), its product normalised where there is a norm after it."""
        program, before = self.program, norm_of(self.program, norm)
        if norm_after is None:
            matrices = [matrix_of(program, linear, self.x)]
            native.linear(program, x, matrices, rounding_of(linear), before, store="add")
            return
        dim = self.x.numel()
        y = program.buffer(dim)
        native.linear(program, x, [matrix_of(program, linear, y)], rounding_of(linear), before)
        program.needs(row_floats=dim)
        program.add(
            instructions.AddNorm(program.address(y), norm_of(program, norm_after), program.address(self.x), dim)
        )


def matrix_of(program: native.NativeProgram, linear: Linear, out: Tensor) -> tuple[Matrix, Tensor | None, Tensor]:
    """Return a linear's matrix, its bias in float32 and where its product goes."""
    bias = None if linear.bias is None else linear.bias.float()
    if linear.packing is None:
        return program.dense(linear.weight), bias, out
    assert isinstance(linear.packing, KernelPacking), "checked by obstacle_of"
    program.kept.append(linear.weight)
    matrix = linear.packing.form.matrix(linear.weight)
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
    return part.packing.form.matrix(part.weight[0])


def rounding_of(linear: Linear) -> int:
    """Return the number of the rounding that a linear's input undergoes."""
    return ROUNDINGS["token" if linear.int8_order is not None else linear.rounding]


def norm_of(program: native.NativeProgram, norm: AnyNorm | None) -> instructions.Norm:
    """Return a module's normalisation as the kernels take it."""
    if norm is None:
        return NO_NORM
    if isinstance(norm, RMSNorm):
        return native.norm(program, "rms", norm.eps, norm.weight, None)
    return native.norm(program, "layer", norm.eps, norm.weight, norm.bias)
