"""The tensors that the steps of a program hand to one another.

Legend: B batch, T tokens, D model dim, E head dim, V vocab.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphcore.nn.span import Span


@dataclass
class StepState:
    """The tensors that flow through a program.

    A decode program's inputs (`token_ids`, `span`) stay at one address for its whole life, because a captured graph
    reads them there; a prefill program gets new ones for each chunk.

    Attributes:
        token_ids: [B, T] int64.
        span: positions of the tokens in their sequences.
        ropes: rope rows, one [B, T, 2, E/2] float32 per rope table.
        hidden: [B, T, D] residual stream.
        sequences: [B] int64, each sequence's row of the caches; only native programs read it, others take the rows in
            order. No two sequences of a step may have the same row.
        per_layer: [L, B, T, P] float32, the tokens' features of each layer; None where layers have none.
        logits: [B, V] float32, after each sequence's last real token.
        chosen: [B] int64, the tokens that a greedy program chose.
    """

    token_ids: Tensor
    span: Span
    ropes: tuple[Tensor, ...]
    hidden: Tensor
    logits: Tensor
    chosen: Tensor
    sequences: Tensor
    per_layer: Tensor | None = None

    @classmethod
    def empty(cls, batch: int, tokens: int, device: torch.device) -> "StepState":
        """Return a state whose inputs are zero and whose outputs are still empty."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        nothing = torch.empty(0, device=device)
        span, in_order = Span(zeros(batch), zeros(batch)), torch.arange(batch, device=device)
        return cls(zeros(batch, tokens), span, (), nothing, nothing, zeros(batch), in_order)

    def put_rows(self, rows: Sequence[Sequence[int]], starts: Sequence[int]) -> None:
        """Make rows of token ids the inputs, padded to the longest and to the state's batch.

        Args:
            rows: at most B rows; some of them may be empty.
            starts: position of each row's first token.
        """
        idle = len(self.token_ids) - len(rows)
        tokens = max(map(len, rows))
        padded = [[*ids, *[0] * (tokens - len(ids))] for ids in rows] + [[0] * tokens] * idle
        token_ids = torch.tensor(padded, dtype=torch.int64)
        begins, counts = torch.tensor([*starts, *[0] * idle]), torch.tensor([*map(len, rows), *[0] * idle])
        if tokens == 1:  # a decode program's inputs stay at their addresses
            self.token_ids.copy_(token_ids)
            self.span.starts.copy_(begins)
            self.span.counts.copy_(counts)
        else:
            device = self.token_ids.device
            self.token_ids = token_ids.to(device)
            self.span = Span(begins.to(device), counts.to(device))

    def feed(self, token_ids: Tensor) -> None:
        """Make `token_ids` [B] the next input; the previous input counts as cached from now on."""
        self.token_ids[:, 0].copy_(token_ids)
        self.span.starts.add_(self.span.counts)
