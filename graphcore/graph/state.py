"""The tensors that the steps of a program read and write.

Legend: B batch, T tokens, D model dim, E head dim, V vocab.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import Tensor

from graphcore.device import on_device
from graphcore.errors import GraphError
from graphcore.nn.span import Span


@dataclass
class StepState:
    """The tensors that flow through a program.

    A decode program's inputs (`token_ids`, `span`) keep their addresses, because captured graphs and native programs
    read them there; a prefill program gets new tensors for each chunk.

    Attributes:
        token_ids: [B, T] int64.
        span: positions of the tokens in their sequences.
        ropes: rope rows, one [B, T, 2, E/2] float32 per rope table.
        hidden: [B, T, D] residual stream.
        sequences: [B] int64, row of the caches of each token; read by native programs and captured chunks only, since
            all others use the rows in order. Tokens of one sequence are adjacent and at consecutive positions.
        per_layer: [L, B, T, P] float32, per-layer features of the tokens (Gemma 4); None if the model has none.
        logits: [B, V] float32, after each sequence's last real token.
        chosen: [B] int64, tokens that a greedy program chose; in a native program -1 if a logit of the row is not
            finite.
        carried: values that the parts of a block pass on, by the operation that computes them; empty between blocks.
        most_together: int, largest number of consecutive tokens of one sequence in one step of a decode program.
        place: int, number of the program among those of a pass; it tells residual streams that ranks hand over apart.
    """

    token_ids: Tensor
    span: Span
    ropes: tuple[Tensor, ...]
    hidden: Tensor
    logits: Tensor
    chosen: Tensor
    sequences: Tensor
    per_layer: Tensor | None = None
    carried: dict[Any, Any] = field(default_factory=dict)
    most_together: int = 1
    place: int = 0
    _are_rows_named: bool = False  # True after `put_tokens`, until `put_rows`
    _views: tuple[memoryview, ...] = ()  # a decode program's inputs on a CPU

    @classmethod
    def empty(cls, batch: int, tokens: int, device: torch.device) -> "StepState":
        """Return a state whose inputs are zero and whose outputs are still empty."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        nothing = torch.empty(0, device=device, dtype=torch.float32)
        span, in_order = Span(zeros(batch), zeros(batch)), torch.arange(batch, device=device, dtype=torch.int64)
        return cls(zeros(batch, tokens), span, (), nothing, nothing, zeros(batch), in_order)

    def put_rows(self, rows: Sequence[Sequence[int]], starts: Sequence[int]) -> None:
        """Set the inputs to rows of token ids, padded to the longest row and to the state's batch.

        Args:
            rows: at most B rows; some of them may be empty.
            starts: position of each row's first token.
        """
        if self._are_rows_named:
            self._are_rows_named = False
            self.sequences.copy_(torch.arange(len(self.sequences), dtype=torch.int64, device="cpu"))
        tokens = max(map(len, rows))
        if tokens == 1:  # a decode program's inputs stay at their addresses
            self._fill([ids[0] if ids else 0 for ids in rows], starts, [*map(len, rows)])
            return
        device, idle = self.token_ids.device, len(self.token_ids) - len(rows)
        begins, counts = [*starts, *[0] * idle], [*map(len, rows), *[0] * idle]
        padded = [[*ids, *[0] * (tokens - len(ids))] for ids in rows] + [[0] * tokens] * idle
        self.token_ids = on_device(padded, device)
        self.span = Span(on_device(begins, device), on_device(counts, device))

    def put_runs(self, runs: Sequence[Sequence[int]], starts: Sequence[int]) -> list[range]:
        """Set the inputs of a native decode program to runs of consecutive tokens, one row for each token.

        The logits are bit-identical to those of decoding the tokens one by one.

        Args:
            runs: token ids of each row of the caches, in order; some may be empty.
            starts: position of each run's first token.

        Returns:
            Rows of `logits` and `chosen` that belong to each run's tokens.

        Raises:
            GraphError: there are more tokens than rows, or more tokens of one sequence than `most_together`.
        """
        most, longest = len(self.token_ids), max(map(len, runs))
        ends = list(accumulate(map(len, runs), initial=0))
        if ends[-1] > most:
            raise GraphError(f"{ends[-1]} tokens for a decode step of {most} rows; run them in several steps")
        if longest > self.most_together:
            raise GraphError(
                f"{longest} tokens of one sequence in a decode step, but its caches have room for "
                f"{self.most_together}: a sliding window's ring needs a slot beside the window for each further token; "
                "allocate it, or run the tokens in several steps"
            )
        begins = [start + offset for ids, start in zip(runs, starts, strict=True) for offset in range(len(ids))]
        self.put_tokens([*chain(*runs)], begins, [row for row, ids in enumerate(runs) for _ in ids])
        return [range(begin, end) for begin, end in pairwise(ends)]

    def put_tokens(self, token_ids: Sequence[int], starts: Sequence[int], sequences: Sequence[int]) -> None:
        """Set the inputs in the first rows of a native decode program to single tokens.

        Args:
            starts: position of each token.
            sequences: row of the caches of each token.
        """
        self._fill(token_ids, starts, [1] * len(token_ids), sequences)
        self._are_rows_named = True

    def free_activations(self) -> None:
        """Free a chunk's activations; its logits stay."""
        self.hidden, self.ropes, self.per_layer = self.hidden.new_empty(0), (), None
        self.carried = {}

    def _fill(self, *numbers: Sequence[int]) -> None:
        """Write token ids, starts, counts and, if given, rows of the caches into the input tensors; the rest is 0."""
        inputs = self.token_ids, self.span.starts, self.span.counts, self.sequences
        if self.token_ids.device.type != "cpu":
            for tensor, values in zip(inputs, numbers, strict=False):
                idle = [0] * (len(tensor) - len(values))
                tensor.view(-1).copy_(on_device([*values, *idle], tensor.device))
            return
        self._views = self._views or tuple(tensor.view(-1).numpy().data for tensor in inputs)
        for view, values in zip(self._views, numbers, strict=False):
            for at in range(len(view)):  # numpy and torch run more code, which a step has pushed out of the caches
                view[at] = values[at] if at < len(values) else 0

    def advance(self, token_ids: Tensor) -> None:
        """Make `token_ids` [B] the next input, and advance the positions past the previous one."""
        self.token_ids[:, 0].copy_(token_ids)
        self.span.starts.add_(self.span.counts)
