"""Masks of tests: a small grammar over token ids, given in each form that `Engine.submit` takes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from graphcore.engine.masks import Allowed


def allowed_after(token_ids: Sequence[int], vocab: int) -> Tensor:
    """Return what a grammar allows: after a token t those that are t + 1, t + 2 or a multiple of 7, modulo V."""
    last = token_ids[-1] if token_ids else 3
    ids = torch.arange(vocab)
    return (ids == (last + 1) % vocab) | (ids == (last + 2) % vocab) | (ids % 7 == 0)


def words_of(allowed: Tensor) -> np.ndarray:
    """Return [V] bool as words of 32 tokens."""
    padded = np.zeros(-(-len(allowed) // 32) * 32, dtype=np.uint8)
    padded[: len(allowed)] = allowed.numpy()
    return np.packbits(padded, bitorder="little").view(np.int32)


@dataclass
class Grammar:
    """The grammar as an object, which notes how it was called.

    Attributes:
        forced_after: tokens that follow a token without a choice.
        seconds: what each call takes.
    """

    vocab: int
    forced_after: dict[int, tuple[int, ...]] = field(default_factory=dict)
    seconds: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)

    def begin(self, token_ids: Sequence[int]) -> None:
        self.token_ids += token_ids
        self.calls.append("begin")
        time.sleep(self.seconds)

    def forced(self) -> Sequence[int]:
        self.calls.append("forced")
        return self.forced_after.get(self.token_ids[-1], ()) if self.token_ids else ()

    def take(self) -> Allowed:
        self.calls.append("take")
        return words_of(allowed_after(self.token_ids, self.vocab))

    def copy(self) -> "Grammar":
        return Grammar(self.vocab, self.forced_after, self.seconds, [*self.token_ids])
