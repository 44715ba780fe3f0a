"""Masks: which tokens may come next in an answer, computed beside the steps by threads of their own.

    token chosen -> begin(its id) -> forced() or take()        in a mask thread, while the next step runs
    step has run -> the mask's result, if it is there -> sampling
                    else the request sits out steps until it is; the others do not wait

Legend: V vocab.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from graphcore.engine.arguments import is_whole
from graphcore.errors import ConfigError

BITS = 32  # tokens in a word of a mask
MOST_THREADS = 64  # masks that may block at once; one that takes long then delays its own request alone

Allowed: TypeAlias = Tensor | np.ndarray | None
"""Tokens that may come next: [V] bool, or words of 32 tokens, [ceil(V / 32)] int32, bit i of word w being token
32 w + i, as llguidance and xgrammar write them (they may add a first dimension of 1, and words); None for all."""


@runtime_checkable
class TokenMask(Protocol):
    """The mask of one answer, such as a grammar; one thread at a time calls it, not always the same.

    A mask for several answers (n > 1) also has `copy()`, which returns one in the same state.
    """

    def begin(self, token_ids: Sequence[int]) -> None:
        """Take the tokens that the answer got since the last call; none in the first call."""

    def forced(self) -> Sequence[int]:
        """Return tokens that come next without a choice, often none; the next `begin` gets them."""

    def take(self) -> Allowed:
        """Return the tokens that may come next."""


MaskFunction: TypeAlias = Callable[[Sequence[int]], Allowed]
"""Function from all new tokens of an answer to the tokens that may come next."""

Mask: TypeAlias = TokenMask | MaskFunction


@dataclass
class FunctionMask:
    """The mask of a function that is called with all new tokens."""

    function: MaskFunction
    _token_ids: list[int] = field(default_factory=list)

    def begin(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        self._token_ids.extend(token_ids)

    def forced(self) -> Sequence[int]:
        """Return none: a function chooses nothing."""
        return ()

    def take(self) -> Allowed:
        """Call the function."""
        return self.function(tuple(self._token_ids))


@dataclass(frozen=True)
class NextTokens:
    """What a mask says of the next token.

    Attributes:
        forced: tokens that come next without a choice; none if one is to be sampled.
        allowed: [V] bool on the CPU, tokens that may be sampled; None for all.
    """

    forced: tuple[int, ...] = ()
    allowed: Tensor | None = None


class MaskThreads:
    """The threads of an engine's masks, started at the first use; they end when nothing refers to this object."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._process = os.getpid()
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], NextTokens]) -> "Future[NextTokens]":
        """Call a function in one of the threads."""
        with self._lock:
            if self._pool is None or self._process != os.getpid():  # a fork has no threads
                self._pool, self._process = ThreadPoolExecutor(MOST_THREADS, "graphcore-mask"), os.getpid()
            return self._pool.submit(work)


_inside = threading.local()


def mask_owner() -> object:
    """Return the owner of the mask that the calling thread is computing; None outside of masks."""
    return getattr(_inside, "owner", None)


class AnswerMask:
    """The mask of one answer while it is generated.

    Args:
        mask: the mask that the caller gave.
        vocab: number of tokens V.
        threads: threads that compute it.
        takes_forced: False to sample every token, so that each has a log probability.
    """

    def __init__(self, mask: Mask, vocab: int, threads: MaskThreads, takes_forced: bool = True) -> None:
        self._mask = mask if isinstance(mask, TokenMask) else FunctionMask(mask)
        self._vocab, self._threads, self._takes_forced = vocab, threads, takes_forced
        self._next: Future[NextTokens] | None = None
        self.owner: object = None

    def begin(self, token_ids: Sequence[int] = ()) -> None:
        """Start computing what comes after these tokens, which follow those of earlier calls."""
        ids = tuple(token_ids)
        self._next = self._threads.submit(lambda: self._after(ids))

    @property
    def future(self) -> "Future[NextTokens]":
        """The computation under way, or its result."""
        assert self._next is not None, "begin() comes first"
        return self._next

    def _after(self, token_ids: Sequence[int]) -> NextTokens:
        _inside.owner = self.owner
        try:
            self._mask.begin(token_ids)
            forced = [*self._mask.forced()] if self._takes_forced else []
            if forced:
                return NextTokens(checked_ids(forced, self._vocab))
            return NextTokens((), checked_mask(self._mask.take(), self._vocab))
        finally:
            _inside.owner = None


def masks_of(mask: object, answers: int, vocab: int, threads: MaskThreads, takes_forced: bool) -> list[AnswerMask]:
    """Return the masks of a request's answers.

    Raises:
        ConfigError: the mask is neither a function nor a `TokenMask`, or cannot be copied for several answers.
    """
    if not isinstance(mask, TokenMask) and not callable(mask):
        raise ConfigError(
            f"mask={mask!r:.40} must be a function of the new tokens, or an object with begin(), forced() and take()"
        )
    given = [cast("Mask", mask)] * answers
    if answers > 1 and isinstance(mask, TokenMask):
        copy = getattr(mask, "copy", None)
        if copy is None:
            raise ConfigError(f"mask: {answers} answers need a copy of it each; give it a method copy(), or set n=1")
        given = [mask, *(copy() for _ in range(answers - 1))]
    return [AnswerMask(each, vocab, threads, takes_forced) for each in given]


def checked_ids(token_ids: Sequence[object], vocab: int) -> tuple[int, ...]:
    """Return forced tokens.

    Raises:
        ConfigError: one of them is no token of the vocabulary.
    """
    for token_id in token_ids:
        if not is_whole(token_id) or not 0 <= int(token_id) < vocab:
            raise ConfigError(f"mask: forced() must return token ids below {vocab}, found {token_id!r:.40}")
    return tuple(int(cast("int", token_id)) for token_id in token_ids)


def checked_mask(allowed: object, vocab: int) -> Tensor | None:
    """Return a mask's result as [V] bool, or None to allow all tokens.

    Raises:
        ConfigError: the mask returned something else, or allows no token.
    """
    if allowed is None:
        return None
    found = torch.from_numpy(allowed) if isinstance(allowed, np.ndarray) else allowed
    if isinstance(found, Tensor) and found.dtype == torch.int32 and found.ndim and found.shape[-1] * BITS >= vocab:
        found = unpacked(found, vocab) if found.numel() == found.shape[-1] else found
    if not isinstance(found, Tensor) or found.dtype != torch.bool or found.shape != (vocab,):
        kind = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else type(allowed).__name__
        raise ConfigError(
            f"mask must return None, a torch.bool tensor of [{vocab}], or int32 words of [{-(-vocab // BITS)}], "
            f"found {kind}"
        )
    if not bool(found.any()):
        raise ConfigError("mask allows no token; allow at least the end token")
    return found


def unpacked(words: Tensor, vocab: int) -> Tensor:
    """Return words of 32 tokens, int32, as [V] bool."""
    raw = words.cpu().contiguous().numpy().view(np.uint8)
    return torch.from_numpy(np.unpackbits(raw, count=vocab, bitorder="little").view(np.bool_))
