"""The state of sequences whose hidden states or tokens are run in several calls.

Legend: B batch, T tokens, D model dim, V vocab.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from graphcore.engine.model_runner import BringBack, ModelRunner
from graphcore.engine.program_runner import ProgramRunner
from graphcore.errors import ConfigError


class ForwardState:
    """What the layers keep of some sequences: keys, values and recurrent states, for `Engine.forward` and `extend`.

    It belongs to one engine, and is kept in host memory between calls.

    Attributes:
        tokens: int, positions that it holds of each sequence.
        rows: int, sequences; 0 for an empty state.
    """

    def __init__(self) -> None:
        self.tokens = self.rows = 0
        self._runner: ModelRunner | None = None
        self._bring_back: BringBack = lambda first=0: None

    @classmethod
    def of_row(cls, runner: ModelRunner, row: int, tokens: int) -> Self:
        """Return the state of the sequence in one row of the caches, which holds so many tokens."""
        state = cls()
        state._leave(runner, range(row, row + 1), tokens)
        return state

    def enter(self, runner: ModelRunner, first: int = 0) -> None:
        """Put the sequences into rows of the caches, from row `first` on; the state stays as it is.

        Raises:
            ConfigError: the state is another engine's.
        """
        if self._runner not in (None, runner):
            raise ConfigError("the state belongs to another engine; begin with a new ForwardState()")
        with torch.inference_mode():
            self._bring_back(first)

    def _leave(self, runner: ModelRunner, rows: range, tokens: int) -> None:
        """Keep what these rows of the caches hold."""
        self._runner, self.rows, self.tokens = runner, len(rows), tokens
        with torch.inference_mode():
            self._bring_back = runner.put_aside(rows, tokens)

    def go_on(self, runner: ModelRunner, hidden: Tensor) -> Tensor:
        """Run hidden states [B, T, D] at the next positions, in the caches' first rows, and keep the rows after them.

        Raises:
            ConfigError: the state is another engine's, or of another number of sequences, or too many are given.
        """
        rows = len(hidden)
        if self.rows not in (0, rows) or rows > runner.sizes.batch_size:
            most = self.rows or runner.sizes.batch_size
            raise ConfigError(f"hidden_states has {rows} rows, and the state has room for {most}; give that many")
        self.enter(runner)
        found = runner.blocks(hidden, self.tokens)
        self._leave(runner, range(rows), self.tokens + hidden.shape[1])
        return found


@dataclass(frozen=True)
class Extension:
    """The result of `Engine.extend`, one entry for each sequence.

    Attributes:
        logits: [t, V] float32, the logits after its last tokens.
        states: state after its last token; empty unless states are kept.
        hidden_states: residual stream after the embedding and after each block, [T, D] float32 on the CPU; empty
            unless it was asked for.
    """

    logits: Sequence[Tensor]
    states: Sequence[ForwardState]
    hidden_states: Sequence[Sequence[Tensor]]


def extend_states(
    runner: ProgramRunner,
    rows: Sequence[Sequence[int]],
    states: Sequence[ForwardState],
    num_logits: int,
    output_hidden_states: bool,
    keep_states: bool,
) -> Extension:
    """Run the tokens of some sequences after their states, batch_size of them together; arguments as `Engine.extend`.

    Raises:
        ConfigError: a state is another engine's, or of several sequences, or a sequence does not fit in the context.
    """
    logits: list[Tensor] = []
    after: list[ForwardState] = []
    hidden: list[Sequence[Tensor]] = []
    size = runner.sizes.batch_size
    for at in range(0, len(rows), size):
        wave = rows[at : at + size]
        starts = _enter_all(runner, states[at : at + size])
        if output_hidden_states:
            layers = runner.residuals_by_layer(wave, starts)
            hidden += zip(*layers, strict=True)
            lasts = [stream[-num_logits:][None].to(runner.device) for stream in layers[-1]]
            logits += [each[0] for each in runner.project(lasts)]
        else:
            logits += runner.last_logits(wave, starts, num_logits)
        ends = (start + len(ids) for start, ids in zip(starts, wave, strict=True))
        after += [ForwardState.of_row(runner, row, end) for row, end in enumerate(ends) if keep_states]
    return Extension(logits, after, hidden)


def _enter_all(runner: ProgramRunner, states: Sequence[ForwardState]) -> list[int]:
    """Put a sequence of each state into the first rows of the caches, which nobody else has; return their lengths."""
    for row in range(runner.sizes.batch_size):
        runner.pages.free(row)
    for row, state in enumerate(states):
        if state.rows > 1:
            raise ConfigError(f"a state holds {state.rows} sequences; extend takes a state for each sequence")
        state.enter(runner, row)
    return [state.tokens for state in states]
