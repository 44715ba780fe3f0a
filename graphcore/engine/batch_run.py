"""The decode loop of one batch: prefill, then token by token until every request has ended."""

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from graphcore.engine.decoding import Decoding, DeviceDecoding, HostDecoding, Picked
from graphcore.engine.sampler import SamplingParams
from graphcore.engine.sequence import Generation, Timings, TokenEvent
from graphcore.engine.sequence import Sequence as Request
from graphcore.engine.token_runner import TokenRunner
from graphcore.engine.turns import Turn
from graphcore.errors import BusyError
from graphcore.progress import Progress, ignore_progress
from graphcore.streaming.watched import watched


class BatchRun:
    """Requests that run together; iterate `events` to make it happen, then read `generations`.

    Args:
        runner: whose caches' rows the requests take, in order.
        requests: at most the runner's batch size.
        params: of sampling.
        turn: to use the caches, from the first token to the last.
        wants_logprobs: record each new token's log probability.
        reuses_cache: go on from what row 0 of the cache holds where the prompt begins with it, and leave word of what
            it holds for the next run (one request only).
        on_progress: called in the stages "prefill" and "generate"; see `graphcore.progress`.

    Attributes:
        cached: int, tokens of the prompt that row 0 of the cache held already; 0 before the run has begun.
    """

    def __init__(
        self,
        runner: TokenRunner,
        requests: Sequence[Request],
        params: SamplingParams,
        turn: Turn,
        wants_logprobs: bool = False,
        reuses_cache: bool = False,
        on_progress: Progress = ignore_progress,
    ) -> None:
        self.runner = runner
        self.requests = requests
        self.wants_logprobs = wants_logprobs
        self.cached = 0
        self.on_progress = on_progress
        self.total = max(request.max_new_tokens for request in requests)
        self.params = params
        self.prefill_seconds = 0.0
        self.decode_seconds = 0.0
        self._turn = turn
        self._reuses_cache = reuses_cache and len(requests) == 1
        self._decoding: Decoding | None = None
        self._taken: list[list[int]] = []  # tokens of each step, of all requests

    @torch.inference_mode()
    def events(self) -> Generator[TokenEvent, None, None]:
        """Yield each new token as it is made, row by row within a step.

        The run waits for its turn first, and gives it back at its end, or when the iterator is closed or forgotten.

        Raises:
            BusyError: it would wait for itself; see `turns`.
            ConfigError: the engine was closed.
        """
        with self._turn:
            try:
                yield from self._events()
            except (GeneratorExit, KeyboardInterrupt):
                self._leave_word()
                raise
            self._leave_word()

    def _events(self) -> Iterator[TokenEvent]:
        began = time.perf_counter()
        with self._turn.step():
            self.runner.enter_thread()
            decoding = self._decoding = self._open()
            picked = self._prefill(decoding)
        self.prefill_seconds = time.perf_counter() - began
        yield from self._accept(picked)
        began = time.perf_counter()
        while any(request.finish_reason is None for request in self.requests):
            with self._turn.step():
                self.runner.enter_thread()
                while decoding.num_waiting <= decoding.lag and self._can_use(decoding.num_waiting):
                    policy = self.runner.policy
                    decoding.launch(watched(policy, self.on_progress, "generate", len(self._taken), self.total))
                picked = self._take(decoding)
            ended = time.perf_counter()
            self.decode_seconds += ended - began
            yield from self._accept(picked)
            # A device that runs ahead computes while the caller has the token, and that time is its own.
            began = ended if decoding.lag else time.perf_counter()

    def _prefill(self, decoding: Decoding) -> Picked:
        """Run the prompts, but for what the cache holds of them, and return the first tokens."""
        if self._reuses_cache:
            self.cached = self.runner.reusable(self.runner.held_ids, self.requests[0].prompt_ids)
        self.runner.forget()
        starts = [self.cached, *[0] * (len(self.requests) - 1)]
        rows = [request.prompt_ids[start:] for request, start in zip(self.requests, starts, strict=True)]
        decoding.first(self.runner.feed(rows, starts, self.on_progress))
        return self._take(decoding)

    def _open(self) -> Decoding:
        width = self.runner.width(len(self.requests))
        program = self.runner.choosing_program(width, self.params)
        if program is None:
            return HostDecoding(self.runner, self.requests, self.params, self.wants_logprobs)
        most = [self._most(request) for request in self.requests]
        end_ids = frozenset[int]().union(*(request.end_ids for request in self.requests))
        return DeviceDecoding(program, self.requests, self.params, most, end_ids, self.wants_logprobs)

    def _most(self, request: Request) -> int:
        """Return how many tokens a request may have in all: what was asked for, or until its cache is full."""
        return min(request.max_new_tokens, self.runner.context - len(request.prompt_ids) + 1)

    def _can_use(self, num_waiting: int) -> bool:
        """Return whether a request may still want a token beyond those that are under way."""
        running = (request for request in self.requests if request.finish_reason is None)
        return any(self._most(request) - len(request.token_ids) > num_waiting for request in running)

    def _take(self, decoding: Decoding) -> Picked:
        picked = decoding.take()
        self._taken.append(picked.token_ids)
        self.on_progress("generate", None, len(self._taken), self.total)
        return picked

    def _leave_word(self) -> None:
        """Tell the next run what row 0 of the cache holds: the prompt and each new token but the last, which never ran.

        A device may have run some after the one that ended the request; where a window has moved on with them, the
        keys before it are lost.
        """
        if not self._reuses_cache or not self._taken or self._turn.is_closed:
            return
        with self._turn.step():
            self.runner.enter_thread()
            while self._decoding is not None and self._decoding.num_waiting:
                self._taken.append(self._decoding.take().token_ids)
        chosen = [token_ids[0] for token_ids in self._taken if token_ids[0] >= 0]
        self.runner.held_ids = [*self.requests[0].prompt_ids, *chosen[:-1]]

    def interrupt(self) -> None:
        """End the requests that still run, keeping what they have."""
        for request in self.requests:
            if request.finish_reason is None:
                request.finish("interrupted")

    def generations(self) -> list[Generation]:
        """Return what each request gave; all must have ended."""
        return [self.generation(row) for row in range(len(self.requests))]

    def generation(self, row: int) -> Generation:
        """Return what one request gave, which must have ended; others may go on."""
        return self._generation(self.requests[row])

    def _accept(self, picked: Picked) -> Iterator[TokenEvent]:
        """Give each running request its token."""
        for row, request in enumerate(self.requests):
            if request.finish_reason is not None:
                continue
            token_id, logprob = picked.token_ids[row], picked.logprobs[row] if picked.logprobs is not None else None
            if logprob is not None:
                request.logprobs.append(logprob)
            used = len(request.prompt_ids) + len(request.token_ids) + 1
            text = request.push(token_id, is_context_full=used > self.runner.context)
            yield TokenEvent(row, token_id, text, logprob, request.finish_reason)

    def _generation(self, request: Request) -> Generation:
        assert request.finish_reason is not None, "a request has not ended"
        timings = Timings(
            first_token_seconds=self.prefill_seconds,
            prefill_seconds=self.prefill_seconds,
            decode_seconds=self.decode_seconds,
            prompt_tokens=len(request.prompt_ids),
            new_tokens=len(request.token_ids),
            batch=len(self.requests),
        )
        logprobs = tuple(request.logprobs) if self.wants_logprobs else None
        return Generation(request.text, tuple(request.token_ids), request.finish_reason, logprobs, timings)


class TokenStream(Generator[TokenEvent, None, None]):
    """The events of a run, one at a time; it ends with this object.

    Args:
        events: of the run.
    """

    def __init__(self, events: Generator[TokenEvent, None, None]) -> None:
        self._events = events

    def send(self, value: None) -> TokenEvent:
        """Return the next event."""
        with _pulled_once():
            return self._events.send(value)

    def throw(self, *error: Any) -> TokenEvent:
        """Raise an error where the run waits."""
        with _pulled_once():
            return self._events.throw(*error)

    def close(self) -> None:
        """End the run, and its turn."""
        with _pulled_once():
            self._events.close()


@contextmanager
def _pulled_once() -> Iterator[None]:
    """Raise BusyError where another thread is inside the generator, for which Python has a ValueError."""
    try:
        yield
    except ValueError as error:
        if str(error) != "generator already executing":
            raise
        raise BusyError(
            "another thread waits for this stream's next token; pull a stream from one thread at a time"
        ) from error
