"""Embeddings of prompts: hidden states of all tokens, or of the last one, in one vector.

Legend: T tokens, D model dim.
"""

import torch
from torch import Tensor

POOLINGS = ("mean", "last")
SLICE = 64  # tokens that are added at once


class Pooled:
    """The embedding of a prompt, from the normalised hidden states of its chunks.

    Args:
        pooling: "mean" of all tokens, or "last" token.
    """

    def __init__(self, pooling: str) -> None:
        self._pooling = pooling
        self._sum: Tensor | None = None
        self._tokens = 0

    def add(self, hidden: Tensor) -> None:
        """Add the normalised hidden states of further tokens, [T, D] float32."""
        if self._pooling == "last":
            self._sum, self._tokens = hidden[-1].double(), 1
            return
        for part in torch.split(hidden, SLICE):  # a sum in float64 copies what it adds
            found = part.sum(dim=0, dtype=torch.float64)
            self._sum = found if self._sum is None else self._sum + found
        self._tokens += len(hidden)

    def clear(self) -> None:
        """Forget all tokens, because the prompt runs from its beginning."""
        self._sum, self._tokens = None, 0

    def embedding(self, normalize: bool) -> Tensor:
        """Return the embedding, [D] float32 on the CPU; `normalize` scales it to length 1."""
        assert self._sum is not None, "the prompt has run"
        mean = self._sum / self._tokens
        length = torch.linalg.vector_norm(mean).clamp(min=1e-12)
        return (mean / length if normalize else mean).float().cpu()
