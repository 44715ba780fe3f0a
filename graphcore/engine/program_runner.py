"""Token ids in, logits out: prefill in chunks, decode one by one, over caches that the runner owns.

Legend: B batch, T tokens, D model dim, V vocab.

Programs exist for two widths, one sequence and the engine's batch size; a smaller batch is padded with sequences that
have no real token. Each row's cache is kept between calls: a call says at which position each row starts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphcore.engine.model_runner import ModelRunner, RunnerSizes
from graphcore.engine.sampler import SamplingParams, choosing_phase
from graphcore.errors import ConfigError
from graphcore.graph.builder import GraphBuilder
from graphcore.graph.capture import CapturedStep, Captures
from graphcore.graph.program import Program
from graphcore.graph.step import BlocksStep, Step
from graphcore.graph.token_choice import ChoosingRows
from graphcore.nn.layer_cache import LayerCache, restore, snapshot
from graphcore.nn.spec import MoESpec
from graphcore.progress import Progress, ignore_progress
from graphcore.streaming.policy import Policy, watched
from graphcore.streaming.scheduler import run_program


@dataclass(frozen=True)
class PromptChunk:
    """A program with a chunk of each row's tokens as its inputs.

    Attributes:
        tokens: number of tokens of the chunk's longest row.
        ended: rows whose last token is in the chunk.
    """

    program: Program
    tokens: int
    ended: list[int]


class ProgramRunner(ModelRunner):
    """Runner of graphcore's own programs over static caches."""

    def __init__(self, builder: GraphBuilder, policy: Policy, batch_size: int, prefill_chunk: int) -> None:
        self.builder = builder
        self.policy = policy
        self.device, spec = builder.device, builder.decoder.spec
        self.sizes = RunnerSizes(batch_size, prefill_chunk, spec.vocab, builder.context, spec.context)
        self.library = None if builder.library is None else str(builder.library)
        self._programs: dict[tuple[str, int, bool], Program] = {}
        self._programs_of_rows: dict[tuple[str, int], Program] = {}

    @property
    def num_compiled(self) -> int:
        """Number of graphs compiled so far."""
        return len(self.builder.functions.compiled)

    @property
    def captures(self) -> Captures | None:
        """The captured CUDA graphs of decode steps; None where there are none."""
        return self.builder.captures if self.builder.captures_graphs else None

    def width(self, num_sequences: int) -> int:
        """Return the number of rows of the programs for that many sequences."""
        most = self.sizes.batch_size
        assert num_sequences <= most, f"{num_sequences} sequences in a batch of {most}"
        return 1 if num_sequences == 1 else most

    def program(self, phase: str, width: int, is_greedy: bool = False) -> Program:
        """Return the program of a phase, built and compiled at its first use.

        Args:
            phase: "decode"; "sample" or "narrow" (captured graphs that draw from all tokens, or from those that top-k
                and top-p keep); "prefill"; "token" (the steps of decode, called one by one even where decode is
                captured); "score" or "score_one" (the head after each of several tokens, or after one).
            width: number of rows.
            is_greedy: True for a decode program that chooses the likeliest token and feeds it to itself.
        """
        key = (phase, width, is_greedy)
        if key not in self._programs:
            build = {
                "decode": lambda: self.builder.decode(width, is_greedy),
                "sample": lambda: self.builder.sample(width, narrows=False),
                "narrow": lambda: self.builder.sample(width, narrows=True),
                "prefill": lambda: self.builder.prefill(width),
                "token": lambda: self.builder.token(width),
                "score": lambda: self.builder.score(width, is_one_token=False),
                "score_one": lambda: self.builder.score(width, is_one_token=True),
            }
            self._programs[key] = build[phase]()
        return self._programs[key]

    def program_of_row(self, phase: str, cache_row: int) -> Program:
        """Return the program of one sequence, which has that row of the caches: "prefill" or "token"."""
        key = (phase, cache_row)
        if key not in self._programs_of_rows:
            build = self.builder.prefill if phase == "prefill" else self.builder.token
            self._programs_of_rows[key] = build(1, cache_row)
        return self._programs_of_rows[key]

    @property
    def has_rows_alike(self) -> bool:
        """Whether a decode program computes each row with the same bits, whatever the other rows are.

        A native program does. torch's own products and functions do not: which instructions compute a number depends on
        its place among all rows. Compiled code does, unless it calls torch: for experts, and for layers' features.
        """
        builder, size = self.builder, self.sizes.batch_size
        if size == 1 or builder.records(size):
            return True
        spec, compiles = builder.decoder.spec, builder.functions.compiles
        return compiles and spec.per_layer is None and not any(isinstance(each.mlp, MoESpec) for each in spec.blocks)

    @property
    def finds_likeliest(self) -> bool:
        """Whether the threads that run a decode step of all sequences find the likeliest tokens on the way."""
        return self.builder.records(self.sizes.batch_size)

    def choosing_program(self, params: Sequence[SamplingParams]) -> Program:
        """Return the captured program of all rows that chooses tokens on the device, for rows with these parameters."""
        phase = choosing_phase(params)
        return self.program(phase, self.width(self.sizes.batch_size), is_greedy=phase == "decode")

    @property
    def choosing_rows(self) -> ChoosingRows:
        """The rows that all programs of `choosing_program` share."""
        return self.builder.choosing_rows(self.width(self.sizes.batch_size))

    def warm_up(self, num_sequences: int, params: SamplingParams | None = None) -> None:
        """Build the programs for that many sequences: compile them or load them from the cache; on a GPU capture them.

        Args:
            params: sampling parameters that will be used; None is greedy.
        """
        width = self.width(num_sequences)
        self.program("prefill", width)
        if not self.builder.captures_graphs:
            self.program("decode", width, self.finds_likeliest)
            return
        params = params or SamplingParams()
        self.program_of_row("prefill", 0)
        self.choosing_rows.warm_up(choosing_phase([params]))
        for step in self.choosing_program([params]).steps:
            if isinstance(step, CapturedStep):
                step.prepare()

    def release(self) -> None:
        """Free programs and captured graphs; the model cannot run any more."""
        self._programs.clear()
        self._programs_of_rows.clear()
        self.builder.captures.release()

    @torch.inference_mode()
    def put_aside(self, rows: Sequence[int]) -> Callable[[], None]:
        """Copy rows out of the caches, to the host; the function that is returned puts them back."""
        caches = self.builder.caches
        kept = {row: tuple(tensor.cpu() for tensor in snapshot(caches, row)) for row in rows}

        def bring_back() -> None:
            for row, tensors in kept.items():
                restore(caches, row, tensors)

        return bring_back

    def reusable(self, cached: Sequence[int], prompt: Sequence[int]) -> int:
        """Return how many of the prompt's first tokens need not run in a row that holds `cached`; at least one runs."""
        return common_prefix(cached, prompt, self.builder.caches)

    @torch.inference_mode()
    def feed(
        self, rows: Sequence[Sequence[int]], starts: Sequence[int], on_progress: Progress = ignore_progress
    ) -> Tensor:
        """Append tokens to the rows' caches.

        Args:
            rows: new tokens of each sequence, at least one.
            starts: number of tokens that each row's cache already holds.
            on_progress: callback for "prefill", the group or None, and the longest row's tokens, done and in all.

        Returns:
            [len(rows), V] float32 logits after each row's last token.
        """
        logits = torch.empty(len(rows), self.sizes.vocab, dtype=torch.float32, device=self.device)
        done, total = 0, max(map(len, rows))
        for chunk in self._chunks(rows, starts, "decode"):
            # Logits are needed only where a row ends, and the head may have to be read from a disk.
            program = chunk.program if chunk.ended else chunk.program.without_head()
            self.policy.skip([] if chunk.ended else [step.group for step in chunk.program.heads])
            run_program(program, watched(self.policy, on_progress, "prefill", done, total))
            if chunk.ended:
                logits[chunk.ended] = chunk.program.state.logits[chunk.ended]
            done += chunk.tokens
            on_progress("prefill", None, done, total)
        return logits

    @torch.inference_mode()
    def logits(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Return teacher-forced logits of rows of one length, from empty caches: [B, T, V] float32 on the CPU."""
        parts: list[Tensor] = []
        for chunk in self._chunks(rows, [0] * len(rows), "token"):
            run_program(chunk.program.without_head(), self.policy)
            parts.append(self.project(chunk.program.state.hidden)[: len(rows)].cpu())
        return torch.cat(parts, dim=1)

    @torch.inference_mode()
    def project(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states after the last block: [B, T, D] to [B, T, V] float32; B is a width."""
        program = self.program("score_one" if hidden.shape[1] == 1 else "score", len(hidden))
        program.state.hidden = hidden
        run_program(program, self.policy)
        return program.state.logits

    @torch.inference_mode()
    def residuals(self, token_ids: Sequence[int]) -> Iterator[Tensor]:
        """Yield the residual stream after the last block, from an empty cache, chunk by chunk: [1, t, D] each."""
        for chunk in self._chunks([token_ids], [0], "token"):
            run_program(chunk.program.without_head(), self.policy)
            yield chunk.program.state.hidden

    @torch.inference_mode()
    def hidden_states(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
        """Return the residual stream after the embedding and after each block, from empty caches: [B, T, D] each."""
        layers: list[list[Tensor]] = []
        for chunk in self._chunks(rows, [0] * len(rows), "token"):
            state, (embed, *blocks) = chunk.program.state, chunk.program.without_head().steps
            seen: list[Tensor] = []
            for step in [embed, *(part for group in blocks for part in single_blocks(group))]:
                run_program(Program(state, [step]), self.policy)
                seen.append(state.hidden[: len(rows)].to("cpu", copy=True))  # kernels change the stream in place
            layers.append(seen)
        return tuple(torch.cat(parts, dim=1) for parts in zip(*layers, strict=True))

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
        parts: list[Tensor] = []
        done = 0
        for chunk in self._chunks([[0] * length] * num_rows, [start] * num_rows, "token"):
            state, (embed, *blocks) = chunk.program.state, chunk.program.without_head().steps
            run_program(Program(state, [embed]), self.policy)
            state.hidden[:num_rows] = hidden[:, done : done + chunk.tokens]
            run_program(Program(state, blocks), self.policy)
            parts.append(state.hidden[:num_rows].clone())
            done += chunk.tokens
        return torch.cat(parts, dim=1)

    def _chunks(self, rows: Sequence[Sequence[int]], starts: Sequence[int], single: str) -> Iterator[PromptChunk]:
        """Yield programs whose inputs are the next chunk of every row; the caller runs each before the next.

        A chunk of one token runs the program of the phase `single`, a longer one the prefill program.
        """
        self.sizes.check_context(max(start + len(ids) for start, ids in zip(starts, rows, strict=True)))
        width = self.width(len(rows))
        done = [0] * len(rows)
        while any(len(ids) > seen for ids, seen in zip(rows, done, strict=True)):
            counts = [min(self.sizes.prefill_chunk, len(ids) - seen) for ids, seen in zip(rows, done, strict=True)]
            tokens = max(counts)
            program = self.program(single if tokens == 1 else "prefill", width)
            pieces = [ids[seen : seen + count] for ids, seen, count in zip(rows, done, counts, strict=True)]
            begins = [start + seen for start, seen in zip(starts, done, strict=True)]
            program.state.put_rows(pieces, begins)
            done = [seen + count for seen, count in zip(done, counts, strict=True)]
            ended = [row for row, ids in enumerate(rows) if counts[row] and done[row] == len(ids)]
            yield PromptChunk(program, tokens, ended)


def common_prefix(cached: Sequence[int], prompt: Sequence[int], caches: Sequence[LayerCache]) -> int:
    """Return how many of the prompt's first tokens need not run again; at least one always runs, for its logits.

    A full-attention layer can go back to any earlier position. A ring that has wrapped has lost the keys before its
    window, and a recurrent state has no earlier positions, so they can only continue after the last token.

    Args:
        cached: tokens that a row of the caches has seen.
        prompt: the new prompt.
        caches: caches of all layers.
    """
    same = next((at for at, (old, new) in enumerate(zip(cached, prompt, strict=False)) if old != new), None)
    common = min(len(cached), len(prompt)) if same is None else same
    common = min(common, len(prompt) - 1)
    can_go_back = all(cache.can_go_back(len(cached)) for cache in caches)
    return common if can_go_back or common == len(cached) else 0


def single_blocks(step: Step) -> list[BlocksStep]:
    """Return one step for each block of a step."""
    assert isinstance(step, BlocksStep), f"{type(step).__name__} has no blocks"
    return [BlocksStep(step.group, step.state, [bound]) for bound in step.blocks]
