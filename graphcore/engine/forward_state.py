"""The state of sequences whose hidden states are run in several calls.

Legend: B batch, T tokens, D model dim.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from graphcore.engine.model_runner import ModelRunner
from graphcore.errors import ConfigError


class ForwardState:
    """What the layers keep of some sequences: keys, values and recurrent states, for `Engine.forward`.

    It belongs to one engine, and is kept in host memory between calls.

    Attributes:
        tokens: int, positions that it holds of each sequence.
        rows: int, sequences; 0 for an empty state.
    """

    def __init__(self) -> None:
        self.tokens = self.rows = 0
        self._runner: ModelRunner | None = None
        self._bring_back: Callable[[], None] = lambda: None

    def go_on(self, runner: ModelRunner, hidden: Tensor) -> Tensor:
        """Run hidden states [B, T, D] at the next positions, in the caches' first rows, and keep the rows after them.

        Raises:
            ConfigError: the state is another engine's, or of another number of sequences, or too many are given.
        """
        rows = len(hidden)
        if self._runner not in (None, runner):
            raise ConfigError("the state belongs to another engine; begin with a new ForwardState()")
        if self.rows not in (0, rows) or rows > runner.sizes.batch_size:
            most = self.rows or runner.sizes.batch_size
            raise ConfigError(f"hidden_states has {rows} rows, and the state has room for {most}; give that many")
        with torch.inference_mode():
            self._bring_back()
        found = runner.blocks(hidden, self.tokens)
        self._runner, self.rows, self.tokens = runner, rows, self.tokens + hidden.shape[1]
        with torch.inference_mode():
            self._bring_back = runner.put_aside(range(rows), self.tokens)
        return found
