"""From a decoder whose weights are bound to programs that run it.

Legend: B batch, T tokens, D model dim.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from graphcore.graph.capture import Captures, captured
from graphcore.graph.choosing import Choosing, Drawing, choose_step
from graphcore.graph.cutting import Handover
from graphcore.graph.kinds import WARMUP_TOKENS, BlockKind, KindCompiler
from graphcore.graph.native import Recorder
from graphcore.graph.program import Program
from graphcore.graph.state import StepState
from graphcore.graph.step import (
    BlockFunction,
    BlocksStep,
    BoundBlock,
    DecodeKernels,
    EmbedStep,
    ExpertFetcher,
    FetchedBlock,
    GreedyStep,
    HeadFunction,
    HeadStep,
    RoutedBlock,
    Step,
)
from graphcore.nn.block import Block
from graphcore.nn.decoder import Decoder, Head
from graphcore.nn.kv_cache import LayerCache
from graphcore.nn.moe import Experts, MoE


@dataclass
class GraphBuilder:
    """Builds programs and owns the compiled functions, one per kind.

    Attributes:
        kind: "captured", "compiled" or "eager", how decode steps run.
        compiles: whether blocks and heads that run beside captured decode steps are compiled.
        layer_groups: which layers each group holds, in order.
        caches: one per layer, for the largest batch.
        cache_dir: where compiled code is kept for the next start; None is Inductor's own place.
        library: file of the C++ kernels, which captured decode steps on the CPU run on; None captures CUDA graphs.
        head_parts: the decoder's head in its parts, in order, where they are bound to memory of their own.
        streamed: groups whose weights move; a captured program is cut at them.
        fetcher: of experts; None where all stay.
        slots: of each layer whose experts are fetched, the experts whose matrices are where they are brought.
        mapped: layers of which a decode step reads the experts where they wait.
        decode_kernels: of a GPU, which decode steps run on instead of being compiled; None where there are none.
    """

    decoder: Decoder
    kind: str
    layer_groups: Sequence[range]
    caches: Sequence[LayerCache]
    context: int
    device: torch.device
    on_compile: Callable[[str], None] = lambda name: None
    cache_dir: Path | None = None
    library: Path | None = None
    functions: dict[tuple[BlockKind | str, int, str], Callable[..., Tensor]] = field(default_factory=dict)
    compiles: bool = True
    head_parts: Sequence[Head] = ()
    streamed: Collection[int] = ()
    fetcher: ExpertFetcher | None = None
    slots: Mapping[int, Experts] = field(default_factory=dict)
    mapped: Collection[int] = ()
    decode_kernels: DecodeKernels | None = None
    tables: tuple[Tensor, ...] = field(init=False)
    head_rows: Sequence[range] = field(init=False)
    is_head_whole: bool = field(init=False)
    captures: Captures = field(init=False)
    kinds: KindCompiler = field(init=False)

    def __post_init__(self) -> None:
        self.captures = Captures(self.device)
        self.head_rows, self.is_head_whole = self.decoder.head_rows(), not self.head_parts
        self.head_parts = self.head_parts or [self.decoder.head.part(rows) for rows in self.head_rows]
        self.tables = self.decoder.rope_tables(self.context, self.device)
        where = (self.caches, self.tables, self.device)
        self.kinds = KindCompiler(self.decoder, *where, self.on_compile, self.cache_dir)

    @property
    def is_eager(self) -> bool:
        """Whether blocks and heads that are not captured run uncompiled."""
        return self.kind == "eager" or not self.compiles

    @property
    def captures_graphs(self) -> bool:
        """Whether decode programs are CUDA graphs, which choose tokens by themselves."""
        return self.kind == "captured" and self.library is None

    def decode(self, batch: int, is_greedy: bool) -> Program:
        """Return the program that runs one token of each of `batch` sequences.

        Args:
            is_greedy: also choose the likeliest next token and make it the next input.
        """
        if self.kind == "captured" and self.library is not None and batch == 1:
            return self._recorded(self.library, is_greedy)
        if self.captures_graphs:
            return self._captured(batch, Choosing.allocate(batch, self.device) if is_greedy else None)
        program = self._program(batch, "decode")
        return Program(program.state, [*program.steps, *([GreedyStep(0, program.state)] if is_greedy else [])])

    def sample(self, batch: int, narrows: bool) -> Program:
        """Return a captured decode program that draws the next token. Args: narrows: by top-k or top-p too."""
        drawing = Drawing.allocate(batch, self.decoder.spec.vocab, self.device)
        return self._captured(batch, Choosing.allocate(batch, self.device, drawing), narrows)

    def _captured(self, batch: int, choosing: Choosing | None, narrows: bool = False) -> Program:
        """Return a decode program as CUDA graphs, the choice of the next token in the last of them."""
        program = self._program(batch, "decode")
        state = program.state
        choice = None if choosing is None else choose_step(state, choosing, narrows)
        steps = [*program.steps, *([] if choice is None else [choice])]
        handover = Handover.allocate(batch, self.decoder.spec.dim, self.tables, self.device)
        return Program(state, captured(state, steps, self.streamed, handover, self.captures), choice)

    def _recorded(self, library: Path, is_greedy: bool) -> Program:
        """Return one sequence's decode step as a native program."""
        state = StepState.empty(1, 1, self.device)
        caches = [cache.rows(1) for cache in self.caches]
        heads = list(zip(self.head_rows, self.head_parts, strict=True))
        groups, where = self.layer_groups, (caches, self.tables, str(library))
        recorder = Recorder(self.decoder, groups, heads, *where, self.streamed, self.fetcher)
        return Program(state, recorder.record(state, is_greedy))

    def token(self, batch: int) -> Program:
        """Return the steps of a decode program one by one, never captured, for who looks between them."""
        return self._program(batch, "decode")

    def prefill(self, batch: int) -> Program:
        """Return the program that runs a chunk of at least two tokens; its state takes new inputs for each."""
        return self._program(batch, "prefill")

    def score(self, batch: int, is_one_token: bool) -> Program:
        """Return the program from hidden states, [B, T, D] in its state, to the logits after every token, [B, T, V].

        Args:
            is_one_token: T is 1; else at least 2.
        """
        state = self._state(batch)
        tokens = None if is_one_token else WARMUP_TOKENS
        return Program(state, self._head_steps(state, tokens, takes_all=True))

    def _program(self, batch: int, phase: str) -> Program:
        state = self._state(batch)
        ropes = self.decoder.rope_index()
        steps: list[Step] = [EmbedStep(0, state, self.decoder.embed_tokens, self.tables)]
        for group, layers in enumerate(self.layer_groups, start=1):
            bound = [
                BoundBlock(
                    self.kinds.block(index),
                    self._fetching(self._block_function(index, batch, phase), index, phase),
                    ropes[index],
                    self.caches[index].rows(batch),
                )
                for index in layers
            ]
            steps.append(BlocksStep(group, state, bound))
        return Program(state, [*steps, *self._head_steps(state, None)])

    def _state(self, batch: int) -> StepState:
        state = StepState.empty(batch, 1, self.device)
        state.logits = torch.zeros(batch, self.decoder.spec.vocab, device=self.device)
        return state

    def _head_steps(self, state: StepState, tokens: int | None, takes_all: bool = False) -> list[Step]:
        """Return a step for each part of the head; `tokens` as for `_head_function`.

        A device's own kernels sum a row in one order, whichever rows they are given: a head that stays takes one step.
        """
        first = len(self.layer_groups) + 1
        batch = len(state.token_ids)
        if self.decode_kernels is not None and tokens is None and self.is_head_whole:
            head, rows = self.decoder.head, range(self.decoder.spec.vocab)
            run = self.decode_kernels.head_function(head, batch)
            if run is not None:
                return [HeadStep(first, state, head, rows, run, takes_all)]
        return [
            HeadStep(first + index, state, head, rows, self._head_function(head, batch, tokens), takes_all)
            for index, (rows, head) in enumerate(zip(self.head_rows, self.head_parts, strict=True))
        ]

    def _block_function(self, index: int, batch: int, phase: str) -> BlockFunction:
        """Return the function of the layer's kind, compiled now if it is new."""
        if self.decode_kernels is not None and phase == "decode":
            run = self.decode_kernels.block_function(self.kinds.block(index), batch, self.fetches(index, phase))
            if run is not None:
                return run
        if self.is_eager:
            has_experts = isinstance(self.kinds.block(index).mlp, MoE)
            return RoutedBlock(Block.route, Block.add_experts) if has_experts else Block.forward
        key = (self.kinds.kind(index), batch, phase)
        if key not in self.functions:
            self.functions[key] = self.kinds.compile(index, batch, phase)
        return self.functions[key]

    def fetches(self, index: int, phase: str) -> bool:
        """Return whether a layer's experts are fetched in that phase, for which the host asks who was chosen."""
        return index in self.slots and not (index in self.mapped and phase == "decode")

    def _fetching(self, run: BlockFunction, index: int, phase: str) -> BlockFunction:
        """Return the function of a layer, its experts fetched if they do not stay."""
        if self.fetcher is None or not isinstance(run, RoutedBlock) or not self.fetches(index, phase):
            return run
        return FetchedBlock(run, index, self.fetcher, self.slots[index])

    def _head_function(self, head: Head, batch: int, tokens: int | None) -> HeadFunction:
        """Return the function of heads of that many rows, of [B, D], or of [B, T, D] if there are `tokens`."""
        if self.decode_kernels is not None and tokens is None:
            run = self.decode_kernels.head_function(head, batch)
            if run is not None:
                return run
        if self.is_eager:
            return Head.forward
        rows = head.lm_head.outputs
        name = "head" if tokens is None else "head_of_all"
        key = (f"{name}_{rows}", batch, "decode")
        if key not in self.functions:
            is_usual = rows == self.head_parts[0].lm_head.outputs
            self.functions[key] = self.kinds.compile_head(head, batch, tokens, name if is_usual else f"{name}_rest")
        return self.functions[key]
