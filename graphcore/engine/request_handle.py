"""The handle of a submitted request: iterate its tokens, wait for its answers, or cancel it."""

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from graphcore.engine.output import Generation, Readers, TokenEvent, wake
from graphcore.engine.request import Request
from graphcore.errors import ConfigError


class RequestHandle:
    """A submitted request; it runs without further calls.

    Iterate it, with `for` or `async for`, for the tokens as they are made; several readers may do so, each from the
    first token on. `result()`, or `await handle`, waits for the answer. A request whose handle is garbage-collected is
    cancelled. All methods may be called from any thread.

    Args:
        requests: one for each answer, which write to one output.
        owner: object that the handle keeps alive: the engine.
    """

    def __init__(self, requests: Sequence[Request], owner: object = None) -> None:
        self._requests = tuple(requests)
        self._output = requests[0].output
        self._owner = owner  # the engine must not be collected while a caller waits for the answer
        weakref.finalize(self, _drop, self._output.readers).atexit = False

    @property
    def has_ended(self) -> bool:
        """Whether all answers have ended, in whatever way."""
        return self._output.has_ended

    @property
    def request_id(self) -> str:
        """The id of the request, as in `Engine.status`."""
        return self._requests[0].request_id

    @property
    def cached(self) -> int:
        """Tokens of the prompt that were not run, because the caches held them; 0 before the request runs."""
        return self._requests[0].cached

    def cancel(self) -> None:
        """End the request: answers that still run keep their tokens and end as "interrupted"."""
        for request in self._requests:
            request.cancel()

    def result(self, timeout: float | None = None) -> Generation:
        """Return the first answer, waiting until all have ended.

        Args:
            timeout: most seconds to wait; None waits for ever.

        Raises:
            TimeoutError: the answers were not complete in time; the request keeps running.
            BusyError: the call is inside `holding_back`, `on_progress` or a mask, and would wait for ever.
            GraphcoreError: the request has failed, or the engine was closed.
        """
        return self.results(timeout)[0]

    def results(self, timeout: float | None = None) -> list[Generation]:
        """Return all answers, in order, waiting until they have ended; errors are those of `result`."""
        self._output.wait_to_end(timeout)
        return [request.generation() for request in self._requests]

    def embedding(self, normalize: bool = True, timeout: float | None = None) -> Tensor:
        """Return the embedding of a request of `Engine.submit_embeddings`, waiting until its prompt has run.

        Args:
            normalize: True scales it to length 1.
            timeout: most seconds to wait; None waits for ever.

        Returns:
            [D] float32 on the CPU.

        Raises:
            ConfigError: the request was cancelled, or is none for an embedding.
            TimeoutError, BusyError, GraphcoreError: as for `result`.
        """
        self._output.wait_to_end(timeout)
        request = self._requests[0]
        if request.pooled is None or request.finish_reason == "interrupted":
            raise ConfigError("this request has no embedding: it was cancelled, or was not made by submit_embeddings")
        return request.pooled.embedding(normalize)

    def call_at_end(self, callback: Callable[[], None]) -> None:
        """Call a function without arguments when all answers have ended, from the engine's thread, or now."""
        self._output.call_at_end(callback)

    def event(self, at: int) -> TokenEvent | None:
        """Return event number `at`, waiting for it; None after the last one. Errors are those of `result`."""
        return self._output.read(at)

    def __iter__(self) -> Iterator[TokenEvent]:
        at = 0
        while (event := self.event(at)) is not None:
            yield event
            at += 1

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        async for events in self.arrivals():
            for event in events:
                yield event

    async def arrivals(self, interval: float = 0.0) -> AsyncIterator[list[TokenEvent]]:
        """Yield the tokens that have come since the last time, at least one each time. Errors are those of `result`.

        Args:
            interval: least seconds between two times, so that many fast answers cost less of a processor; 0 for none.
        """
        at = 0
        while True:
            await self._until(partial(self._output.is_ready, at))
            events = self._output.read_ready(at)
            if not events:
                return
            yield events
            at += len(events)
            if interval and not self.has_ended:
                await asyncio.sleep(interval)

    def __await__(self) -> Generator[Any, None, Generation]:
        yield from self._until(lambda: self._output.has_ended).__await__()
        return self.result()

    async def _until(self, is_true: Callable[[], bool]) -> None:
        """Wait, without stopping the event loop, until a condition of the output holds."""
        loop = asyncio.get_running_loop()
        while not is_true():
            self._output.before_waiting()
            changed = asyncio.Event()
            self._output.call_at_change(partial(wake, loop, changed))
            if is_true():  # changed meanwhile
                return
            await changed.wait()


def _drop(readers: Readers) -> None:
    """Mark the output as abandoned. Must not reference the mask (a cycle with the handle) or take a lock."""
    readers.are_gone = True


class TokenStream(Generator[TokenEvent, None, None]):
    """A generator of a request's events; closing or collecting it cancels the request."""

    def __init__(self, handle: RequestHandle) -> None:
        self._handle = handle
        self._at, self._taking = 0, threading.Lock()
        self._is_closed = False

    def send(self, value: None) -> TokenEvent:
        """Return the next event; several threads get one each."""
        with self._taking:
            at, self._at = self._at, self._at + 1
        try:
            event = None if self._is_closed else self._handle.event(at)
        except BaseException:  # Ctrl-C too: every generator ends at an error
            self.close()
            raise
        if event is None:
            raise StopIteration
        return event

    def throw(self, *error: Any) -> TokenEvent:
        """Cancel the request and raise an error: an exception, or its type, value and traceback."""
        self.close()
        kind, value, traceback = (*error, None, None)[:3]
        raised = kind if isinstance(kind, BaseException) else value if isinstance(value, BaseException) else None
        if raised is None:
            raised = kind() if value is None else kind(value)
        raise raised.with_traceback(traceback)

    def close(self) -> None:
        """Cancel the request and end the generator."""
        self._is_closed = True
        self._handle.cancel()
