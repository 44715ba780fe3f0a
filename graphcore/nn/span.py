"""The positions of one pass's tokens in their sequences.

Legend: B batch, T tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Span(NamedTuple):
    """The positions of the tokens that one pass adds to each sequence of the batch.

    Attributes:
        starts: [B] int64, number of tokens that the sequence's cache already holds.
        counts: [B] int64, number of real tokens among the pass's T; the rest is padding at the end.
    """

    starts: Tensor
    counts: Tensor

    def positions(self, tokens: int) -> Tensor:
        """Return each token's position in its sequence: [B, T] int64.

        Padding repeats the position of the last token, or 0 for an empty sequence, so that lookups in a full context
        stay within a table.
        """
        offsets = torch.arange(tokens, device=self.starts.device, dtype=torch.int64)
        last = self.counts - 1  # -1 for a sequence without tokens: the position before its start
        return (self.starts[:, None] + torch.minimum(offsets[None, :], last[:, None])).clamp(min=0)

    def is_real(self, tokens: int) -> Tensor:
        """Return which of the pass's tokens are real: [B, T] bool."""
        return torch.arange(tokens, device=self.counts.device, dtype=torch.int64)[None, :] < self.counts[:, None]
