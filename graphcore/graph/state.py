"""The tensors that the steps of a program hand to one another.

Legend: B batch, T tokens, D model dim, E head dim, V vocab.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from graphcore.nn.span import Span


@dataclass
class StepState:
    """What flows through a program.

    A decode program's inputs (`token_ids`, `span`) stay at one address for its whole life, because a captured graph
    reads them there; a prefill program gets new ones for every chunk.

    Attributes:
        token_ids: [B, T] int64.
        span: where the tokens stand in their sequences.
        ropes: one [B, T, 2, E/2] float32 per rope table.
        hidden: [B, T, D] residual stream.
        logits: [B, V] float32, after each sequence's last real token.
        chosen: [B] int64, the tokens that a greedy program chose.
    """

    token_ids: Tensor
    span: Span
    ropes: tuple[Tensor, ...]
    hidden: Tensor
    logits: Tensor
    chosen: Tensor

    @classmethod
    def empty(cls, batch: int, tokens: int, device: torch.device) -> "StepState":
        """Return a state whose inputs are zero and whose outputs are not there yet."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        nothing = torch.empty(0, device=device)
        return cls(zeros(batch, tokens), Span(zeros(batch), zeros(batch)), (), nothing, nothing, zeros(batch))

    def feed(self, token_ids: Tensor) -> None:
        """Make `token_ids` [B] the next input: what was just run is now in the cache."""
        self.token_ids[:, 0].copy_(token_ids)
        self.span.starts.add_(self.span.counts)
