"""Choosing the next token from logits, on the device.

Legend: B batch, V vocab.

    penalty -> temperature -> top-k -> top-p -> min-p -> draw

Each sequence has a random generator of its own, so that its draws do not depend on the rest of the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

HIDDEN = float("-inf")


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters; the defaults are greedy, without cuts and without penalty.

    Attributes:
        temperature: float, divisor of the logits; 0 is greedy.
        top_k: int, number of the likeliest tokens that are kept; 0 is off.
        top_p: float, total probability of the likeliest tokens that are kept; 1 is off.
        min_p: float, least probability of a token that is kept, as a share of the likeliest token's; 0 is off.
        repetition_penalty: float, divisor of positive logits, and factor of negative ones, of tokens that were seen;
            1 is off.
        seed: int, seed of the random draws; prompt number i of a call draws with seed + i.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken: temperature 0 and no repetition penalty."""
        return self.temperature == 0.0 and self.repetition_penalty == 1.0


class Sampler:
    """Sampler of the sequences of one batch, with a record of the tokens that they have seen."""

    def __init__(self, params: SamplingParams, histories: Sequence[Sequence[int]], vocab: int, device: torch.device):
        self.params = params
        self.generators = [
            torch.Generator(device).manual_seed((params.seed + row) & ((1 << 63) - 1)) for row in range(len(histories))
        ]
        self.seen: Tensor | None = None
        if params.repetition_penalty != 1.0:
            self.seen = torch.zeros(len(histories), vocab, dtype=torch.bool, device=device)
            for row, history in enumerate(histories):
                self.seen[row, torch.tensor(list(history), dtype=torch.int64, device=device)] = True

    def choose(self, logits: Tensor) -> Tensor:
        """Return the next token of each sequence.

        Args:
            logits: [B, V] float32; not changed.

        Returns:
            [B] int64.
        """
        params = self.params
        if self.seen is not None:
            logits = torch.where(self.seen, penalise(logits, params.repetition_penalty), logits)
        if params.temperature == 0.0:
            chosen = logits.argmax(dim=-1)
        else:
            probabilities = narrow(logits / params.temperature, params).softmax(dim=-1)
            draws = [
                torch.multinomial(row, 1, generator=generator)
                for row, generator in zip(probabilities, self.generators, strict=True)
            ]
            chosen = torch.cat(draws)
        if self.seen is not None:
            self.seen.scatter_(1, chosen[:, None], True)
        return chosen


def penalise(logits: Tensor, penalty: float) -> Tensor:
    """Return the logits of seen tokens, lowered by a penalty above 1. Source: Keskar et al. 2019, section 4.1."""
    return torch.where(logits > 0, logits / penalty, logits * penalty)


def narrow(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return [B, V] logits, minus infinity for tokens that top-k, top-p and min-p cut; one token always stays."""
    if 0 < params.top_k < logits.shape[-1]:
        least = logits.topk(params.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, HIDDEN)
    if params.top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)  # of equal tokens the first
        probabilities = ordered.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities  # mass of the likelier tokens
        cut = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= params.top_p)
        logits = logits.masked_fill(cut, HIDDEN)
    if params.min_p > 0.0:
        probabilities = logits.softmax(dim=-1)
        least = params.min_p * probabilities.amax(dim=-1, keepdim=True)
        logits = logits.masked_fill(probabilities < least, HIDDEN)
    return logits
