"""A whole decode step on the CPU as one native program: what a captured CUDA graph is on a GPU.

    embed -> (norm q k v | attend | o, add | norm gate up | down, add) for each block -> norm head -> choose

The program is recorded once from the decoder's modules and replayed without Python, allocation or dispatch in between.
It computes in float32 what the blocks compute in the compute dtype; a module that is not known here is refused, so that
nothing is left out in silence. One sequence; wider batches run compiled.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from graphcore.graph.state import StepState
from graphcore.graph.step import ExpertFetcher, Step
from graphcore.kernels import instructions
from graphcore.kernels import native_step as native
from graphcore.kernels.library import Matrix
from graphcore.kernels.packed import DTYPE_NUMBERS, ROUNDINGS
from graphcore.nn.attention import Attention
from graphcore.nn.block import Block
from graphcore.nn.decoder import Decoder, Embedding, Head
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
EXPERT_INSTRUCTIONS = 2  # up and down
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
class NativeStep:
    """Consecutive instructions of a program as a step.

    Attributes:
        begin: index of the first instruction.
        count: of instructions.
        choices: of experts among them, whose places the fetcher knows; none where all are at home.
    """

    group: int
    program: native.NativeProgram
    begin: int
    count: int
    choices: Sequence[Choice] = ()
    fetcher: ExpertFetcher | None = None

    def replay(self) -> None:
        """Run the instructions once."""
        done = self.begin
        for choice in self.choices:
            self.program.run(done, choice.begin - done)
            done = choice.begin + EXPERT_INSTRUCTIONS
            self._run_experts(choice)
        self.program.run(done, self.begin + self.count - done)

    def _run_experts(self, choice: Choice) -> None:
        """Run chosen experts from wherever they are fetched to."""
        chosen = choice.chosen.tolist()
        assert self.fetcher is not None, "choices come with who fetches them"
        for places in self.fetcher.waves(choice.layer, chosen):
            choice.places.copy_(torch.tensor([places[expert] for expert in chosen]))
            self.program.run(choice.begin, EXPERT_INSTRUCTIONS)


def obstacle_of(decoder: Decoder) -> str | None:
    """Return why the decoder cannot be recorded, or None if it can."""
    for name, module in decoder.named_modules():
        if not isinstance(module, Linear | ExpertLinear | Embedding):
            continue
        if module.packing is not None and not isinstance(module.packing, KernelPacking):
            return f"no kernel multiplies {module.packing.format}, the format of {name}"
        if isinstance(module, Linear) and module.int8_order is not None and module.rounding != "token":
            return "float32 keeps to the reference's order of operations where activations are int8"
    return None


@dataclass
class GatherStep:
    """The token's embedding row, from wherever the embedding gets it, into a native program's residual stream."""

    group: int
    state: StepState
    embedding: Embedding
    x: Tensor

    def replay(self) -> None:
        """Fill `x`."""
        self.x.copy_(self.embedding(self.state.token_ids, self.state.span).view(-1))


@dataclass
class Recorder:
    """Records decode programs of one decoder.

    Attributes:
        groups: the layers of each layer group; group 0 is the embedding, those after the last one parts of the head.
        heads: parts of the head, each with its rows of the vocabulary.
        caches: one per layer, [1, K, S, E].
        tables: rope tables, [P, 2, E/2].
        streamed: groups whose weights move. The others between two of them become one step.
        fetcher: of experts; None where all stay.
    """

    decoder: Decoder
    groups: Sequence[range]
    heads: Sequence[tuple[range, Head]]
    caches: Sequence[LayerCache]
    tables: Sequence[Tensor]
    library: str
    streamed: Collection[int] = ()
    fetcher: ExpertFetcher | None = None

    def record(self, state: StepState, is_greedy: bool) -> list[Step]:
        """Return the steps of a whole decode step over the state's inputs; fill `logits`, and if greedy `chosen`."""
        program = native.NativeProgram(self.library, torch.get_num_threads())
        x = program.buffer(self.decoder.spec.dim)
        ends: list[tuple[int, int]] = []  # group, and how many instructions there are after it
        choices: list[Choice] = []
        if not self.decoder.embed_tokens.is_gathered:
            self._embed(program, state, x)
            ends.append((0, len(program.arguments)))
        for group, layers in enumerate(self.groups, start=1):
            for index in layers:
                choices += self._block(program, state, x, index)
            ends.append((group, len(program.arguments)))
        state.logits = program.buffer(self.decoder.spec.vocab).view(1, -1)
        for group, (rows, head) in enumerate(self._heads(), start=len(self.groups) + 1):
            matrices = [matrix_of(program, head.lm_head, state.logits[0, rows.start : rows.stop])]
            native.linear(program, x, matrices, rounding_of(head.lm_head), norm_of(program, head.norm))
            ends.append((group, len(program.arguments)))
        if is_greedy:
            self._choose(program, state)
            ends.append((0, len(program.arguments)))
        steps = self._steps(program, ends, choices if self.fetcher is not None else ())
        gather = GatherStep(0, state, self.decoder.embed_tokens, x)
        return [gather, *steps] if self.decoder.embed_tokens.is_gathered else steps

    def _heads(self) -> Sequence[tuple[range, Head]]:
        """Return the head's parts; whole where none of them moves, because the kernels' rows do not see each other."""
        first = len(self.groups) + 1
        if any(group >= first for group in self.streamed):
            return self.heads
        return [(range(self.decoder.spec.vocab), self.decoder.head)]

    def _steps(
        self, program: native.NativeProgram, ends: Sequence[tuple[int, int]], choices: Sequence[Choice]
    ) -> list[Step]:
        """Return one step for each streamed group and one for all between two of them."""
        steps: list[Step] = []
        begin = 0
        for index, (group, end) in enumerate(ends):
            is_last = index + 1 == len(ends)
            if is_last or group in self.streamed or ends[index + 1][0] in self.streamed:
                inside = [choice for choice in choices if begin <= choice.begin < end]
                steps.append(NativeStep(group, program, begin, end - begin, inside, self.fetcher))
                begin = end
        return steps

    def _block(self, program: native.NativeProgram, state: StepState, x: Tensor, index: int) -> list[Choice]:
        """Append a block; return its choice of experts, if it has any."""
        block, rope_index = self.decoder.layers[index], self.decoder.rope_index()[index]
        assert isinstance(block, Block), f"layer {index} is {type(block).__name__}"
        rope = None if rope_index is None else self.tables[rope_index]
        recorder = BlockRecorder(program, x, state, index, fetches_experts=self.fetcher is not None)
        recorder.record(block, rope, self.caches[index])
        return recorder.choices

    def _embed(self, program: native.NativeProgram, state: StepState, x: Tensor) -> None:
        embedding = self.decoder.embed_tokens
        arguments = instructions.Embed()
        if embedding.packing is None:
            arguments.table = program.dense(embedding.weight)
        else:
            assert isinstance(embedding.packing, KernelPacking), "checked by obstacle_of"
            program.kept.append(embedding.weight)
            arguments.table = embedding.packing.form.matrix(embedding.weight)
        if embedding.positions is not None:
            arguments.positions = program.dense(embedding.positions)
        arguments.token_id = program.address(state.token_ids, torch.int64)
        arguments.position = program.address(state.span.starts, torch.int64)
        arguments.x, arguments.scale = program.address(x), embedding.scale
        program.needs(row_floats=self.decoder.spec.dim + 32)
        program.add(arguments)

    def _choose(self, program: native.NativeProgram, state: StepState) -> None:
        """Append the choice of the likeliest token, which becomes the next input."""
        best = program.buffer(program.threads)
        best_index = torch.zeros(program.threads, dtype=torch.int64)
        pointers = program.address(best), program.address(best_index, torch.int64)
        program.add(instructions.Choose(program.address(state.logits), self.decoder.spec.vocab, *pointers))
        inputs = (state.chosen, state.token_ids, state.span.starts)
        program.add(instructions.Advance(*pointers, *(program.address(tensor, torch.int64) for tensor in inputs)))


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
