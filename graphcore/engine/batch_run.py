"""The decode loop of one batch: prefill, then token by token until every request has ended."""

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from graphcore.engine.decode_steps import Decoding, DeviceDecoding, HostDecoding, Picked
from graphcore.engine.model_runner import ModelRunner
from graphcore.engine.running_request import Generation, RunningRequest, Timings, TokenEvent
from graphcore.engine.sampler import SamplingParams
from graphcore.engine.turns import Turn
from graphcore.errors import BusyError
from graphcore.progress import Progress, ignore_progress
from graphcore.streaming.policy import watched


class BatchRun:
    """A batch of requests that run together: iterate `events` to run them, then read `generations`.

    Args:
        runner: the model; request i takes row i of its caches.
        requests: at least one request, at most the runner's batch size.
        params: sampling parameters.
        turn: the run's turn with the caches, held from the first token to the last.
        wants_logprobs: True records each new token's log probability.
        reuses_cache: True keeps the tokens in row 0 of the cache where the prompt begins with them, and records for
            the next run which tokens row 0 then holds (one request only).
        on_progress: callback of the stages "prefill" and "generate"; see `graphcore.progress`.

    Attributes:
        cached: int, tokens of the prompt that row 0 of the cache already held; 0 before the run has begun.
    """

    def __init__(
        self,
        runner: ModelRunner,
        requests: Sequence[RunningRequest],
        params: SamplingParams,
        turn: Turn,
        wants_logprobs: bool = False,
        reuses_cache: bool = False,
        on_progress: Progress = ignore_progress,
    ) -> None:
        self._runner = runner
        self._requests = requests
        self._wants_logprobs = wants_logprobs
        self.cached = 0
        self._on_progress = on_progress
        self._total = max(request.max_new_tokens for request in requests)
        self._params = params
        self._prefill_seconds = 0.0
        self._decode_seconds = 0.0
        self._turn = turn
        self._reuses_cache = reuses_cache and len(requests) == 1
        self._decoding: Decoding | None = None
        self._taken: list[list[int]] = []  # tokens of each step, of all requests

    @torch.inference_mode()
    def events(self) -> Generator[TokenEvent, None, None]:
        """Yield each new token as it is made, row by row within a step.

        The run first waits for its turn. The turn ends with the run, or when the iterator is closed or collected.

        Raises:
            BusyError: the run would wait for itself; see `turns`.
            ConfigError: the engine was closed.
        """
        with self._turn:
            try:
                began = time.perf_counter()
                with self._turn.step():
                    self._runner.enter_thread()
                    decoding = self._decoding = self._open()
                    rows, starts = self._uncached()
                    decoding.first(self._runner.feed(rows, starts, self._on_progress))
                    picked = self._take(decoding)
                self._prefill_seconds = time.perf_counter() - began
                yield from self._accept(picked)
                began = time.perf_counter()
                while any(request.finish_reason is None for request in self._requests):
                    with self._turn.step():
                        self._runner.enter_thread()
                        self._launch_steps(decoding)
                        picked = self._take(decoding)
                    ended = time.perf_counter()
                    self._decode_seconds += ended - began
                    yield from self._accept(picked)
                    # A device that runs ahead computes while the caller handles the token, so that time counts.
                    began = ended if decoding.lag else time.perf_counter()
            except (GeneratorExit, KeyboardInterrupt):
                self._leave_word()
                raise
            self._leave_word()

    def _uncached(self) -> tuple[list[Sequence[int]], list[int]]:
        """Return the part of each prompt that has to run, and the number of cached tokens before that part."""
        if self._reuses_cache:
            self.cached = self._runner.reusable(self._runner.held_ids, self._requests[0].prompt_ids)
        self._runner.forget()
        starts = [self.cached, *[0] * (len(self._requests) - 1)]
        return [request.prompt_ids[start:] for request, start in zip(self._requests, starts, strict=True)], starts

    def _launch_steps(self, decoding: Decoding) -> None:
        """Launch steps until the device is `lag` steps ahead or no request can use another token."""
        while decoding.num_waiting <= decoding.lag and self._can_use(decoding.num_waiting):
            policy = self._runner.policy
            decoding.launch(watched(policy, self._on_progress, "generate", len(self._taken), self._total))

    def _open(self) -> Decoding:
        width = self._runner.width(len(self._requests))
        program = self._runner.choosing_program(width, self._params)
        if program is None:
            return HostDecoding(self._runner, self._requests, self._params, self._wants_logprobs)
        most = [self._most(request) for request in self._requests]
        return DeviceDecoding(program, self._requests, self._params, most, self._wants_logprobs)

    def _most(self, request: RunningRequest) -> int:
        """Return the largest number of new tokens of a request: its limit, or fewer if its cache is full earlier."""
        return min(request.max_new_tokens, self._runner.sizes.context - len(request.prompt_ids) + 1)

    def _can_use(self, num_waiting: int) -> bool:
        """Return whether a request may still need a token beyond the `num_waiting` steps already launched."""
        running = (request for request in self._requests if request.finish_reason is None)
        return any(self._most(request) - len(request.token_ids) > num_waiting for request in running)

    def _take(self, decoding: Decoding) -> Picked:
        picked = decoding.take()
        self._taken.append(picked.token_ids)
        self._on_progress("generate", None, len(self._taken), self._total)
        return picked

    def _leave_word(self) -> None:
        """Record for the next run which tokens row 0 of the cache holds: the prompt and all new tokens but the last.

        The last token never ran. A device may have run more tokens after the one that ended the request; they count
        too, because a ring cache has overwritten older keys with theirs.
        """
        if not self._reuses_cache or not self._taken or self._turn.is_closed:
            return
        with self._turn.step():
            self._runner.enter_thread()
            while self._decoding is not None and self._decoding.num_waiting:
                self._taken.append(self._decoding.take().token_ids)
        chosen = [token_ids[0] for token_ids in self._taken if token_ids[0] >= 0]
        self._runner.held_ids = [*self._requests[0].prompt_ids, *chosen[:-1]]

    def run_to_end(self) -> list[Generation]:
        """Run until every request has ended and return their generations."""
        for _ in self.events():
            continue
        return self.generations()

    def interrupt(self) -> None:
        """End the requests that still run; they keep the tokens that they have."""
        for request in self._requests:
            if request.finish_reason is None:
                request.finish("interrupted")

    def generations(self) -> list[Generation]:
        """Return the generation of each request; all must have ended."""
        return [self.generation(row) for row in range(len(self._requests))]

    def generation(self, row: int) -> Generation:
        """Return the generation of one request, which must have ended; others may still run."""
        request = self._requests[row]
        assert request.finish_reason is not None, "a request has not ended"
        timings = Timings(
            first_token_seconds=self._prefill_seconds,
            prefill_seconds=self._prefill_seconds,
            decode_seconds=self._decode_seconds,
            prompt_tokens=len(request.prompt_ids),
            new_tokens=len(request.token_ids),
            batch=len(self._requests),
        )
        logprobs = tuple(request.logprobs) if self._wants_logprobs else None
        return Generation(request.text, tuple(request.token_ids), request.finish_reason, logprobs, timings)

    def _accept(self, picked: Picked) -> Iterator[TokenEvent]:
        """Append each running request's token and yield its event."""
        for row, request in enumerate(self._requests):
            if request.finish_reason is not None:
                continue
            token_id, logprob = picked.token_ids[row], picked.logprobs[row] if picked.logprobs is not None else None
            if logprob is not None:
                request.logprobs.append(logprob)
            used = len(request.prompt_ids) + len(request.token_ids) + 1
            text = request.push(token_id, is_context_full=used > self._runner.sizes.context)
            yield TokenEvent(row, token_id, text, logprob, request.finish_reason)


class TokenStream(Generator[TokenEvent, None, None]):
    """A generator of a run's events; closing or collecting it ends the run.

    Args:
        events: events of the run.
    """

    def __init__(self, events: Generator[TokenEvent, None, None]) -> None:
        self._events = events

    def send(self, value: None) -> TokenEvent:
        """Return the next event."""
        with _pulled_once():
            return self._events.send(value)

    def throw(self, *error: Any) -> TokenEvent:
        """Raise an error inside the run, where it is suspended."""
        with _pulled_once():
            return self._events.throw(*error)

    def close(self) -> None:
        """End the run and its turn."""
        with _pulled_once():
            self._events.close()


@contextmanager
def _pulled_once() -> Iterator[None]:
    """Raise BusyError where another thread is inside the generator; Python raises a ValueError there."""
    try:
        yield
    except ValueError as error:
        if str(error) != "generator already executing":
            raise
        raise BusyError(
            "another thread waits for this stream's next token; pull a stream from one thread at a time"
        ) from error
