"""Builds the programs that run a decoder whose weights are bound.

Legend: B batch, T tokens, D model dim.
"""

from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import InitVar, dataclass, field, replace
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from graphcore.graph.artefacts import ArtefactWriter
from graphcore.graph.block_compiler import WARMUP_TOKENS, BlockCompiler
from graphcore.graph.block_functions import BlockFunctions
from graphcore.graph.block_parts import BlockParts, part_steps, trace_parts
from graphcore.graph.compile import FunctionMaker, JustInTime
from graphcore.graph.cpu.native_decode import Recorder
from graphcore.graph.gpu.capture import Captures, captured, captured_piece
from graphcore.graph.gpu.chunk_graphs import ChunkBuffers, ChunkStep, RowCaches, chunk_sizes
from graphcore.graph.gpu.partition import BoundaryBuffers, cut
from graphcore.graph.gpu.sampling import SamplingRows, choose_step
from graphcore.graph.hand_over import (
    HandedStep,
    HandOver,
    feature_steps,
    features_in,
    first_step,
    hidden_of,
    with_hand_overs,
)
from graphcore.graph.lowering.tracing import Traced
from graphcore.graph.program import Program
from graphcore.graph.state import StepState
from graphcore.graph.step import (
    BlocksStep,
    BoundBlock,
    DecodeKernels,
    FetchedExperts,
    GreedyStep,
    HeadStep,
    Step,
)
from graphcore.kernels.backend import Backend, NativeBackend, TorchBackend
from graphcore.kernels.cpu.instructions import MOST_ROWS
from graphcore.kvcache.buffers import LayerCache, tokens_together
from graphcore.nn.decoder import Decoder, Head
from graphcore.nn.spec import BlockSpec
from graphcore.weights.groups import LayerGroup


@dataclass
class GraphBuilder:
    """Builds programs for a decode step (greedy or sampled), a prefill chunk, and the head alone.

    Attributes:
        kind: execution mode of decode steps: "captured", "compiled" or "eager".
        layer_groups: layers, or matrices of a layer, of each group, in order.
        caches: one cache per layer, for the largest batch.
        backend: kernels that compute the model; with a `NativeBackend`, captured decode steps are native programs, else
            CUDA graphs.
        cache_dir: folder of the compiled-code cache; None uses Inductor's default.
        head_parts: parts of the decoder's head by vocabulary rows, in order, if they have their own weight buffers.
        streamed: groups whose weights are streamed; a captured program is partitioned at them, and a block whose parts
            are groups runs in these parts if one of them is streamed.
        functions: functions that run blocks and heads.
        hand_over: this rank's share of the layers, which `layer_groups` has, and its process group; None if one process
            has all layers.
        captured_chunk: most tokens of a chunk of a prompt that runs as CUDA graphs; 0 if none does.

    Args:
        compiles: True if blocks and heads outside captured decode steps are compiled.
        fetched, decode_kernels: the same as in `BlockFunctions`.
        uses_pdl: the same as in `Captures`.
        make: maker of the compiled functions of blocks and heads; None for torch.compile.
    """

    decoder: Decoder
    kind: str
    layer_groups: Sequence[LayerGroup]
    caches: Sequence[LayerCache]
    context: int
    device: torch.device
    cache_dir: Path | None = None
    backend: Backend = field(default_factory=TorchBackend)
    compiles: InitVar[bool] = True
    head_parts: Sequence[Head] = ()
    streamed: Collection[int] = ()
    fetched: InitVar[FetchedExperts | None] = None
    decode_kernels: InitVar[DecodeKernels | None] = None
    uses_pdl: InitVar[bool] = False
    hand_over: HandOver | None = None
    captured_chunk: int = 0
    make: InitVar[FunctionMaker | None] = None
    tables: tuple[Tensor, ...] = field(init=False)
    captures: Captures = field(init=False)
    functions: BlockFunctions = field(init=False)
    _block_parts: dict[tuple[BlockSpec, tuple[tuple[str, ...], ...]], BlockParts] = field(
        init=False, default_factory=dict
    )
    _rows: dict[int, SamplingRows] = field(init=False, default_factory=dict)
    _chunk_graphs: dict[int, tuple[ChunkBuffers, Sequence[Step]]] = field(init=False, default_factory=dict)
    _operations: dict[BlockSpec | None, Traced] = field(init=False, default_factory=dict)

    def __post_init__(
        self,
        compiles: bool,
        fetched: FetchedExperts | None,
        decode_kernels: DecodeKernels | None,
        uses_pdl: bool,
        make: FunctionMaker | None,
    ) -> None:
        self.captures = Captures(self.device, uses_pdl)
        self._head_rows, self._is_head_whole = self.decoder.head_rows(), not self.head_parts
        self.head_parts = self.head_parts or [self.decoder.head.part(rows) for rows in self._head_rows]
        self.tables = self.decoder.rope_tables(self.context, self.device)
        make = make or JustInTime(self.cache_dir)
        compiler = BlockCompiler(self.decoder, self.caches, self.tables, self.device, make)
        self.functions = BlockFunctions(compiler, compiles and self.kind != "eager", fetched, decode_kernels)

    @property
    def captures_graphs(self) -> bool:
        """Whether decode programs are CUDA graphs, which sample on the device."""
        return self.kind == "captured" and not isinstance(self.backend, NativeBackend)

    @property
    def uses_native_programs(self) -> bool:
        """Whether decode programs are native programs, of at most 16 rows each."""
        return self.kind == "captured" and isinstance(self.backend, NativeBackend)

    def with_decoder(self, decoder: Decoder) -> "GraphBuilder":
        """Return a builder of native programs for another decoder, all of whose weights are resident.

        Its programs read and write the caches of this builder's.
        """
        assert self.uses_native_programs, "other programs have caches of their own"
        other = copy(self)
        other.decoder, other.streamed, other._operations = decoder, (), {}
        runs = [range(len(decoder.layers))] if self.hand_over is None else self.hand_over.share.runs
        other.layer_groups = [LayerGroup(layers) for layers in runs]
        other.head_parts = [decoder.head.part(rows) for rows in self._head_rows]
        return other

    def exporting(self, writer: ArtefactWriter) -> "GraphBuilder":
        """Return a builder whose programs are not to be run: building them writes the packages of their functions."""
        other = copy(self)
        other.functions = replace(self.functions, compiler=replace(self.functions.compiler, make=writer), compiled={})
        return other

    def decode(self, batch: int, is_greedy: bool) -> Program:
        """Return the decode program for one token of each of `batch` sequences.

        Args:
            is_greedy: True to also choose the next token by argmax and make it the next input.
        """
        if isinstance(self.backend, NativeBackend) and self.uses_native_programs:
            return self._recorded(self.backend, batch, is_greedy)
        if self.captures_graphs:
            return self._choosing(batch, "decode") if is_greedy else self._captured(self._program(batch, "decode"))
        return self.token(batch, is_greedy=is_greedy)

    def sample(self, batch: int, has_top_k_top_p: bool) -> Program:
        """Return a captured decode program that samples the next token, with or without top-k and top-p."""
        return self._choosing(batch, "top_k_top_p" if has_top_k_top_p else "sample")

    def sampling_rows(self, batch: int) -> SamplingRows:
        """Return the sampling rows that all captured programs of `batch` sequences share."""
        if batch not in self._rows:
            self._rows[batch] = SamplingRows(self._state(batch), self.decoder.spec.vocab)
        return self._rows[batch]

    def _choosing(self, batch: int, phase: str) -> Program:
        """Return a decode program as CUDA graphs, the last of which chooses the next token as the phase says."""
        rows = self.sampling_rows(batch)
        program = self._program(batch, "decode", state=rows.state)
        choice = choose_step(rows.state, rows.choosing, phase)
        return self._captured(replace(program, steps=[*program.steps, choice], choice=choice))

    def _captured(self, program: Program) -> Program:
        """Return a decode program as CUDA graphs."""
        state = program.state
        boundary = BoundaryBuffers.allocate(len(state.token_ids), self.decoder.spec, self.tables, self.device)
        steps = captured(state, program.steps, self.streamed, boundary, self.captures, program.fusion, self.hand_over)
        return replace(program, steps=steps)

    @property
    def most_together(self) -> int:
        """Most consecutive tokens of one sequence in a step of a native program."""
        return tokens_together(self.decoder.spec, self.caches, self.context)

    def _recorded(self, backend: NativeBackend, batch: int, is_greedy: bool) -> Program:
        """Return the decode step as a native program, which runs the rows that have a token."""
        assert batch <= MOST_ROWS, f"a native program of {batch} rows, and {MOST_ROWS} are the most"
        state = StepState.empty(batch, 1, self.device)
        state.most_together = self.most_together
        heads = list(zip(self._head_rows, self.head_parts, strict=True))
        fetched = self.functions.fetched
        recorder = Recorder(
            self.decoder,
            self.layer_groups,
            heads,
            self.caches,
            self.tables,
            backend,
            self.streamed,
            None if fetched is None else fetched.fetcher,
            self.hand_over,
            self._operations,
        )
        return Program(state, recorder.record(state, is_greedy))

    def token(self, batch: int, first: int = 0, is_greedy: bool = False) -> Program:
        """Return a decode program that is never captured.

        Args:
            first: the same as for `prefill`.
            is_greedy: the same as for `decode`.
        """
        program = self._program(batch, "decode", first)
        return Program(program.state, [*program.steps, *([GreedyStep(0, program.state)] if is_greedy else [])])

    def prefill(self, batch: int, first: int = 0) -> Program:
        """Return the prefill program for chunks of at least two tokens; each chunk sets new inputs.

        Args:
            first: row of the caches of the first sequence.
        """
        return self._program(batch, "prefill", first)

    def captured_prefill(self, program: Program, tokens: int) -> Program:
        """Return a prefill program of one sequence for a chunk of `tokens` tokens, as graphs that all sequences share.

        Args:
            program: the sequence's own program, whose state and head it takes.
        """
        assert 1 < tokens <= self.captured_chunk, f"a captured chunk of {tokens} tokens"
        size = next(size for size in chunk_sizes(self.captured_chunk) if size >= tokens)
        if size not in self._chunk_graphs:
            self._chunk_graphs[size] = self._captured_chunk(size)
        buffers, captured = self._chunk_graphs[size]
        steps = [
            ChunkStep(step.group, program.state, step, buffers, is_first=number == 0)
            for number, step in enumerate(captured)
        ]
        return Program(program.state, [*steps, *program.heads])

    def _captured_chunk(self, tokens: int) -> tuple[ChunkBuffers, Sequence[Step]]:
        """Return the graphs of chunks of `tokens` tokens up to the last block, and their buffers."""
        assert self.hand_over is None, "chunks on a ring are not captured"
        state = StepState.empty(1, tokens, self.device)
        row = RowCaches.of(self.caches, state)
        steps = list[Step]()
        for step in self._program(1, "prefill", state=state).without_head().steps:
            if isinstance(step, BlocksStep):
                step = replace(step, blocks=[row.bound(one) for one in step.blocks])
            steps.append(step)
        boundary = BoundaryBuffers.allocate(1, self.decoder.spec, self.tables, self.device, tokens)
        pieces = cut(steps, self.streamed)
        ready = [captured_piece(piece, state, boundary, self.captures, boundary.tensors) for piece in pieces]
        return ChunkBuffers(state, row, boundary), ready

    def score(self, batch: int, is_one_token: bool) -> Program:
        """Return the program that turns its state's hidden states [B, T, D] into logits after each token, [B, T, V].

        Args:
            is_one_token: True if T is 1; otherwise T is at least 2.
        """
        state = self._state(batch)
        tokens = None if is_one_token else WARMUP_TOKENS
        return Program(state, self._head_steps(state, tokens, takes_all=True))

    def _program(self, batch: int, phase: str, first: int = 0, state: StepState | None = None) -> Program:
        if state is None:
            state = self._state(batch)
            state.sequences.add_(first)
        ropes = self.decoder.rope_index()
        memory = self.functions.fusion_memory(batch, phase)
        steps: list[Step] = [first_step(self.decoder, state, self.tables)]
        if self.decoder.spec.per_layer is not None:
            steps += feature_steps(state, features_in(state), self.hand_over)
        for layers, found in groupby(enumerate(self.layer_groups, start=1), key=lambda item: item[1].layers):
            numbers = [number for number, _ in found]
            bound = [
                BoundBlock(
                    index,
                    self.functions.compiler.block(index),
                    self.functions.block_function(index, batch, phase, memory),
                    ropes[index],
                    self.caches[index].rows(batch, first),
                )
                for index in layers
            ]
            if len(numbers) > 1 and any(number in self.streamed for number in numbers):
                ready = part_steps(bound[0], self._parts(numbers), numbers[0], state)
            else:
                ready = [BlocksStep(numbers[0], state, bound)]
            steps += self._with_hand_overs(ready, layers, state)
        return Program(state, [*steps, *self._last_receive(state), *self._head_steps(state, None)], fusion=memory)

    def _with_hand_overs(self, steps: list[Step], layers: range, state: StepState) -> list[Step]:
        """Return the steps of a layer group, or of a layer, with the hand-overs before the first and after the last."""
        if self.hand_over is None:
            return steps
        source, target = self.hand_over.share.source(layers.start), self.hand_over.share.target(layers[-1])
        return with_hand_overs(steps, state, hidden_of(state), self.hand_over, source, target)

    def _last_receive(self, state: StepState) -> list[Step]:
        """Return the step that receives the residual stream after the last layer, if another rank has that layer."""
        hand_over = self.hand_over
        if hand_over is None or not self.decoder.has_ends or hand_over.share.last_owner == hand_over.share.rank:
            return []
        source = hand_over.share.last_owner
        return [HandedStep(0, state, None, hidden_of(state), hand_over.ranks, source)]

    def _parts(self, numbers: Sequence[int]) -> BlockParts:
        """Return the operations of a layer's groups, traced once for all layers of its spec that have these parts."""
        groups = [self.layer_groups[number - 1] for number in numbers]
        block = self.functions.compiler.block(groups[0].layers.start)
        key = block.spec, tuple(group.matrices for group in groups)
        if key not in self._block_parts:
            self._block_parts[key] = trace_parts(block, key[1])
        return self._block_parts[key]

    def _state(self, batch: int) -> StepState:
        state = StepState.empty(batch, 1, self.device)
        vocab = self.decoder.spec.vocab if self.decoder.has_ends else 0
        state.logits = torch.zeros(batch, vocab, device=self.device, dtype=torch.float32)
        return state

    def _head_steps(self, state: StepState, tokens: int | None, takes_all: bool = False) -> list[Step]:
        """Return a step for each part of the head, none if another rank has it.

        `tokens` is the same as in `BlockFunctions.head_function`.

        On decode kernels a row's summation order does not depend on the other rows, so a resident head is one step.
        """
        if not self.decoder.has_ends:
            return []
        first = len(self.layer_groups) + 1
        batch = len(state.token_ids)
        if tokens is None and self._is_head_whole:
            whole, rows = self.decoder.head, range(self.decoder.spec.vocab)
            run = self.functions.device_head(whole, batch)
            if run is not None:
                return [HeadStep(first, state, whole, rows, run, takes_all)]
        usual, steps = self.head_parts[0].lm_head.outputs, list[Step]()
        for group, (rows, head) in enumerate(zip(self._head_rows, self.head_parts, strict=True), start=first):
            run = self.functions.head_function(head, batch, tokens, head.lm_head.outputs == usual)
            steps.append(HeadStep(group, state, head, rows, run, takes_all))
        return steps
