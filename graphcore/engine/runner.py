"""Token ids in, logits out: prefill in chunks, decode one by one, over caches that the runner owns.

Legend: B batch, T tokens, D model dim, V vocab.

Programs exist for two widths, one sequence and the engine's batch size; a smaller batch is padded with sequences that
have no real token. Rows of the batch keep what they have seen between calls: a call says where each row starts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphcore.engine.passes import heads_of, set_inputs, single_blocks, without_head
from graphcore.engine.prefix import reusable_prefix
from graphcore.engine.sampler import SamplingParams
from graphcore.engine.token_runner import TokenRunner
from graphcore.errors import ConfigError
from graphcore.graph.builder import GraphBuilder
from graphcore.graph.capture import CapturedStep, Captures
from graphcore.graph.program import Program
from graphcore.progress import Progress, ignore_progress
from graphcore.streaming.policy import Policy
from graphcore.streaming.scheduler import run_program
from graphcore.streaming.watched import watched


@dataclass(frozen=True)
class Chunk:
    """A program whose inputs are set.

    Attributes:
        tokens: of its longest row.
        ended: rows whose last token is in it.
    """

    program: Program
    tokens: int
    ended: list[int]


class Runner(TokenRunner):
    """Runs graphcore's own programs over static caches."""

    def __init__(self, builder: GraphBuilder, policy: Policy, batch_size: int, prefill_chunk: int) -> None:
        self.builder = builder
        self.policy = policy
        self.batch_size = batch_size
        self.prefill_chunk = prefill_chunk
        self.device = builder.device
        self.context = builder.context
        self.vocab, self.longest = builder.decoder.spec.vocab, builder.decoder.spec.context
        self._programs: dict[tuple[str, int, bool], Program] = {}

    @property
    def num_compiled(self) -> int:
        """Graphs that were compiled so far."""
        return len(self.builder.functions)

    @property
    def captures(self) -> Captures | None:
        """The CUDA graphs that it decodes with; None where it has none."""
        return self.builder.captures if self.builder.captures_graphs else None

    def width(self, num_sequences: int) -> int:
        """Return how many rows the programs for that many sequences have."""
        assert num_sequences <= self.batch_size, f"{num_sequences} sequences in a batch of {self.batch_size}"
        return 1 if num_sequences == 1 else self.batch_size

    def program(self, phase: str, width: int, is_greedy: bool = False) -> Program:
        """Return the program of a phase, built and compiled at its first use.

        Args:
            phase: "decode", "sample" and "narrow" (captured graphs that draw, from all tokens or from what top-k and
                top-p keep), "prefill", "token" (decode's steps, one by one even where decode is captured), or "score"
                and "score_one" (the head after every token, of which there are several or one).
            width: rows.
            is_greedy: a decode program that feeds itself.
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

    def choosing_program(self, width: int, params: SamplingParams) -> Program | None:
        """Return a decode program that chooses tokens as asked and ends rows on the device, or None: the host does."""
        if not self.builder.captures_graphs:
            return None
        return self.program(choosing_phase(params), width, is_greedy=params.is_greedy)

    def warm_up(self, num_sequences: int, params: SamplingParams | None = None) -> None:
        """Build, and compile or load from the cache, what that many sequences will need; capture it on a GPU.

        Args:
            params: how they will be sampled; None is greedy.
        """
        width = self.width(num_sequences)
        self.program("prefill", width)
        self.program("decode", width)
        chosen = self.choosing_program(width, params or SamplingParams()) or self.program("decode", width, True)
        for step in chosen.steps:
            if isinstance(step, CapturedStep):
                step.prepare()

    def release(self) -> None:
        """Give programs and captured graphs back; nothing runs any more."""
        self._programs.clear()
        self.builder.captures.release()

    def reusable(self, cached: Sequence[int], prompt: Sequence[int]) -> int:
        """Return how many tokens of the prompt row 0 of the cache can serve, if it holds `cached`; never all."""
        return reusable_prefix(cached, prompt, self.builder.caches)

    @torch.inference_mode()
    def feed(
        self, rows: Sequence[Sequence[int]], starts: Sequence[int], on_progress: Progress = ignore_progress
    ) -> Tensor:
        """Append tokens to the rows' caches.

        Args:
            rows: at least one token for each sequence.
            starts: tokens that each row's cache already holds.
            on_progress: called with "prefill", group or None, tokens of the longest row done and in all.

        Returns:
            [len(rows), V] float32 logits after each row's last token.
        """
        logits = torch.empty(len(rows), self.builder.decoder.spec.vocab, dtype=torch.float32, device=self.device)
        done, total = 0, max(map(len, rows))
        for chunk in self._chunks(rows, starts, "decode"):
            # Nobody wants logits where no row ends, and the head may have to come from a disk.
            program = chunk.program if chunk.ended else without_head(chunk.program)
            self.policy.skip([] if chunk.ended else [step.group for step in heads_of(chunk.program)])
            run_program(program, watched(self.policy, on_progress, "prefill", done, total))
            if chunk.ended:
                logits[chunk.ended] = chunk.program.state.logits[chunk.ended]
            done += chunk.tokens
            on_progress("prefill", None, done, total)
        return logits

    @torch.inference_mode()
    def logits(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Return teacher-forced logits of rows of one length, from empty caches: [B, T, V] float32 on the CPU."""
        self.forget()
        parts: list[Tensor] = []
        for chunk in self._chunks(rows, [0] * len(rows), "token"):
            run_program(without_head(chunk.program), self.policy)
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
        self.forget()
        for chunk in self._chunks([token_ids], [0], "token"):
            run_program(without_head(chunk.program), self.policy)
            yield chunk.program.state.hidden

    @torch.inference_mode()
    def hidden_states(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
        """Return the residual stream after the embedding and after each block, from empty caches: [B, T, D] each."""
        self.forget()
        layers: list[list[Tensor]] = []
        for chunk in self._chunks(rows, [0] * len(rows), "token"):
            state, (embed, *blocks) = chunk.program.state, without_head(chunk.program).steps
            seen: list[Tensor] = []
            for step in [embed, *(part for group in blocks for part in single_blocks(group))]:
                run_program(Program(state, [step]), self.policy)
                seen.append(state.hidden[: len(rows)].to("cpu", copy=True))  # kernels change the stream in place
            layers.append(seen)
        return tuple(torch.cat(parts, dim=1) for parts in zip(*layers, strict=True))

    def attentions(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
        """Raise ConfigError: attention is one operation here, and its weights are never in memory."""
        raise ConfigError(
            "graphcore's own attention never has its weights in memory; load the model with "
            "model.fallback=transformers and model.attention=eager to get them"
        )

    @torch.inference_mode()
    def blocks(self, hidden: Tensor) -> Tensor:
        """Run hidden states [B, T, D] through all blocks, from empty caches; returns [B, T, D]."""
        self.forget()
        num_rows, length = hidden.shape[:2]
        parts: list[Tensor] = []
        done = 0
        for chunk in self._chunks([[0] * length] * num_rows, [0] * num_rows, "token"):
            state, (embed, *blocks) = chunk.program.state, without_head(chunk.program).steps
            run_program(Program(state, [embed]), self.policy)
            state.hidden[:num_rows] = hidden[:, done : done + chunk.tokens]
            run_program(Program(state, blocks), self.policy)
            parts.append(state.hidden[:num_rows].clone())
            done += chunk.tokens
        return torch.cat(parts, dim=1)

    def _chunks(self, rows: Sequence[Sequence[int]], starts: Sequence[int], single: str) -> Iterator[Chunk]:
        """Yield, one after another, programs whose inputs are the next piece of every row; the caller runs each.

        A piece of one token runs the program of the phase `single`, a longer one the prefill program.
        """
        self.check_context(max(start + len(ids) for start, ids in zip(starts, rows, strict=True)))
        width = self.width(len(rows))
        done = [0] * len(rows)
        while any(len(ids) > seen for ids, seen in zip(rows, done, strict=True)):
            counts = [min(self.prefill_chunk, len(ids) - seen) for ids, seen in zip(rows, done, strict=True)]
            tokens = max(counts)
            program = self.program(single if tokens == 1 else "prefill", width)
            pieces = [ids[seen : seen + count] for ids, seen, count in zip(rows, done, counts, strict=True)]
            begins = [start + seen for start, seen in zip(starts, done, strict=True)]
            set_inputs(program.state, pieces, begins, width, tokens)
            done = [seen + count for seen, count in zip(done, counts, strict=True)]
            ended = [row for row, ids in enumerate(rows) if counts[row] and done[row] == len(ids)]
            yield Chunk(program, tokens, ended)


def choosing_phase(params: SamplingParams) -> str:
    """Return which program chooses on the device so: the fewer cuts, the fewer kernels."""
    if params.is_greedy:
        return "decode"
    return "narrow" if params.top_k > 0 or params.top_p < 1.0 else "sample"
