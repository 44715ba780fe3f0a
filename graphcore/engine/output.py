"""The output of a request: its events, written by the engine's thread and read by any thread or asyncio task."""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from graphcore.errors import ConfigError, GraphError

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Event

LOG = logging.getLogger("graphcore")


@contextmanager
def interrupts_are_raised() -> Iterator[None]:
    """Raise the KeyboardInterrupt that the end of a `with` of a condition hides.

    If Ctrl-C comes when a wait has ended and the condition's lock is not held again yet, CPython raises RuntimeError,
    because the end of the `with` releases the lock.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise error.__context__ from None
        raise


@dataclass(frozen=True)
class Timings:
    """Times and token counts of a request.

    Attributes:
        first_token_seconds: float, seconds from the request's first pass to its first new token, without the time that
            it waited in the queue.
        prefill_seconds: float, the same number: the time of all passes over its prompt.
        decode_seconds: float, seconds from the first new token to the last.
        prompt_tokens: int, tokens of this request's prompt.
        new_tokens: int, tokens of this request's answer.
        batch: int, most requests that ran at once while this one ran.
        cached_tokens: int, tokens of the prompt that the KV cache held already, and that did not run.
        draft_tokens: int, draft tokens that decode steps checked; 0 without speculation.
        accepted_tokens: int, those of them that were the tokens chosen, and saved a step each.
    """

    first_token_seconds: float
    prefill_seconds: float
    decode_seconds: float
    prompt_tokens: int
    new_tokens: int
    batch: int
    cached_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens of this request that ran, divided by the seconds of prefill."""
        ran = self.prompt_tokens - self.cached_tokens
        return ran / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """New tokens of this request after the first, divided by the seconds of decode."""
        return (self.new_tokens - 1) / self.decode_seconds if self.decode_seconds else 0.0


class TokenLogprob(NamedTuple):
    """A token, and the natural logarithm of its probability before sampling parameters applied."""

    token_id: int
    logprob: float


@dataclass(frozen=True)
class PromptLogprob:
    """Log probabilities at one position of a prompt, given all tokens before it.

    Attributes:
        token_id: int, the prompt's token there.
        logprob: float, its log probability; None for the first token, which follows nothing.
        top: tuple of TokenLogprob, the likeliest tokens there, the likeliest first.
    """

    token_id: int
    logprob: float | None
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True)
class Generation:
    """The result of one request.

    Attributes:
        text: str, the new text, without stop strings and, unless asked for, special tokens; empty when there is no
            tokenizer.
        token_ids: tuple of int, the new tokens, including the end token if one ended the generation.
        finish_reason: str, "end" (an end-of-sequence token), "stop" (a stop string or a token of stop_token_ids),
            "length" (max_new_tokens), "context" (the cache is full), "repetition" (if detected), "deadline" or
            "interrupted".
        logprobs: tuple of float, the natural logarithm of each new token's probability before sampling parameters
            applied; None if not asked for.
        timings: Timings, seconds and token counts.
        top_logprobs: tuple of tuples of TokenLogprob, the likeliest tokens at each new token's place, the likeliest
            first; None if not asked for.
        prompt_logprobs: tuple of PromptLogprob, one for each token of the prompt; None if not asked for.
        stop_reason: str or int, the stop string or the token of stop_token_ids that ended the answer; else None.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[float, ...] | None
    timings: Timings
    top_logprobs: tuple[tuple[TokenLogprob, ...], ...] | None = None
    prompt_logprobs: tuple[PromptLogprob, ...] | None = None
    stop_reason: str | int | None = None


class TokenEvent(NamedTuple):
    """A new token of one request.

    Attributes:
        row: int, index of the request in the call.
        token_id: int, the token.
        text: str, the text that can be printed now; it may lag behind the tokens, as some spell a part of a character.
        logprob: float, as in `Generation.logprobs`; None if not asked for.
        finish_reason: str, as in `Generation.finish_reason`, on the request's last event; None before it.
        top_logprobs: tuple of TokenLogprob, as in `Generation.top_logprobs`; empty if not asked for.
    """

    row: int
    token_id: int
    text: str
    logprob: float | None
    finish_reason: str | None
    top_logprobs: tuple[TokenLogprob, ...] = ()


class Readers:
    """Set by a finalizer when the last reader is collected; finalizers must not take locks."""

    are_gone = False


class OutputStream:
    """The stream of a request's events, which grows until all its answers have ended.

    Args:
        answers: number of answers that write to it.

    Attributes:
        readers: flag that is set when no reader is left.
        before_waiting: function that a reader calls before it waits; raises if the wait would never end.
    """

    def __init__(self, answers: int = 1) -> None:
        self.readers = Readers()
        self.before_waiting: Callable[[], None] = no_objection
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._ended = threading.Condition(
            self._lock
        )  # separate, so that tokens do not wake threads that wait for the end
        self._num_waiting = 0  # readers that wait for the next event
        self._events: list[TokenEvent] = []
        self._running = answers
        self._error: BaseException | None = None
        self._wakers: list[Callable[[], None]] = []
        self._process = os.getpid()

    @property
    def has_ended(self) -> bool:
        """Whether no event will come any more."""
        return self._running == 0 or self._error is not None

    @property
    def has_failed(self) -> bool:
        """Whether an answer has ended with an error, which is then raised for readers of all answers."""
        return self._error is not None

    def put(self, event: TokenEvent) -> None:
        """Append an event."""
        with self._lock:
            self._events.append(event)
            wakers = self._woken()
        if wakers:
            call_all(wakers)

    def end_one(self) -> None:
        """Record that an answer has ended."""
        with self._lock:
            self._running -= 1
            wakers = self._woken()
        call_all(wakers)

    def fail(self, error: BaseException) -> None:
        """End the stream with an error, which readers get after the events so far."""
        with self._lock:
            self._error = self._error or error
            wakers = self._woken()
        call_all(wakers)

    def read(self, at: int, timeout: float | None = None) -> TokenEvent | None:
        """Return event number `at`, waiting for it; None if there will be no such event.

        Raises:
            TimeoutError: the event did not come within `timeout` seconds.
            BusyError: the event could never come while the caller waits.
        """
        self._refuse_forked()
        if not self.is_ready(at):
            self.before_waiting()
        with interrupts_are_raised(), self._changed:
            self._num_waiting += 1
            try:
                if not self._changed.wait_for(lambda: self.is_ready(at), timeout):
                    raise TimeoutError(f"no token within {timeout} s")
            finally:
                self._num_waiting -= 1
            if at < len(self._events):
                return self._events[at]
            if self._error is not None:
                raise self._error
            return None

    def read_ready(self, at: int) -> list[TokenEvent]:
        """Return the events from number `at` on, without waiting; none after the last. Errors are those of `read`."""
        self._refuse_forked()
        with self._lock:
            events = self._events[at:]
            if not events and self._error is not None:
                raise self._error
            return events

    def is_ready(self, at: int) -> bool:
        """Return whether reading event number `at` would not wait."""
        return at < len(self._events) or self.has_ended

    def wait_to_end(self, timeout: float | None = None) -> None:
        """Wait until all answers have ended.

        Raises:
            TimeoutError: the answers have not ended within `timeout` seconds.
            BusyError: the answers could never end while the caller waits.
        """
        self._refuse_forked()
        if not self.has_ended:
            self.before_waiting()
        with interrupts_are_raised(), self._ended:
            if not self._ended.wait_for(lambda: self.has_ended, timeout):
                raise TimeoutError(f"the answer was not complete within {timeout} s")
            if self._error is not None:
                raise self._error

    def call_at_change(self, waker: Callable[[], None]) -> None:
        """Call a function, once, at the next change, from the thread that makes it; its errors are only logged."""
        with self._lock:
            self._wakers.append(waker)

    def call_at_end(self, callback: Callable[[], None]) -> None:
        """Call a function once the stream has ended, from the thread that ends it, or now if it has.

        In the other thread its errors are only logged.
        """
        with self._lock:
            if not self.has_ended:
                self._wakers.append(lambda: self.call_at_end(callback))
                return
        flush_wakeups()
        callback()

    def _refuse_forked(self) -> None:
        if self._process != os.getpid():
            raise forked_error()

    def _woken(self) -> list[Callable[[], None]]:
        """Wake all readers and return what is to be called after the lock is free again."""
        if self._num_waiting:
            self._changed.notify_all()
        if self.has_ended:
            self._ended.notify_all()
        wakers = self._wakers
        if wakers:
            self._wakers = []
        return wakers


class OneWakeupPerLoop(threading.local):
    """A block in which each event loop is woken at most once, at its end, however many streams change inside it.

    Attributes:
        events: events of asyncio to set at the end of the thread's block, by event loop; None outside of blocks.
    """

    events: "dict[AbstractEventLoop, list[Event]] | None" = None

    def __enter__(self) -> None:
        """Begin to hold back the calling thread's wakeups."""
        self.events = {}

    def __exit__(self, *_: object) -> None:
        """Wake the event loops."""
        flush_wakeups()
        self.events = None


one_wakeup_per_loop = OneWakeupPerLoop()


def flush_wakeups() -> None:
    """Wake the event loops now whose wakeups the calling thread holds back; before it calls a function of a caller."""
    events = one_wakeup_per_loop.events
    if events:
        one_wakeup_per_loop.events = {}
        for loop, each in events.items():
            _set_in(loop, each)


def wake(loop: "AbstractEventLoop", event: "Event") -> None:
    """Set an event of an event loop from any thread, now or at the end of the thread's pass."""
    events = one_wakeup_per_loop.events
    if events is None:
        _set_in(loop, [event])
    else:
        events.setdefault(loop, []).append(event)


def _set_in(loop: "AbstractEventLoop", events: "Sequence[Event]") -> None:
    def set_all() -> None:
        for event in events:
            event.set()

    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(set_all)


def no_objection() -> None:
    """Let a reader wait."""


def call_all(wakers: Sequence[Callable[[], None]]) -> None:
    """Call all functions; an error in one, which belongs to a caller, does not stop the thread that computes."""
    for waker in wakers:
        try:
            waker()
        except BaseException:
            LOG.exception("a function that was to be called at the end of a request has failed")


def forked_error() -> GraphError:
    """Return the error of reading, in a forked process, what its parent computes."""
    return GraphError("this process was forked while its parent ran this request; submit it again here")


def closed_error() -> ConfigError:
    """Return the error of a call on a closed engine."""
    return ConfigError("this engine is closed; load it again")
