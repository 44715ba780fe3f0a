"""Token ids in, logits out: prefill in chunks, decode one by one, over caches that the runner owns.

Legend: B batch, T tokens, D model dim, V vocab.

A chunk of a prompt runs as a program of its own, over one row of the caches, so its numbers depend on the prompt alone.
Each row's cache is kept between calls: a call says at which position each row starts.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from graphcore.engine.forward_pass import Instrument, ObservedStep, RowChunk, chunks_by_pass, not_instrumented
from graphcore.engine.model_runner import ModelRunner, RunnerSizes
from graphcore.engine.programs import Programs
from graphcore.errors import ConfigError
from graphcore.graph.block_parts import PartStep
from graphcore.graph.builder import GraphBuilder
from graphcore.graph.gpu.capture import Captures, only_launches
from graphcore.graph.program import Program
from graphcore.graph.state import StepState
from graphcore.graph.step import BlocksStep, Step
from graphcore.kvcache.chunks import Chunks
from graphcore.kvcache.forward_sequences import ForwardCache, ForwardSequencePool, ForwardSequences
from graphcore.kvcache.host_copies import CopyStream, HostCopies
from graphcore.kvcache.page_allocator import PageAllocator
from graphcore.nn.block import RESIDUAL_DTYPE
from graphcore.planning.workspace import scored_tokens
from graphcore.progress import Progress, ignore_progress
from graphcore.sampling_params import SamplingParams
from graphcore.streaming.policy import Policy, Resident, watched
from graphcore.streaming.scheduler import never, run_together


class ProgramRunner(ModelRunner):
    """Runner of graphcore's own programs over static caches.

    Args:
        chunks: the same as the attribute.
        prompt_tokens: the same as the attribute; 0 for one chunk.
        draft_tokens: the same as the attribute.
        draft: builder of the programs of a draft model over the same caches; None without one.
        spare_nbytes: bytes of the budget that the plan leaves.

    Attributes:
        prompt_tokens: tokens of prompts in one pass; one chunk runs even if it is longer.
        draft_tokens: most draft tokens of one sequence in a decode step; 0 without speculation.
        draft_programs: decode programs of the draft model; None without one.
        chunks: chunk boundaries of prompts, and from which positions a prompt continues with equal bits.
        pages: allocator of the KV cache's pages.
    """

    lends_for_states = False

    def __init__(
        self,
        builder: GraphBuilder,
        policy: Policy,
        batch_size: int,
        chunks: Chunks,
        prompt_tokens: int = 0,
        draft_tokens: int = 0,
        draft: GraphBuilder | None = None,
        spare_nbytes: int = 0,
    ) -> None:
        self.builder = builder
        self.policy = policy
        self.device, spec = builder.device, builder.decoder.spec
        vocab = spec.vocab if builder.decoder.has_ends else 0  # without the head there are no logits
        self.sizes = RunnerSizes(batch_size, chunks.size, vocab, builder.context, spec.context)
        self.scored_tokens = scored_tokens(vocab, spare_nbytes)
        self.prompt_tokens, self.draft_tokens = prompt_tokens or chunks.size, draft_tokens
        self.backend, self.chunks = builder.backend, chunks
        self.programs = Programs(builder, batch_size, draft_tokens)
        self.draft_programs = None if draft is None else Programs(draft, batch_size)
        to_host = CopyStream(builder.device).begin if builder.device.type == "cuda" else HostCopies
        self.pages = PageAllocator(spec, builder.caches, to_host)
        self._holding = ForwardSequencePool(self.pages)

    @property
    def num_compiled(self) -> int:
        """Number of graphs compiled so far."""
        return len(self.builder.functions.compiled)

    @property
    def captures(self) -> Captures | None:
        """The captured CUDA graphs; None where there are none."""
        return self.builder.captures if self.builder.captures_graphs else None

    def width(self, num_sequences: int) -> int:
        """Return the number of rows of the programs that decode that many sequences together."""
        most = self.sizes.batch_size
        assert num_sequences <= most, f"{num_sequences} sequences in a batch of {most}"
        return 1 if num_sequences == 1 else most

    def program(self, phase: str, width: int, is_greedy: bool = False) -> Program:
        """Return a program of a decode step; phases are those of `Programs.of_width`."""
        return self.programs.of_width(phase, width, is_greedy)

    def num_passes(self, lengths: Sequence[int], start: int = 0) -> int:
        """Return the number of passes over the weights in which `extend` runs rows of these lengths from `start` on."""
        rows = [range(length) for length in lengths]
        return sum(1 for _ in chunks_by_pass(rows, [start] * len(rows), self.chunks, self.prompt_tokens))

    def warm_up(self, num_sequences: int, params: SamplingParams | None = None) -> None:
        """Build the programs for that many sequences: compile them or load them from the cache; on a GPU capture them.

        Args:
            params: sampling parameters that will be used; None is greedy.
        """
        self.programs.warm_up(num_sequences, params or SamplingParams())

    def release(self) -> None:
        """Free programs and captured graphs; the model cannot run any more."""
        self.programs.clear()
        if self.draft_programs is not None:
            self.draft_programs.clear()
        self.builder.captures.release()

    @torch.inference_mode()
    def extend(
        self, rows: Sequence[Sequence[int]], starts: Sequence[int], on_progress: Progress = ignore_progress
    ) -> Tensor:
        """Append tokens to the rows' caches, as requests do: single tokens in a decode step, others in chunks.

        Args:
            rows: new tokens of each sequence, at least one.
            starts: number of tokens that each row's cache already holds.
            on_progress: callback for "prefill", the group or None, and the tokens of all rows, done and in all.

        Returns:
            [len(rows), V] float32 logits after each row's last token.
        """
        logits = torch.empty(len(rows), self.sizes.vocab, dtype=torch.float32, device=self.device)
        done, total = 0, sum(map(len, rows))
        for chunks in self._chunks_by_pass(rows, starts):
            ones = {chunk.row: (chunk.ids, chunk.start) for chunk in chunks if len(chunk.ids) == 1}
            steps = self.programs.step(ones) if ones else []
            several = [chunk for chunk in chunks if len(chunk.ids) > 1]
            policy = watched(self.policy, on_progress, "prefill", done, total)
            with self.forward_pass([step.program for step in steps], several, policy) as states:
                for chunk, state in zip(several, states, strict=True):
                    if chunk.is_last:
                        logits[chunk.row] = state.logits[0]
            for program, places in steps:
                for row, at in places.items():
                    logits[row] = program.state.logits[at[-1]]
            done += sum(len(chunk.ids) for chunk in chunks)
            on_progress("prefill", None, done, total)
        return logits

    @contextmanager
    def forward_pass(
        self,
        decodes: Sequence[Program],
        chunks: Sequence[RowChunk],
        policy: Policy,
        is_stopped: Callable[[], bool] = never,
        with_head: bool = True,
        instrument: Instrument = not_instrumented,
    ) -> Iterator[list[StepState]]:
        """Run decode steps and chunks of rows in one pass over the weights; all other methods use this one.

        Args:
            decodes: programs of decode steps, with their inputs.
            chunks: chunks that run as programs of their own.
            policy: the runner's policy, or one that also reports each group.
            is_stopped: function that is called between layer groups; True aborts the pass.
            with_head: True to run the head for chunks that end a row; False if `project` follows, or nothing.
            instrument: function from a chunk and its program to the program that runs in its place.

        Yields:
            The state of each chunk, with its hidden states and logits; the exit frees its activations.

        Raises:
            StoppedError: the pass was aborted; the caches hold a part of its tokens.
        """
        is_observed = instrument is not not_instrumented
        programs = [self._program_of(chunk, is_observed) for chunk in chunks]
        # Logits are needed only where a row ends, and the head may have to be read from a disk.
        needs_head = bool(decodes) or not with_head or any(chunk.is_last for chunk in chunks)
        self.policy.skip([] if needs_head else [step.group for program in programs for step in program.heads])
        running = [
            instrument(chunk, program if with_head and chunk.is_last else program.without_head())
            for chunk, program in zip(chunks, programs, strict=True)
        ]
        try:
            for place, program in enumerate((*decodes, *running)):
                program.state.place = place
            together, hand_over = [*decodes, *running], self.builder.hand_over
            if hand_over is not None:
                hand_over.ranks.transport.runs_ahead = self._runs_ahead(together)
            run_together(together, policy, is_stopped)
            if hand_over is not None:
                hand_over.ranks.transport.settle()
            yield [program.state for program in running]
        finally:
            for program in running:
                program.state.free_activations()

    def _runs_ahead(self, programs: Sequence[Program]) -> bool:
        """Return whether the host waits for nothing in a pass of these programs: it launches captured graphs alone."""
        return isinstance(self.policy, Resident) and len(programs) == 1 and only_launches(programs[0].steps)

    @torch.inference_mode()
    def logits(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Return teacher-forced logits of rows of one length, from empty caches: [B, T, V] float32 on the CPU."""
        logits = torch.empty(len(rows), len(rows[0]), self.sizes.vocab, dtype=torch.float32, device="cpu")
        for found in self._run_blocks(rows, [0] * len(rows)):
            projected = self.project([state.hidden for _, state in found])
            for (chunk, _), part in zip(found, projected, strict=True):
                logits[chunk.row, chunk.start : chunk.end] = part[0]
        return logits

    @torch.inference_mode()
    def last_logits(self, rows: Sequence[Sequence[int]], starts: Sequence[int], count: int) -> list[Tensor]:
        """Append tokens to the rows' caches; return the logits after each row's last `count` tokens, [t, V] float32."""
        if count == 1:
            return [logits[None] for logits in self.extend(rows, starts)]
        kept: list[list[Tensor]] = [[] for _ in rows]
        for found in self._run_blocks(rows, starts):
            for chunk, state in found:
                first = starts[chunk.row] + len(rows[chunk.row]) - count
                kept[chunk.row].append(state.hidden[:, max(0, first - chunk.start) :].clone())  # it is overwritten
        return [logits[0] for logits in self.project([torch.cat(parts, dim=1) for parts in kept])]

    @torch.inference_mode()
    def logit_slices(self, token_ids: Sequence[int], first: int) -> Iterator[Tensor]:
        """Yield teacher-forced logits of a sequence, from an empty cache, slice by slice: [t, V] float32."""
        for ((chunk, state),) in self._run_blocks([token_ids], [0]):
            if first < chunk.end:
                yield from self.projected_slices(state.hidden[:, max(first - chunk.start, 0) :])

    @torch.inference_mode()
    def projected_slices(self, hidden: Tensor) -> Iterator[Tensor]:
        """Yield the logits of hidden states [1, T, D] after the last block, slice by slice: [t, V] float32.

        The slices have equal lengths, but for one token, so that none is short enough for other kernels: C++ kernels
        give each row the bits that it has in the whole chunk.
        """
        length = hidden.shape[1]
        count = -(-length // self.scored_tokens)
        for at in range(count):
            (logits,) = self.project([hidden[:, at * length // count : (at + 1) * length // count]])
            yield logits[0]
            del logits  # before the next slice's are made

    @torch.inference_mode()
    def project(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return the logits of rows' hidden states after the last block, [1, T, D] to [1, T, V] each, in one pass."""
        programs = [self.builder.score(1, is_one_token=hidden.shape[1] == 1) for hidden in rows]
        for program, hidden in zip(programs, rows, strict=True):
            program.state.hidden = hidden
        run_together(programs, self.policy)
        return [program.state.logits for program in programs]

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Return hidden states after the last block, [..., D], as the final norm gives them to the head, float32."""
        normed: Tensor = self.builder.decoder.head.norm(hidden, torch.float32)
        return normed

    def _run_blocks(
        self,
        rows: Sequence[Sequence[int]],
        starts: Sequence[int],
        instrument: Instrument = not_instrumented,
    ) -> Iterator[list[tuple[RowChunk, StepState]]]:
        """Run rows at their positions up to the last block, pass by pass; yield the chunks of each, with their states.

        Args:
            instrument: the argument of `forward_pass`.
        """
        for chunks in self._chunks_by_pass(rows, starts):
            with self.forward_pass([], chunks, self.policy, with_head=False, instrument=instrument) as states:
                yield [*zip(chunks, states, strict=True)]

    @torch.inference_mode()
    def hidden_states(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
        """Return the residual stream after the embedding and after each block, from empty caches: [B, T, D] each."""
        return tuple(map(torch.stack, self.residuals_by_layer(rows, [0] * len(rows))))

    @torch.inference_mode()
    def residuals_by_layer(self, rows: Sequence[Sequence[int]], starts: Sequence[int]) -> list[list[Tensor]]:
        """Append tokens to the rows' caches; return each row's residual stream, [T, D] on the CPU, by layer.

        Layer 0 is the embedding.
        """
        spec = self.builder.decoder.spec
        layers = [
            [torch.empty(len(ids), spec.dim, dtype=RESIDUAL_DTYPE, device="cpu") for ids in rows]
            for _ in range(len(spec.blocks) + 1)
        ]

        def copy_out(layer: int, chunk: RowChunk, state: StepState) -> None:
            start = starts[chunk.row]
            layers[layer][chunk.row][chunk.start - start : chunk.end - start] = state.hidden[0]

        def observed(chunk: RowChunk, program: Program) -> Program:
            layers, steps = itertools.count(), list[Step]()
            for step in single_blocks(program.steps):
                if not isinstance(step, PartStep) or step.is_last:
                    step = ObservedStep(step.group, step, partial(copy_out, next(layers), chunk, program.state))
                steps.append(step)
            return Program(program.state, steps)

        for _ in self._run_blocks(rows, starts, observed):
            pass
        return layers

    def attentions(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
        """Raise ConfigError: attention runs as one operation, which never stores its weights."""
        raise ConfigError(
            "graphcore's own attention never has its weights in memory; load the model with "
            "model.fallback=transformers and model.attention=eager to get them"
        )

    @torch.inference_mode()
    def blocks(self, hidden: Tensor, start: int = 0) -> Tensor:
        """Run hidden states [B, T, D] through all blocks, after the first `start` positions; returns [B, T, D]."""
        num_rows, length = hidden.shape[:2]
        answer = torch.empty_like(hidden, dtype=RESIDUAL_DTYPE, device=self.device)

        def put_hidden(chunk: RowChunk, state: StepState) -> None:
            state.hidden[0] = hidden[chunk.row, chunk.start - start : chunk.end - start]

        def begun(chunk: RowChunk, program: Program) -> Program:
            embed, *groups = program.steps
            return Program(
                program.state, [ObservedStep(embed.group, embed, partial(put_hidden, chunk, program.state)), *groups]
            )

        for found in self._run_blocks([[0] * length] * num_rows, [start] * num_rows, begun):
            for chunk, state in found:
                answer[chunk.row, chunk.start - start : chunk.end - start] = state.hidden[0]
        return answer

    def new_state(self) -> ForwardSequences:
        """Return an empty state for `extend_state`."""
        return ForwardSequences(self._holding)

    @torch.inference_mode()
    def extend_state(self, state: ForwardCache, hidden: Tensor, start: int) -> Tensor:
        """Run hidden states [B, T, D] through all blocks after the tokens of a state, and update the state."""
        assert isinstance(state, ForwardSequences), "a state of this runner"
        num_rows, length = hidden.shape[:2]
        self.sizes.check_context(start + length)
        with self._holding.in_rows(state, num_rows, start, start + length):
            return self.blocks(hidden, start)

    def _chunks_by_pass(self, rows: Sequence[Sequence[int]], starts: Sequence[int]) -> Iterator[list[RowChunk]]:
        """Yield the chunks of rows, pass by pass, after allocating their pages; the caller runs each before the next.

        Where a ring's pool has no pages for all rows at once, they run one after another, each after the others have
        freed the pages before their windows.
        """
        self.sizes.check_context(max(start + len(ids) for start, ids in zip(starts, rows, strict=True)))
        reached = list(starts)
        for chunks in chunks_by_pass(rows, starts, self.chunks, self.prompt_tokens):
            ready: list[RowChunk] = []
            for chunk in chunks:
                if not self._try_reserve(chunk.row, chunk.start, chunk.end):
                    if ready:
                        self._agree(ready)
                        yield ready
                    ready = []
                    for row, position in enumerate(reached):
                        self.pages.free_before_window(row, position)
                    try:
                        self.reserve(chunk.row, chunk.start, chunk.end)
                    except ConfigError as error:
                        self._agree([chunk], error)
                        raise
                ready.append(chunk)
                reached[chunk.row] = chunk.end
            self._agree(ready)
            yield ready

    def _agree(self, chunks: Sequence[RowChunk], error: ConfigError | None = None) -> None:
        """Check that every rank can run the pass; otherwise the others would wait for its layers."""
        if self.builder.hand_over is not None:
            self.builder.hand_over.ranks.refuse_together(error, [chunk.row for chunk in chunks])

    def reserve(self, row: int, begin: int, end: int) -> None:
        """Allocate a row's pages for positions begin .. end - 1; calls that run tokens do this by themselves.

        Raises:
            ConfigError: too few pages are free.
        """
        if not self._try_reserve(row, begin, end):
            raise ConfigError(
                f"a row of {end} tokens does not fit in the KV cache's pages beside the other rows; raise "
                "batching.cache_tokens, or give fewer rows"
            )

    def _try_reserve(self, row: int, begin: int, end: int) -> bool:
        """Allocate a row's pages for positions begin .. end - 1; return False if too few are free."""
        if begin == 0:
            self.pages.free(row)  # the row may share some
        return self.pages.reserve(row, begin, end)

    def _program_of(self, chunk: RowChunk, is_observed: bool) -> Program:
        """Return the program of a chunk with its inputs. Args: is_observed: the same as in `Programs.chunk`."""
        program = self.programs.chunk(len(chunk.ids), chunk.row, is_observed)
        program.state.put_rows([chunk.ids], [chunk.start])
        return program


def single_blocks(steps: Sequence[Step]) -> list[Step]:
    """Return the embedding's step, and one step for each block of the others, or for each part of it."""
    embed, *groups = steps
    found = [embed]
    for step in groups:
        assert isinstance(step, BlocksStep | PartStep), "only the embedding has no blocks"
        if isinstance(step, PartStep):
            found.append(step)
        else:
            found += [BlocksStep(step.group, step.state, [bound]) for bound in step.blocks]
    return found
