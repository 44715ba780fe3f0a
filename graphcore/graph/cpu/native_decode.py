"""Records a whole decode step on the CPU as one native program, the CPU's counterpart of a captured CUDA graph.

    embed -> (norm q k v | attend | o, add | norm gate up | down, add) for each block -> norm head -> choose

The program is recorded once from the decoder's modules and replayed without Python, allocation or dispatch in between.
It computes in float32 what the blocks compute in the compute dtype. A decoder with an unsupported operation is rejected
(`native_obstacle`), so that nothing is left out silently. A program has up to 16 rows, and a run computes those that
have a token: one token of each of several sequences, or consecutive tokens of one sequence. Larger batches take several
programs.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor, nn

from graphcore.graph.cpu.embedding_instructions import append_embedding, append_features, features_of
from graphcore.graph.cpu.instruction_entries import GroupEnds, ModuleRecorder, obstacle_of_operations
from graphcore.graph.cpu.operands import Routing
from graphcore.graph.hand_over import HandOver, feature_steps, handed, rows_in_use
from graphcore.graph.lowering.targets import lower_to_instructions
from graphcore.graph.lowering.tracing import Traced
from graphcore.graph.state import StepState
from graphcore.graph.step import ExpertFetcher, Step
from graphcore.kernels.backend import NativeBackend
from graphcore.kernels.cpu import instructions
from graphcore.kernels.cpu import program as native
from graphcore.kernels.cpu.kernel_packing import KernelPacking
from graphcore.kvcache.buffers import LayerCache
from graphcore.nn.decoder import Decoder, Embedding, Head
from graphcore.nn.delta_net import DeltaNet
from graphcore.nn.linear import Linear, StackedLinear
from graphcore.nn.short_conv import ShortConv
from graphcore.nn.spec import BlockSpec
from graphcore.weights.groups import LayerGroup

EXPERT_INSTRUCTIONS = 2  # the up and the down instruction of a layer's experts


@dataclass
class NativeStep:
    """Consecutive instructions of a program, run as one step.

    Attributes:
        begin: index of the first instruction.
        count: number of instructions.
        choices: routing of the blocks among them whose experts are fetched; empty if experts are resident.
    """

    group: int
    program: native.NativeProgram
    begin: int
    count: int
    choices: Sequence[Routing] = ()
    fetcher: ExpertFetcher | None = None

    def replay(self) -> None:
        """Run the instructions once."""
        done = self.begin
        for choice in self.choices:
            self.program.run(done, choice.begin - done)
            done = choice.begin + EXPERT_INSTRUCTIONS
            self._run_experts(choice)
        self.program.run(done, self.begin + self.count - done)

    def _run_experts(self, choice: Routing) -> None:
        """Fetch the experts that the rows chose and run them, one batch (wave) of fetched experts after another."""
        assert self.fetcher is not None, "choices come with who fetches them"
        assert choice.is_last is not None, "experts that are fetched may come in waves"
        chosen: list[int] = choice.chosen.flatten().tolist()
        asked = choice.chosen[self.program.counts > 0].flatten().tolist()
        missing = set(asked)
        with closing(self.fetcher.waves(choice.layer, list(dict.fromkeys(asked)))) as waves:
            for places in waves:
                missing.difference_update(expert for expert in asked if places[expert] >= 0)
                choice.places.view(-1).copy_(
                    torch.tensor([places[expert] for expert in chosen], dtype=torch.int64, device="cpu")
                )
                choice.is_last.fill_(not missing)
                self.program.run(choice.begin, EXPERT_INSTRUCTIONS)


def native_obstacle(decoder: Decoder) -> str | None:
    """Return why the decoder cannot be recorded, or None if it can."""
    for name, module in decoder.named_modules():
        taps = module.conv1d.weight.shape[1] if isinstance(module, DeltaNet | ShortConv) else 0
        if taps > instructions.MOST_TAPS:
            return f"a convolution over {taps} tokens has no native instruction, only up to {instructions.MOST_TAPS}"
        if not isinstance(module, Linear | StackedLinear | Embedding):
            continue
        if module.packing is not None and not isinstance(module.packing, KernelPacking):
            return f"no kernel multiplies {module.packing.format}, the format of {name}"
        if isinstance(module, Linear) and module.int8_order is not None and module.rounding != "token":
            return "float32 keeps to the reference's order of operations where activations are int8"
    obstacles = (obstacle_of_operations(block, changes_x=True) for block in kinds_of(decoder).values())
    return next(filter(None, obstacles), None) or obstacle_of_operations(decoder.head, changes_x=False)


def kinds_of(decoder: Decoder) -> dict[BlockSpec, nn.Module]:
    """Return one layer of each spec, of the layers that are here."""
    return {decoder.spec.blocks[index]: block for index, block in reversed([*decoder.blocks()])}


@dataclass
class Recorder:
    """Records decode programs of one decoder.

    Attributes:
        groups: layers, or matrices of a layer, of each layer group; group 0 is the embedding, those after the last one
            are parts of the head.
        heads: parts of the head, each with its rows of the vocabulary.
        caches: one cache per layer; a program's row may use any sequence of it.
        tables: rope tables, [P, 2, E/2].
        backend: C++ kernels that run the programs.
        streamed: groups whose weights are streamed. The other groups between two of them become one step.
        fetcher: source of non-resident experts; None if all are resident.
        hand_over: this rank's share of the layers, which the groups have; None if one process has all.
        operations: lowered operations of each block spec, and of the head under None. Recorders of one decoder may
            share them, so that each spec is traced once for programs of all widths.
    """

    decoder: Decoder
    groups: Sequence[LayerGroup]
    heads: Sequence[tuple[range, Head]]
    caches: Sequence[LayerCache]
    tables: Sequence[Tensor]
    backend: NativeBackend
    streamed: Collection[int] = ()
    fetcher: ExpertFetcher | None = None
    hand_over: HandOver | None = None
    operations: dict[BlockSpec | None, Traced] = field(default_factory=dict)

    _features: Tensor | None = None  # [B, L P], per-layer features of the tokens
    _sources: dict[int, int] = field(default_factory=dict)  # rank that sends the stream before an instruction, by index
    _targets: dict[int, int] = field(default_factory=dict)  # rank that gets it after the one before an index
    _sends: dict[int, list[Step]] = field(default_factory=dict)  # steps that send the features, in the same places

    def record(self, state: StepState, is_greedy: bool) -> list[Step]:
        """Return the steps of one decode step; they fill the state's `logits` and, if greedy, `chosen`.

        Without the head there are none, as another rank has it.
        """
        program = self.backend.new_program(state.span.counts, state.sequences)
        x = program.buffer(self.decoder.spec.dim)
        ends = GroupEnds(program.arguments)
        choices: list[Routing] = []
        gathers: list[Step] = []
        self._sources, self._targets, self._sends = {}, {}, {}
        if self.decoder.has_ends:
            gathers = self._embedding(program, state, x)
        elif (per_layer := self.decoder.embed_tokens.per_layer) is not None:
            self._features = program.buffer(per_layer.table.width)
            gathers = feature_steps(state, rows_in_use(state, self._features), self.hand_over)
        for layers, parts in self._layers():
            self._note_rank(self._sources, program, self._source(layers.start))
            ends.begin(parts[0][0], {name: number for number, group in parts for name in group.matrices})
            for index in layers:
                choices += self._block(program, state, x, index, ends)
            self._note_rank(self._targets, program, self._target(layers[-1]))
        if self.decoder.has_ends:
            self._head(program, state, x, ends, is_greedy)
        else:
            state.logits = program.buffer(0)
        return [*gathers, *self._steps(program, state, x, ends.found(), choices if self.fetcher is not None else ())]

    def _source(self, layer: int) -> int | None:
        """Return the rank that hands over the residual stream before a layer; None if it is here."""
        return None if self.hand_over is None else self.hand_over.share.source(layer)

    def _target(self, layer: int) -> int | None:
        """Return the rank that gets the residual stream after a layer; None if it stays."""
        return None if self.hand_over is None else self.hand_over.share.target(layer)

    @staticmethod
    def _note_rank(ranks: dict[int, int], program: native.NativeProgram, rank: int | None) -> None:
        """Note the rank of a hand-over before the next instruction; None for no hand-over."""
        if rank is not None:
            ranks[len(program.arguments)] = rank

    def _embedding(self, program: native.NativeProgram, state: StepState, x: Tensor) -> list[Step]:
        """Append the lookup of the tokens' embedding; return the step that gathers rows on the host, if needed."""
        gather = append_embedding(program, state, self.decoder.embed_tokens, x)
        self._features = append_features(program, gather, x)
        program.end_block()
        if self._features is not None:
            sends = feature_steps(state, rows_in_use(state, self._features), self.hand_over)
            self._sends[len(program.arguments)] = sends
        return [gather] if gather.fetches else []

    def _head(
        self, program: native.NativeProgram, state: StepState, x: Tensor, ends: GroupEnds, is_greedy: bool
    ) -> None:
        """Append the head and, if greedy, the choice of the likeliest token."""
        if self.hand_over is not None and self.hand_over.share.last_owner != self.hand_over.share.rank:
            self._sources[len(program.arguments)] = self.hand_over.share.last_owner
        state.logits = program.buffer(self.decoder.spec.vocab)
        for group, (rows, head) in enumerate(self._heads(), start=len(self.groups) + 1):
            ends.begin(group)
            recorder = ModuleRecorder(program, state, dict(head.named_modules()))
            recorder.record(self._lowered(None, head), {"x": x}, state.logits[:, rows.start : rows.stop])
        if is_greedy:
            ends.begin(0)
            self._choose(program, state)

    def _layers(self) -> Iterator[tuple[range, list[tuple[int, LayerGroup]]]]:
        """Yield the layers of each layer group, or a layer whose matrices are groups, with their numbers.

        A resident group after another one of its layer has that one's number, because the program runs on between them.
        """
        for layers, found in groupby(enumerate(self.groups, start=1), key=lambda item: item[1].layers):
            parts: list[tuple[int, LayerGroup]] = []
            for number, group in found:
                runs_on = bool(parts) and number not in self.streamed and parts[-1][0] not in self.streamed
                parts.append((parts[-1][0] if runs_on else number, group))
            yield layers, parts

    def _heads(self) -> Sequence[tuple[range, Head]]:
        """Return the head's parts, or the whole head if no part is streamed: its rows are computed independently."""
        first = len(self.groups) + 1
        if any(group >= first for group in self.streamed):
            return self.heads
        return [(range(self.decoder.spec.vocab), self.decoder.head)]

    def _steps(
        self,
        program: native.NativeProgram,
        state: StepState,
        x: Tensor,
        ends: Sequence[tuple[int, int]],
        choices: Sequence[Routing],
    ) -> list[Step]:
        """Return one step for each streamed group, and one for all groups between two of them or two hand-overs."""
        steps: list[Step] = []
        begin, stream = 0, rows_in_use(state, x)
        for index, (group, end) in enumerate(ends):
            is_last = index + 1 == len(ends) or end in self._sources or end in self._targets or self._sends.get(end)
            if is_last or group in self.streamed or ends[index + 1][0] in self.streamed:
                inside = [choice for choice in choices if begin <= choice.begin < end]
                step = NativeStep(group, program, begin, end - begin, inside, self.fetcher)
                ranks = self._sources.get(begin), self._targets.get(end)
                steps += [handed(step, state, stream, self.hand_over, *ranks), *self._sends.get(end, ())]
                begin = end
        return steps

    def _block(
        self, program: native.NativeProgram, state: StepState, x: Tensor, index: int, ends: GroupEnds
    ) -> list[Routing]:
        """Append a block; return its routing, if it has experts."""
        block, rope_index = self.decoder.layers[index], self.decoder.rope_index()[index]
        rope = None if rope_index is None else self.tables[rope_index]
        k_cache, v_cache, table = self.caches[index].inputs
        inputs = {"x": x, "rope": rope, "span": state.span, "k_cache": k_cache, "v_cache": v_cache, "table": table}
        per_layer = self.decoder.embed_tokens.per_layer
        if per_layer is not None and self._features is not None:
            inputs["per_layer"] = features_of(per_layer, self._features, index)
        modules = dict(block.named_modules())
        recorder = ModuleRecorder(program, state, modules, index, self.fetcher is not None, ends)
        answer = recorder.record(self._lowered(self.decoder.spec.blocks[index], block), inputs)
        assert answer is x, "the stream is changed where it lies"
        program.end_block()
        return recorder.choices

    def _lowered(self, kind: BlockSpec | None, module: nn.Module) -> Traced:
        """Return the lowered operations of a block spec or of the head, traced once."""
        if kind not in self.operations:
            self.operations[kind] = lower_to_instructions(module)
        return self.operations[kind]

    def _choose(self, program: native.NativeProgram, state: StepState) -> None:
        """Append the argmax of each row's logits; that token becomes the row's next input."""
        best = program.buffer(instructions.CHOICE_PARTS)
        best_index = program.zeros(*best.shape, dtype=torch.int64)
        pointers = program.address(best), program.address(best_index, torch.int64)
        program.add(instructions.Choose(program.per_row(state.logits), self.decoder.spec.vocab, *pointers))
        inputs = (state.chosen, state.token_ids, state.span.starts)
        program.add(instructions.Advance(*pointers, *(program.address(tensor, torch.int64) for tensor in inputs)))
