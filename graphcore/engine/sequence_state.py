"""Immutable states of single sequences: calls may branch from one, as beam search and speculative decoding do.

    state  --extend: tokens-->  logits, another state

Legend: T tokens, D model dim, V vocab.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphcore.engine.program_runner import ProgramRunner
from graphcore.errors import ConfigError
from graphcore.kvcache.page_allocator import SwappedSequence


class SequenceState:
    """Keys, values and recurrent states of one sequence; a new one is that of an empty sequence.

    It belongs to one engine, and is kept in host memory. No call changes it.

    Attributes:
        tokens: int, number of tokens of the sequence.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._runner: ProgramRunner | None = None
        self._kept: SwappedSequence | None = None

    @classmethod
    def of_row(cls, runner: ProgramRunner, row: int, tokens: int) -> "SequenceState":
        """Return the state of the sequence in a row of the caches, which has run `tokens` tokens."""
        state = cls()
        state.tokens, state._runner, state._kept = tokens, runner, runner.pages.copy_out(row, tokens)
        return state

    def enter(self, runner: ProgramRunner, row: int) -> None:
        """Put the sequence into a row of the caches that has no pages.

        Raises:
            ConfigError: the state is another engine's, or there are not enough pages.
        """
        if self._runner not in (None, runner):
            raise ConfigError("the state belongs to another engine; begin with a new SequenceState()")
        if self._kept is not None and not runner.pages.copy_in(row, self._kept):
            raise ConfigError(
                f"a state of {self.tokens} tokens does not fit in the KV cache's pages beside the others; raise "
                "batching.cache_tokens, or give fewer sequences"
            )


@dataclass(frozen=True)
class Extension:
    """The result of `Engine.extend`, one entry for each sequence.

    Attributes:
        logits: [t, V] float32, the logits after the sequence's last tokens.
        states: state after the sequence's last token; empty unless states are kept.
        hidden_states: residual stream after the embedding and after each block, [T, D] float32 on the CPU; empty
            unless it was asked for.
    """

    logits: Sequence[Tensor]
    states: Sequence[SequenceState]
    hidden_states: Sequence[Sequence[Tensor]]


@torch.inference_mode()
def extend_states(
    runner: ProgramRunner,
    rows: Sequence[Sequence[int]],
    states: Sequence[SequenceState],
    num_logits: int,
    output_hidden_states: bool,
    keep_states: bool,
) -> Extension:
    """Run the tokens of some sequences after their states, batch_size of them together; arguments as `Engine.extend`.

    Raises:
        ConfigError: a state is another engine's, or a sequence does not fit in the context or the cache.
    """
    logits: list[Tensor] = []
    after: list[SequenceState] = []
    hidden: list[Sequence[Tensor]] = []
    size = runner.sizes.batch_size
    for at in range(0, len(rows), size):
        batch, begun = rows[at : at + size], states[at : at + size]
        for row in range(size):
            runner.pages.free(row)
        for row, state in enumerate(begun):
            state.enter(runner, row)
        starts = [state.tokens for state in begun]
        if output_hidden_states:
            layers = runner.residuals_by_layer(batch, starts)
            hidden += zip(*layers, strict=True)
            lasts = [stream[-num_logits:][None].to(runner.device) for stream in layers[-1]]
            logits += [each[0] for each in runner.project(lasts)]
        else:
            logits += runner.last_logits(batch, starts, num_logits)
        ends = (start + len(ids) for start, ids in zip(starts, batch, strict=True))
        after += [SequenceState.of_row(runner, row, end) for row, end in enumerate(ends) if keep_states]
    return Extension(logits, after, hidden)
