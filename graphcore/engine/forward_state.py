"""The state of sequences whose hidden states are run in several calls.

Legend: B batch, T tokens, D model dim.
"""

import weakref

from torch import Tensor

from graphcore.engine.model_runner import ModelRunner
from graphcore.errors import ConfigError
from graphcore.kvcache.forward_sequences import ForwardCache


class ForwardState:
    """Keys, values and recurrent states of some sequences, for `Engine.forward`.

    It belongs to one engine. Between calls its pages stay in the KV cache, as far as requests leave room for them, and
    are freed when the state is garbage-collected.

    Attributes:
        tokens: int, number of tokens of each sequence.
        rows: int, number of sequences; 0 for an empty state.
    """

    def __init__(self) -> None:
        self.tokens = self.rows = 0
        self._runner: ModelRunner | None = None
        self._held: ForwardCache | None = None

    def extend_state(self, runner: ModelRunner, hidden: Tensor) -> Tensor:
        """Run hidden states [B, T, D] at the next positions, and update the state.

        Raises:
            ConfigError: the state is another engine's, or of another number of sequences, or too many are given.
        """
        rows = len(hidden)
        if self._runner not in (None, runner):
            raise ConfigError("the state belongs to another engine; begin with a new ForwardState()")
        if self.rows not in (0, rows) or rows > runner.sizes.batch_size:
            most = self.rows or runner.sizes.batch_size
            raise ConfigError(f"hidden_states has {rows} rows, and the state has room for {most}; give that many")
        if self._held is None:
            self._held = runner.new_state()
            weakref.finalize(self, self._held.drop).atexit = False
        found = runner.extend_state(self._held, hidden, self.tokens)
        self._runner, self.rows, self.tokens = runner, rows, self.tokens + hidden.shape[1]
        return found
