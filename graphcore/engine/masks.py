"""Masks: which tokens may come next in an answer, computed beside the steps by threads of their own.

    token chosen -> begin(its id) -> forced() or take()        in a mask thread, while the next step runs
    step has run -> the mask's result, if it is there -> sampling
                    else the request sits out steps until it is; the others do not wait

Legend: V vocab.
"""

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from graphcore.engine.arguments import is_whole
from graphcore.engine.output import closed_error
from graphcore.errors import BusyError, ConfigError, ThreadLimitError
from graphcore.threads import start_thread

BITS = 32  # tokens in a word of a mask
LINGER = 2.0  # seconds that a thread waits for more work before it ends
MOST_THREADS = 64  # masks that may block at once; one that takes long then delays its own request alone
MOST_LOST = 64  # threads more, of masks that were given up and have not returned; Python cannot end a thread
LONGEST_MASK = 60.0  # seconds that a mask may take; a grammar's limits end it long before

Allowed: TypeAlias = Tensor | np.ndarray | None
"""Tokens that may come next: [V] bool, or words of 32 tokens, [ceil(V / 32)] int32, bit i of word w being token
32 w + i, as llguidance and xgrammar write them (they may add a first dimension of 1, and words); None for all."""


@runtime_checkable
class TokenMask(Protocol):
    """The mask of one answer, such as a grammar; one thread at a time calls it, not always the same.

    If it also has `copy()`, which returns one in the same state, each answer gets a copy, so it can be used again.
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
    """The threads of an engine's masks: started when there is work, ended when there has been none for a while.

    They are daemon threads, so that a mask that never returns keeps no process alive. Masks of answers that are under
    way go before the first masks of answers that are still to begin.

    A mask that takes longer than LONGEST_MASK ends its request (`RequestQueue.end_overdue`), and is given up: its
    thread is lost, and another one takes its place. With MOST_LOST lost ones no further mask is taken until one
    returns, so there are never more than MOST_THREADS + MOST_LOST threads.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._changed = threading.Condition(threading.RLock())  # a signal handler may submit
        self._next: deque[tuple[Future[NextTokens], Callable[[], NextTokens]]] = deque()
        self._first: deque[tuple[Future[NextTokens], Callable[[], NextTokens]]] = deque()
        self._num_idle = self._num_threads = 0  # the lost ones are not counted
        self._lost: set[Future[NextTokens]] = set()  # given up, and still computed
        self._is_closed = False
        self._process = os.getpid()

    def submit(self, work: Callable[[], NextTokens], is_first: bool) -> "Future[NextTokens]":
        """Call a function in one of the threads.

        Args:
            is_first: True for the first mask of an answer.

        Raises:
            BusyError: too many earlier masks have not returned.
            ThreadLimitError: no thread can be started.
        """
        future: Future[NextTokens] = Future()
        if self._process != os.getpid():  # a fork has no threads
            self._reset()
        with self._changed:
            if self._is_closed:  # no thread takes work any more
                future.set_exception(closed_error())
                return future
            if len(self._lost) >= MOST_LOST:
                raise lost_error(len(self._lost))
            self._add_threads(1)
            (self._first if is_first else self._next).append((future, work))
            self._changed.notify()
        return future

    def _add_threads(self, more: int) -> None:
        """Start a thread if none is free for the work that waits and for `more`; the lock is held."""
        waiting, most = len(self._next) + len(self._first) + more, MOST_THREADS + MOST_LOST - len(self._lost)
        if self._num_idle < waiting and self._num_threads < min(MOST_THREADS, most):
            start_thread(self._work, "graphcore-mask")
            self._num_threads += 1

    def close(self) -> None:
        """End the threads that compute nothing, and drop the work that none has begun."""
        with self._changed:
            self._is_closed = True
            for future, _ in (*self._next, *self._first):
                future.cancel()
            self._next.clear()
            self._first.clear()
            self._changed.notify_all()

    def abandon(self, future: "Future[NextTokens]") -> None:
        """Give up a result that nobody needs; if a thread still computes it, another one takes its place."""
        if future.cancel() or future.done():
            return
        with self._changed:
            if future.done() or future in self._lost:
                return
            self._lost.add(future)
            self._num_threads -= 1
            future.add_done_callback(self._count_again)
            failure: Exception = lost_error(len(self._lost))
            try:
                self._add_threads(0)
            except ThreadLimitError as error:
                failure = error
            while self._num_threads == 0 and (waiting := self._next or self._first):
                dropped, _ = waiting.popleft()
                if dropped.set_running_or_notify_cancel():  # it may have been given up while it waited
                    dropped.set_exception(failure)

    def _count_again(self, future: "Future[NextTokens]") -> None:
        with self._changed:
            if future in self._lost:  # else this is a fork
                self._lost.remove(future)
                self._num_threads += 1

    def _work(self) -> None:
        _inside.owner = self
        while (item := self._take()) is not None:
            future, work = item
            if future.set_running_or_notify_cancel():
                try:
                    found = work()
                except StopIteration as error:  # would end a generator that reads the answer
                    future.set_exception(RuntimeError(f"a mask raised {error!r}"))
                except BaseException as error:  # noqa: BLE001  # raised where the mask is needed
                    future.set_exception(error)
                else:
                    future.set_result(found)
            del item, future, work

    def _take(self) -> tuple["Future[NextTokens]", Callable[[], NextTokens]] | None:
        """Wait for work; None if the thread is to end."""
        with self._changed:
            self._num_idle += 1
            try:
                has_work = self._changed.wait_for(lambda: self._next or self._first or self._is_closed, LINGER)
                if not has_work or self._is_closed:
                    self._num_threads -= 1
                    return None
                return (self._next or self._first).popleft()
            finally:
                self._num_idle -= 1


_inside = threading.local()


def mask_owner() -> object:
    """Return the `MaskThreads` to which the calling thread belongs; None for other threads."""
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
        self._since = math.inf  # time.monotonic() at which a thread began the last computation

    def begin(self, token_ids: Sequence[int] = ()) -> None:
        """Start computing what comes after these tokens, which follow those of earlier calls.

        Raises:
            BusyError: too many earlier masks have not returned.
            ThreadLimitError: no thread can be started.
        """
        ids, self._since = tuple(token_ids), math.inf
        self._next = self._threads.submit(lambda: self._after(ids), is_first=self._next is None)

    @property
    def future(self) -> "Future[NextTokens]":
        """The computation under way, or its result."""
        assert self._next is not None, "begin() comes first"
        return self._next

    def abandon(self) -> None:
        """Give up the computation under way: the answer has ended."""
        if self._next is not None:
            self._threads.abandon(self._next)

    @property
    def is_overdue(self) -> bool:
        """Whether a thread has computed for longer than LONGEST_MASK; the time before it began does not count."""
        return self._next is not None and not self._next.done() and time.monotonic() - self._since > LONGEST_MASK

    def _after(self, token_ids: Sequence[int]) -> NextTokens:
        self._since = time.monotonic()
        self._mask.begin(token_ids)
        forced = [*self._mask.forced()] if self._takes_forced else []
        if forced:
            return NextTokens(checked_ids(forced, self._vocab))
        return NextTokens((), checked_mask(self._mask.take(), self._vocab))


def lost_error(count: int) -> BusyError:
    """Return the error of a mask for which no thread is left."""
    return BusyError(
        f"{count} masks of ended requests have not returned, so no other one can begin; each must return within "
        f"{LONGEST_MASK:g} s"
    )


def overdue_error() -> ConfigError:
    """Return the error of a request whose mask takes too long."""
    return ConfigError(f"mask has not returned for {LONGEST_MASK:g} s; each call must return, or allow all tokens")


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
    copy = getattr(mask, "copy", None) if isinstance(mask, TokenMask) else None
    if copy is not None:  # the caller may submit it again
        given = [copy() for _ in range(answers)]
    elif answers > 1 and isinstance(mask, TokenMask):
        raise ConfigError(f"mask: {answers} answers need a copy of it each; give it a method copy(), or set n=1")
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
    found = torch.from_numpy(np.array(allowed)) if isinstance(allowed, np.ndarray) else allowed
    if isinstance(found, Tensor) and found.dtype == torch.int32 and found.ndim:
        words = found.shape[-1]
        if words * BITS >= vocab > words and found.numel() == words:
            found = unpacked(found, vocab)
    if not isinstance(found, Tensor) or found.dtype != torch.bool or found.shape != (vocab,):
        kind = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else type(allowed).__name__
        raise ConfigError(
            f"mask must return None, a torch.bool tensor of [{vocab}], or int32 words of [{-(-vocab // BITS)}], "
            f"found {kind}"
        )
    if not bool(found.any()):
        raise ConfigError("mask allows no token; allow at least the end token")
    return found.contiguous()


def unpacked(words: Tensor, vocab: int) -> Tensor:
    """Return words of 32 tokens, int32, as [V] bool."""
    raw = words.cpu().contiguous().numpy().view(np.uint8)
    return torch.from_numpy(np.unpackbits(raw, count=vocab, bitorder="little").view(np.bool_))
