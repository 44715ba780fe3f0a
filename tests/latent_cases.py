"""Passes of latent attention against a loop over positions in float64: rows of keys and values in one pool."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

HEADS, ROTATED, LATENT, PAGE, PAGES = 3, 8, 20, 4, 12
SCALE = 0.3


@dataclass
class LatentSequences:
    """Sequences whose rows grow pass by pass in a shuffled pool.

    Attributes:
        rows: float64 rows of each sequence so far, [L, R + C].
    """

    batch: int
    dtype: torch.dtype
    widths: tuple[int, int] = (ROTATED, LATENT)
    heads: int = HEADS
    rows: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.batch)
        width = sum(self.widths)
        self.rows = [torch.zeros(0, width, dtype=torch.float64) for _ in range(self.batch)]
        self.table = torch.randperm(self.batch * PAGES, generator=self.generator).int().view(self.batch, PAGES)
        self.pool = torch.full((self.table.numel(), 1, PAGE, width), torch.nan, dtype=self.dtype)
        self.values = torch.empty(self.table.numel(), 1, PAGE, 0, dtype=self.dtype)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def error(self, attend: Callable[..., Tensor], counts: Sequence[int], tokens: int) -> float:
        """Run a pass of `tokens`, of which `counts` are real; return the largest error of outputs."""
        rotated, latent = self.widths
        query = self._random(self.batch, tokens, self.heads, rotated + latent)
        key, value = self._random(self.batch, tokens, 1, rotated), self._random(self.batch, tokens, 1, latent)
        starts = torch.tensor([len(one) for one in self.rows])
        spans = self.table, starts, torch.tensor(counts), 0, SCALE
        found = attend(query, key, value, self.pool, self.values, *spans, values_from=rotated)
        assert found.shape == (self.batch, tokens, self.heads, latent)
        worst = 0.0
        for at, count in enumerate(counts):
            new = torch.cat((key, value), -1)[at, :count, 0].double()
            self.rows[at] = torch.cat((self.rows[at], new))
            for token in range(count):
                seen = self.rows[at][: int(starts[at]) + token + 1]
                weights = (query[at, token].double() @ seen.T * SCALE).softmax(-1)
                worst = max(worst, (found[at, token] - weights @ seen[:, rotated:]).abs().max().item())
            positions = torch.arange(len(self.rows[at]))
            stored = self.pool[self.table[at, positions // PAGE].long(), 0, positions % PAGE]
            assert torch.equal(stored.double(), self.rows[at])
        return worst
