"""A request: its prompt, the tokens of its answer so far, its row of the KV cache, and its progress."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from graphcore.engine.masks import AnswerMask
from graphcore.engine.output import Generation, OutputStream, PromptLogprob, Timings, TokenEvent, TokenLogprob
from graphcore.engine.pooling import Pooled
from graphcore.kvcache.chunks import Chunks
from graphcore.sampling_params import SamplingParams
from graphcore.tokenizer.text_stream import IncrementalDecoder, StopCondition

REPEATED_TOKENS = 200
LONGEST_SPAN = 200


@dataclass(frozen=True)
class RequestStatus:
    """The progress of one request.

    Attributes:
        request_id: str, the id that was given to `submit`, or a number.
        state: str, "waiting" (not admitted yet), "swapped" (its cache is on the host), "prefill" or "decode".
        prompt_tokens: int, tokens of its prompt.
        cached_tokens: int, tokens of its prompt that the KV cache held already.
        computed_tokens: int, tokens of prompt and answer that have run.
        new_tokens: int, tokens of its answer so far.
        max_new_tokens: int, most tokens of its answer.
        pages: int, pages of the KV cache that it holds, shared ones included.
        shared_pages: int, those of them that other requests hold, too.
        waiting_seconds: float, seconds in the queue.
        prefill_seconds: float, seconds from its first pass to its first new token, or to now.
        decode_seconds: float, seconds since its first new token.
    """

    request_id: str
    state: str
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    new_tokens: int
    max_new_tokens: int
    pages: int
    shared_pages: int
    waiting_seconds: float
    prefill_seconds: float
    decode_seconds: float

    @property
    def is_running(self) -> bool:
        """Whether it has a row of the KV cache; False while it waits or is swapped out."""
        return self.state in ("prefill", "decode")


@dataclass
class TokenTotals:
    """Cumulative counters of an engine since it was loaded, updated by its thread.

    Attributes:
        requests: int, requests that were admitted to the KV cache.
        prompt_tokens: int, tokens of prompts that have run; one that was swapped out without a copy counts again.
        cached_tokens: int, tokens of prompts that did not run, because the KV cache held them.
        new_tokens: int, tokens of answers.
        draft_tokens: int, draft tokens that steps have checked; 0 without speculation.
        accepted_tokens: int, those of them that were the tokens chosen.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


def repeats(token_ids: Sequence[int]) -> bool:
    """Return whether the last REPEATED_TOKENS tokens only repeat a span of at most LONGEST_SPAN tokens before them.

    It looks at every sixteenth length alone, so that a token costs a few microseconds.
    """
    length = len(token_ids)
    if length % 16 or length <= REPEATED_TOKENS:
        return False
    last = token_ids[-REPEATED_TOKENS:]
    spans = range(1, min(LONGEST_SPAN, length - REPEATED_TOKENS) + 1)
    return any(
        last[-1] == token_ids[-1 - span] and last == token_ids[-REPEATED_TOKENS - span : -span] for span in spans
    )


@dataclass(eq=False)
class Request:
    """A prompt and its answer so far. A call that asks for n answers makes n requests, which write to one output.

    Only the engine's thread changes a request, except that any thread may call `end` or `fail`. The first end counts.

    Attributes:
        prompt_ids: token ids of the prompt.
        max_new_tokens: most tokens of the answer.
        end_ids: the model's token ids that end the answer; those of `params.stop_token_ids` end it, too.
        decoder: decoder of the answer's text; None without a tokenizer.
        stops: what ends the answer's text.
        params: sampling parameters, with the request's own seed.
        output: stream of the answer's events.
        row: index of this answer among those of its call.
        request_id: name of the request in its status.
        submitted: time.perf_counter() at which the request was made.
        wants_logprobs: True to record the log probability of each new token.
        num_top_logprobs: number of likeliest tokens that are recorded at each new token's place.
        num_prompt_logprobs: the same for each token of the prompt, whose own log probability is recorded, too; None
            records nothing of the prompt.
        pooled: the embedding of the prompt; such a request has no answer. None for others.
        mask: mask of the next tokens; None to allow all.
        deadline: time.perf_counter() at which the request ends; None for none.
        detects_repetition: True to end the answer when it `repeats`.
        speculates: True to check draft tokens beside the known ones, if the engine drafts; no token changes.
        dry_breakers: token ids that end a sequence for DRY; empty without DRY.
        reuses_cache: True to continue from the cached tokens of an ended request, too, those of its answer included.
        totals: the engine's cumulative counters, which the request updates.
        token_ids: token ids of the answer so far.
        logprobs: log probability of each of them, if they are recorded.
        pieces: text that could be printed after each of them, and the rest at the end.
        top_logprobs: likeliest tokens at the place of each of them, if they are recorded.
        prompt_logprobs: log probabilities of the prompt's tokens that have run, if they are recorded.
        finish_reason: reason of the end; None while the request waits or runs.
        stop_reason: stop string or stop token that ended the answer.
        cache_row: row of the KV cache; None while the request waits or is swapped out.
        num_computed: number of tokens of prompt and answer that the KV cache holds. On a GPU it counts tokens of steps
            that are in flight, too, so it may be ahead of the tokens that the host knows.
        cached: number of tokens of the prompt that the KV cache held already.
        has_begun: True if the request has run any token.
        is_bit_exact: True if what the KV cache holds of the prompt has the bits that it would have without other
            requests.
        batch: most requests that ran at once while this one ran, itself included.
        draft_tokens, accepted_tokens: draft tokens that were checked, and those that were right.
        ends_between_passes: True if whoever cancels it does so between two passes only: other processes run the same
            passes, and have to learn of it at the same point.
    """

    prompt_ids: Sequence[int]
    max_new_tokens: int
    end_ids: frozenset[int]
    decoder: IncrementalDecoder | None
    stops: StopCondition
    params: SamplingParams = field(default_factory=SamplingParams)
    output: OutputStream = field(default_factory=OutputStream)
    row: int = 0
    request_id: str = ""
    submitted: float = field(default_factory=time.perf_counter)
    wants_logprobs: bool = False
    num_top_logprobs: int = 0
    num_prompt_logprobs: int | None = None
    pooled: Pooled | None = None
    mask: AnswerMask | None = None
    deadline: float | None = None
    detects_repetition: bool = False
    speculates: bool = True
    reuses_cache: bool = False
    dry_breakers: frozenset[int] = frozenset()
    totals: TokenTotals = field(default_factory=TokenTotals)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[tuple[TokenLogprob, ...]] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    cache_row: int | None = None
    num_computed: int = 0
    cached: int = 0
    has_begun: bool = False
    is_bit_exact: bool = True
    batch: int = 1
    draft_tokens: int = 0
    accepted_tokens: int = 0
    ends_between_passes: bool = False
    _began: float | None = None
    _first: float | None = None
    _last: float | None = None
    _is_taking: bool = False
    _ends_soon: bool = False
    _ending: threading.RLock = field(default_factory=threading.RLock)

    @property
    def text(self) -> str:
        """The answer's text so far."""
        return "".join(self.pieces)

    @property
    def has_ended(self) -> bool:
        """Whether no token will come any more."""
        return self.finish_reason is not None

    @property
    def is_unwanted(self) -> bool:
        """Whether the request is to end before the next pass: abandoned, cancelled meanwhile, or its output failed."""
        return self._ends_soon or self.output.readers.are_gone or self.output.has_failed

    @property
    def reads_prompt(self) -> bool:
        """Whether it needs the hidden states of all tokens of its prompt: none may come from a cache."""
        return self.num_prompt_logprobs is not None or self.pooled is not None

    def reads_hidden(self, tokens: int) -> bool:
        """Whether it needs the hidden states of the next tokens; log probabilities do not need those of the last."""
        return self.pooled is not None or (
            self.num_prompt_logprobs is not None and self.num_computed + tokens < len(self.prompt_ids)
        )

    @cached_property
    def takes_likeliest(self) -> bool:
        """Whether it always takes the token of the largest logit, and needs nothing else of a step."""
        return self.params.is_greedy and not self.samples_on_host and not self.wants_logprobs

    @property
    def samples_on_host(self) -> bool:
        """Whether the host samples the tokens even where a device could: it needs all logits of a step."""
        return (
            self.mask is not None
            or self.num_top_logprobs > 0
            or self.params.changes_logits
            or self.params.min_tokens > 0
        )

    def status(self, pages: int, shared_pages: int) -> RequestStatus:
        """Return the request's progress; the page counts come from the page tables."""
        now = time.perf_counter()
        began, first = self._began or now, self._first or now
        seconds = began - self.submitted, first - began, now - first
        counts = len(self.prompt_ids), self.cached, self.num_computed, len(self.token_ids), self.max_new_tokens
        return RequestStatus(self.request_id, self._state, *counts, pages, shared_pages, *seconds)

    @property
    def _state(self) -> str:
        if self.cache_row is None:
            return "waiting" if self._began is None else "swapped"
        return "decode" if self.token_ids else "prefill"

    @property
    def own_row(self) -> int:
        """The row of the KV cache of a request that has one."""
        assert self.cache_row is not None, "a running request has a row"
        return self.cache_row

    @property
    def ids(self) -> list[int]:
        """The known tokens of prompt and answer."""
        return [*self.prompt_ids, *self.token_ids]

    @property
    def num_known(self) -> int:
        """Number of known tokens of prompt and answer."""
        return len(self.prompt_ids) + len(self.token_ids)

    @property
    def num_uncomputed(self) -> int:
        """Number of known tokens that the KV cache does not hold; 1 for a request that decodes."""
        return self.num_known - self.num_computed

    def is_known(self, position: int, token_id: int) -> bool:
        """Return whether the token at a position of prompt and answer is known, and this one."""
        at = position - len(self.prompt_ids)
        ids = self.prompt_ids if at < 0 else self.token_ids
        return position < self.num_known and ids[position if at < 0 else at] == token_id

    @property
    def is_in_prompt(self) -> bool:
        """Whether the next token to run is one of the prompt."""
        return self.num_computed < len(self.prompt_ids)

    def next_ids(self, chunks: Chunks, most: int = 1) -> list[int]:
        """Return the tokens of the next pass: a chunk of the prompt, or known tokens; none if the next is not known.

        Args:
            most: most tokens after the prompt.
        """
        begin, length = self.num_computed, len(self.prompt_ids)
        if begin < length:
            return list(self.prompt_ids[begin : chunks.end(begin, length)])
        return self.token_ids[begin - length :][:most]

    @property
    def next_id(self) -> int:
        """The first known token that the KV cache does not hold."""
        begin, length = self.num_computed, len(self.prompt_ids)
        return self.prompt_ids[begin] if begin < length else self.token_ids[begin - length]

    def begin(self, cache_row: int, cached: int, *, is_bit_exact: bool = True) -> None:
        """Take a row of the KV cache that holds the prompt's first `cached` tokens."""
        self.cache_row = cache_row
        self.use_cached(cached, is_bit_exact=is_bit_exact)
        self._began = time.perf_counter()
        self.totals.requests += 1

    def use_cached(self, cached: int, *, is_bit_exact: bool) -> None:
        """Continue after the prompt's first `cached` tokens, which the row holds now."""
        self.num_computed, self.cached, self.is_bit_exact = cached, cached, is_bit_exact

    def add_computed(self, count: int) -> None:
        """Count tokens that the KV cache holds, or will hold when the launched steps have run."""
        if self.is_in_prompt:  # no pass runs tokens of both
            self.totals.prompt_tokens += count
            if not self.has_begun:
                self.totals.cached_tokens += self.num_computed
        self.num_computed += count
        self.has_begun = True

    def add_drafted(self, drafted: int, accepted: int) -> None:
        """Count draft tokens that a step checks, and those that it has accepted."""
        for counted in (self, self.totals):
            counted.draft_tokens += drafted
            counted.accepted_tokens += accepted

    def take_back_computed(self) -> None:
        """Take back one counted token: the device had ended the row before the step, which wrote nothing."""
        self.num_computed -= 1

    def discard_computed(self) -> None:
        """Record that the KV cache holds nothing of the request that can be used."""
        self._run_again_from(0)

    def _run_again_from(self, num_computed: int) -> None:
        """Set the tokens that the KV cache holds; an embedding begins again if its prompt does."""
        self.num_computed = num_computed
        if self.pooled is not None and num_computed == 0:
            self.pooled.clear()

    def swap_out(self) -> None:
        """Give up the row of the KV cache until `swap_in`."""
        self.cache_row = None

    def swap_in(self, cache_row: int, num_computed: int) -> None:
        """Take a row of the KV cache again, which holds so many tokens."""
        self.cache_row = cache_row
        self._run_again_from(num_computed)
        self.has_begun = num_computed > 0 or bool(self.token_ids)  # else it may continue from the prefix cache

    def take(
        self, token_id: int, logprob: float | None, context: int, top_logprobs: tuple[TokenLogprob, ...] = ()
    ) -> None:
        """Append a sampled token and put its event into the output, unless the request has ended.

        Args:
            context: tokens that a row of the KV cache holds.
        """
        with self._ending:
            if self.finish_reason is not None:
                return
            if logprob is not None:
                self.logprobs.append(logprob)
            if self.num_top_logprobs:
                self.top_logprobs.append(top_logprobs)
            self._last = time.perf_counter()
            self._first = self._first or self._last
            used = len(self.prompt_ids) + len(self.token_ids) + 1
            self.totals.new_tokens += 1
            text, self._is_taking = "", True
            failure: Exception | None = None
            try:
                text = self.push(token_id, is_context_full=used > context)
            except Exception as error:  # noqa: BLE001  # the caller's `stop` may raise: it ends this request alone
                failure, self.finish_reason = error, "error"
            finally:
                self._is_taking = False
            event = TokenEvent(self.row, token_id, text, logprob, self.finish_reason, top_logprobs)
        if failure is not None:
            self.output.fail(failure)
            return
        self.output.put(event)
        if event.finish_reason is not None:
            self.output.end_one()

    def push(self, token_id: int, is_context_full: bool) -> str:
        """Append a token, set `finish_reason` if it ends the answer, and return the text that can be printed now."""
        self.token_ids.append(token_id)
        if token_id in self.end_ids:
            return self.finish("end")
        if token_id in self.params.stop_token_ids:
            self.stop_reason = token_id
            return self.finish("stop")
        self.stops.is_armed = len(self.token_ids) > self.params.min_tokens
        piece, is_stopped = self.stops.push(self.decoder.push(token_id) if self.decoder else "")
        self.pieces.append(piece)
        if is_stopped:
            self.finish_reason, self.stop_reason = "stop", self.stops.found
        elif len(self.token_ids) >= self.max_new_tokens:
            return piece + self.finish("length")
        elif is_context_full:
            return piece + self.finish("context")
        elif self.detects_repetition and repeats(self.token_ids):
            return piece + self.finish("repetition")
        return piece

    def finish(self, reason: str) -> str:
        """Set `finish_reason` and return the text that was held back."""
        self.finish_reason = reason
        held, is_stopped = self.stops.push(self.decoder.flush()) if self.decoder else ("", False)
        if is_stopped:
            self.finish_reason, self.stop_reason = "stop", self.stops.found
        else:
            held += self.stops.flush()
        self.pieces.append(held)
        return held

    def end(self, reason: str) -> None:
        """End the request for a reason and keep its tokens, unless it has ended.

        A finalizer or a signal handler may call it at any point of `take`; the request then ends after the token.
        """
        with self._ending:
            if self._is_taking:
                self._ends_soon = True
            if self.has_ended or self._is_taking:
                return
            failure: Exception | None = None
            try:
                self.finish(reason)
            except Exception as error:  # noqa: BLE001  # as in `take`
                failure, self.finish_reason = error, "error"
        if failure is None:
            self.output.end_one()
        else:
            self.output.fail(failure)

    def cancel(self) -> None:
        """End the request as interrupted, now or before the next pass; any thread may call it."""
        if self.ends_between_passes:
            self._ends_soon = True
        else:
            self.end("interrupted")

    def fail(self, error: BaseException) -> None:
        """End the request with an error, which is raised for its readers, unless it has ended."""
        with self._ending:
            if self.has_ended:
                return
            self.finish_reason = "error"
        self.output.fail(error)

    def generation(self) -> Generation:
        """Return the answer of a request that has ended."""
        assert self.finish_reason is not None, "the request has not ended"
        began, first, last = self._began or 0.0, self._first, self._last
        prefill = 0.0 if first is None else first - began
        decode = 0.0 if first is None or last is None else last - first
        counts = len(self.prompt_ids), len(self.token_ids)
        drafts = self.draft_tokens, self.accepted_tokens
        timings = Timings(prefill, prefill, decode, *counts, self.batch, self.cached, *drafts)
        logprobs = tuple(self.logprobs) if self.wants_logprobs else None
        top = tuple(self.top_logprobs) if self.num_top_logprobs else None
        of_prompt = None if self.num_prompt_logprobs is None else tuple(self.prompt_logprobs)
        ids, reason = tuple(self.token_ids), self.finish_reason
        return Generation(self.text, ids, reason, logprobs, timings, top, of_prompt, self.stop_reason)
