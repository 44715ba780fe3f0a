"""The `past_key_values` of an engine: a transformers Cache whose sequences lie in the engine.

    columns of a row   -  -  a  b  c  d        columns that the attention mask leaves out hold no token
    state              -  -  a  b  c           keys, values and recurrent states of the row's first tokens
    next call runs                    d + its own tokens

A state is never changed, so beams and copies of a cache share states. Tokens that a state does not hold run again:
after `crop` a row continues from the longest earlier state that it still has.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NoReturn

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from graphcore.engine.sequence_state import SequenceState
from graphcore.errors import ConfigError


@dataclass
class CachedSequence:
    """One row of a cache.

    Attributes:
        columns: token id of each column; None where the attention mask leaves the column out.
        states: states of its first tokens, shortest first; the next call continues from the last one.
    """

    columns: list[int | None] = field(default_factory=list)
    states: list[SequenceState] = field(default_factory=lambda: [SequenceState()])

    def copy(self) -> "CachedSequence":
        """Return a row that continues from the same states."""
        return CachedSequence(list(self.columns), list(self.states))

    @property
    def pending(self) -> list[int]:
        """Tokens that the last state does not hold."""
        missing = self.num_tokens - self.states[-1].tokens
        latest = (column for column in reversed(self.columns) if column is not None)
        return list(islice(latest, missing))[::-1]

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the row, without padding."""
        return len(self.columns) - self.columns.count(None)

    def crop(self, count: int) -> None:
        """Remove the last `count` columns."""
        del self.columns[max(0, len(self.columns) - count) :]
        tokens = self.num_tokens
        fitting = [state for state in self.states if state.tokens <= tokens]
        self.states = fitting[-1:] or [SequenceState()]


class SequencesLayer(CacheLayerMixin):
    """The only layer of an `EngineCache`; it stands for all layers of the model.

    Attributes:
        sequences: rows of the batch; none before the first call.
        context: most tokens of a sequence.
        record_past: True if `crop` will be called after each call, so that earlier states are kept.
    """

    is_croppable = True

    def __init__(self, context: int) -> None:
        super().__init__()
        self.context = context
        self.sequences: list[CachedSequence] = []
        self.record_past = False

    def __deepcopy__(self, memo: dict[int, object]) -> "SequencesLayer":
        """Return a layer whose rows continue from the same states."""
        copied = SequencesLayer(self.context)
        copied.sequences, copied.record_past = [row.copy() for row in self.sequences], self.record_past
        return copied

    def sequences_of(self, count: int) -> list[CachedSequence]:
        """Return the rows; new ones before the first call.

        Raises:
            ConfigError: the number of rows is not `count`.
        """
        if len(self.sequences) not in (0, count):
            raise ConfigError(f"input_ids has {count} rows and past_key_values {len(self.sequences)}; give as many")
        return self.sequences or [CachedSequence() for _ in range(count)]

    def num_tokens(self, count: int) -> list[int]:
        """Return the number of tokens of each row; arguments and errors are those of `sequences_of`."""
        return [sequence.num_tokens for sequence in self.sequences_of(count)]

    def append(
        self, rows: Sequence[CachedSequence], columns: Sequence[list[int | None]], states: Iterable[SequenceState]
    ) -> None:
        """Append new columns and states to rows after a call.

        Args:
            rows: rows that `sequences_of` returned before the call.
            columns: new columns of each row.
            states: states after the call, of each row with a token among its new columns.
        """
        left = iter(states)
        for row, new in zip(rows, columns, strict=True):
            row.columns += new
            if any(column is not None for column in new):
                row.states = [*(row.states if self.record_past else ()), next(left)]
        self.sequences = list(rows)

    @property
    def batch_size(self) -> int:
        """Number of rows; -1 before the first call."""
        return len(self.sequences) or -1

    def get_seq_length(self) -> int:
        """Return the number of columns that the cache holds, padding included."""
        return len(self.sequences[0].columns) if self.sequences else 0

    def get_max_length(self) -> int:
        """Return the most tokens of a sequence."""
        return self.context

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of columns after a call with `query_length` new ones, and 0, the offset of the first."""
        return self.get_seq_length() + query_length, 0

    def activate_past_recording(self) -> None:
        """Keep earlier states from now on, so that `crop` need not run tokens again."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -tokens_to_remove columns of each row."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): give the number of tokens to remove as a negative number")
        for sequence in self.sequences:
            sequence.crop(-tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i continue from row beam_idx[i]."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows of these indices, in this order; an index may come several times."""
        self.sequences = [self.sequences[index].copy() for index in indices.tolist()] if self.sequences else []

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self.sequences = [sequence.copy() for sequence in self.sequences for _ in range(repeats)]

    def reset(self) -> None:
        """Remove all rows."""
        self.sequences = []

    def offload(self) -> None:
        """Do nothing: the engine decides where its caches lie."""

    def prefetch(self) -> None:
        """Do nothing: the engine decides where its caches lie."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> NoReturn:
        """Raise TypeError: keys and values do not leave the engine."""
        raise TypeError("the cache of an engine takes no keys and values; only its own model fills it")

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> NoReturn:
        """Raise TypeError: keys and values do not leave the engine."""
        self.lazy_initialization(key_states, value_states)


class EngineCache(Cache):
    """The cache of sequences that an engine computes, for `forward` and `generate` of its transformers model.

    Args:
        context: most tokens of a sequence.

    Attributes:
        rows: SequencesLayer, the rows of the batch.
    """

    def __init__(self, context: int) -> None:
        self.rows = SequencesLayer(context)
        super().__init__(layers=[self.rows])

    def __deepcopy__(self, memo: dict[int, object]) -> "EngineCache":
        """Return a cache whose rows continue from the same states."""
        copied = EngineCache(self.rows.context)
        copied.rows = self.rows.__deepcopy__(memo)
        copied.layers = [copied.rows]
        return copied
