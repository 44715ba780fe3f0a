"""One sequence while it runs: a request, the row of the caches that it has, and how far it is."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from graphcore.engine.output import Generation, OutputStream, Timings, TokenEvent
from graphcore.errors import ConfigError
from graphcore.sampling_params import SamplingParams
from graphcore.tokenizer.text_stream import IncrementalDecoder, StopStrings
from graphcore.tokenizer.tokenizer import Tokenizer

Mask = Callable[[Sequence[int]], Tensor | None]
"""Function from a request's new tokens so far to the tokens that may come next, [V] bool; None allows all."""


@dataclass(frozen=True)
class RequestStatus:
    """How far one sequence is.

    Attributes:
        is_running: bool, whether it has a place in the caches; False while it waits.
        prompt_tokens: int, tokens of its prompt.
        fed_tokens: int, tokens of prompt and answer that have run.
        new_tokens: int, tokens of its answer so far.
        max_new_tokens: int, most tokens of its answer.
    """

    is_running: bool
    prompt_tokens: int
    fed_tokens: int
    new_tokens: int
    max_new_tokens: int


@dataclass
class RunningRequest:
    """A request with its new tokens so far; it decides when it has ended."""

    prompt_ids: Sequence[int]
    max_new_tokens: int
    end_ids: frozenset[int]
    decoder: IncrementalDecoder | None
    stops: StopStrings
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.pieces)

    def push(self, token_id: int, is_context_full: bool) -> str:
        """Append a new token, set `finish_reason` if it ends the request, and return the text that is now certain."""
        self.token_ids.append(token_id)
        if token_id in self.end_ids:
            return self.finish("end")
        piece, is_stopped = self.stops.push(self.decoder.push(token_id)) if self.decoder else ("", False)
        self.pieces.append(piece)
        if is_stopped:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.max_new_tokens:
            return piece + self.finish("length")
        elif is_context_full:
            return piece + self.finish("context")
        return piece

    def finish(self, reason: str) -> str:
        """End the request for a reason and return the text that was held back."""
        self.finish_reason = reason
        held, is_stopped = self.stops.push(self.decoder.flush()) if self.decoder else ("", False)
        if is_stopped:
            self.finish_reason = "stop"
        else:
            held += self.stops.flush()
        self.pieces.append(held)
        return held


def request_of(
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    end_ids: frozenset[int],
    tokenizer: Tokenizer | None,
    stops: Sequence[str],
) -> RunningRequest:
    """Return a request without new tokens.

    Args:
        stops: texts that end the request.

    Raises:
        ConfigError: there are stop texts and no tokenizer to find them with.
    """
    if stops and tokenizer is None:
        raise ConfigError("stop needs a tokenizer, and the checkpoint has none; leave stop out")
    decoder = IncrementalDecoder(tokenizer) if tokenizer else None
    return RunningRequest(prompt_ids, max_new_tokens, end_ids, decoder, StopStrings(stops))


@dataclass(eq=False)
class TokenSequence:
    """A request with its place in the caches.

    The thread that computes owns everything but the end: `end` may be called from any thread, and only the first call
    counts.

    Attributes:
        params: sampling parameters, with the sequence's own seed.
        feed: where its events go.
        row: number of this answer among those of its call.
        mask: function from the new tokens so far to those that may come next; None for none.
        deadline: time.perf_counter() at which it ends; None for none.
        reuses_cache: True to skip the beginning of the prompt that an ended sequence left in the caches.
        cache_row: row of the caches; None while it waits or is put aside.
        fed: tokens that the caches hold.
        cached: tokens of the prompt that the caches held already.
        has_begun: whether it has run any token.
        is_as_alone: whether what the caches hold of its prompt has the bits that it would have without other requests.
        beside: most sequences that ran at once while it ran, itself included.
    """

    request: RunningRequest
    params: SamplingParams
    feed: OutputStream
    row: int = 0
    wants_logprobs: bool = False
    mask: Mask | None = None
    deadline: float | None = None
    reuses_cache: bool = False
    cache_row: int | None = None
    fed: int = 0
    cached: int = 0
    has_begun: bool = False
    is_as_alone: bool = True
    beside: int = 1
    _began: float | None = None
    _first: float | None = None
    _last: float | None = None
    _is_taking: bool = False
    _ends_soon: bool = False
    _ending: threading.RLock = field(default_factory=threading.RLock)

    @property
    def has_ended(self) -> bool:
        """Whether no token will come any more."""
        return self.request.finish_reason is not None

    @property
    def is_unwanted(self) -> bool:
        """Whether nobody wants another token, so that it is to end before the next pass."""
        return self._ends_soon or self.feed.readers.are_gone or self.feed.has_failed

    @property
    def status(self) -> RequestStatus:
        """How far it is."""
        request = self.request
        counts = len(request.prompt_ids), self.fed, len(request.token_ids), request.max_new_tokens
        return RequestStatus(self.cache_row is not None, *counts)

    @property
    def own_row(self) -> int:
        """The row of the caches of a sequence that has one."""
        assert self.cache_row is not None, "a running sequence has a row"
        return self.cache_row

    @property
    def ids(self) -> list[int]:
        """The tokens of prompt and answer."""
        return [*self.request.prompt_ids, *self.request.token_ids]

    @property
    def to_feed(self) -> int:
        """Tokens that are known and not in the caches yet; 1 for a sequence that decodes."""
        return len(self.request.prompt_ids) + len(self.request.token_ids) - self.fed

    def next_ids(self, most: int) -> list[int]:
        """Return the next tokens for the caches, at most `most`."""
        prompt = self.request.prompt_ids
        if self.fed < len(prompt):
            return list(prompt[self.fed : self.fed + most])
        return self.request.token_ids[self.fed - len(prompt) :][:most]

    def begin(self, cache_row: int, cached: int, *, is_as_alone: bool = True) -> None:
        """Take a row of the caches that holds the prompt's first `cached` tokens."""
        self.cache_row = cache_row
        self.use_cached(cached, is_as_alone=is_as_alone)
        self._began = time.perf_counter()

    def use_cached(self, cached: int, *, is_as_alone: bool) -> None:
        """Go on after the prompt's first `cached` tokens, which its row holds now."""
        self.fed, self.cached, self.is_as_alone = cached, cached, is_as_alone

    def go_aside(self) -> None:
        """Give up the row of the caches for a while."""
        self.cache_row = None

    def come_back(self, cache_row: int, fed: int) -> None:
        """Take a row again, which holds so many tokens."""
        self.cache_row, self.fed = cache_row, fed
        self.has_begun = fed > 0 or bool(self.request.token_ids)  # else it may go on from what others computed

    def take(self, token_id: int, logprob: float | None, context: int) -> None:
        """Append a chosen token and tell whoever listens; a sequence that has ended takes none.

        Args:
            context: tokens that a row of the caches holds.
        """
        with self._ending:
            request = self.request
            if request.finish_reason is not None:
                return
            if logprob is not None:
                request.logprobs.append(logprob)
            self._last = time.perf_counter()
            self._first = self._first or self._last
            used = len(request.prompt_ids) + len(request.token_ids) + 1
            self._is_taking = True
            try:
                text = request.push(token_id, is_context_full=used > context)
            finally:
                self._is_taking = False
            event = TokenEvent(self.row, token_id, text, logprob, request.finish_reason)
        self.feed.put(event)
        if event.finish_reason is not None:
            self.feed.end_one()

    def end(self, reason: str) -> None:
        """End the sequence for a reason, with the tokens that it has, unless it has ended.

        A finalizer or a signal handler may call it at any point of `take`; the sequence then ends after the token.
        """
        with self._ending:
            if self._is_taking:
                self._ends_soon = True
            if self.has_ended or self._is_taking:
                return
            self.request.finish(reason)
        self.feed.end_one()

    def fail(self, error: BaseException) -> None:
        """End the sequence with an error that its reader gets, unless it has ended."""
        with self._ending:
            if self.has_ended:
                return
            self.request.finish_reason = "error"
        self.feed.fail(error)

    def generation(self) -> Generation:
        """Return the answer of a sequence that has ended."""
        request = self.request
        assert request.finish_reason is not None, "the sequence has not ended"
        began, first, last = self._began or 0.0, self._first, self._last
        prefill = 0.0 if first is None else first - began
        decode = 0.0 if first is None or last is None else last - first
        counts = len(request.prompt_ids), len(request.token_ids)
        timings = Timings(prefill, prefill, decode, *counts, self.beside, self.cached)
        logprobs = tuple(request.logprobs) if self.wants_logprobs else None
        return Generation(request.text, tuple(request.token_ids), request.finish_reason, logprobs, timings)
