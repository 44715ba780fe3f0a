"""The events of one submitted request: written by the thread that computes, read by any thread or asyncio task."""

import os
import threading
from collections.abc import Callable

from graphcore.engine.running_request import TokenEvent
from graphcore.errors import GraphError


class TokenFeed:
    """A list of events that grows until all answers of a request have ended.

    Args:
        answers: number of answers that write to it.
    """

    def __init__(self, answers: int = 1) -> None:
        self._changed = threading.Condition()
        self._events: list[TokenEvent] = []
        self._running = answers
        self._error: BaseException | None = None
        self._wakers: list[Callable[[], None]] = []
        self._process = os.getpid()

    @property
    def has_ended(self) -> bool:
        """Whether no event will come any more."""
        return self._running == 0 or self._error is not None

    def put(self, event: TokenEvent) -> None:
        """Append an event."""
        with self._changed:
            self._events.append(event)
            self._wake()

    def end_one(self) -> None:
        """Record that an answer has ended."""
        with self._changed:
            self._running -= 1
            self._wake()

    def fail(self, error: BaseException) -> None:
        """End the feed with an error, which readers get after the events so far."""
        with self._changed:
            self._error = self._error or error
            self._wake()

    def read(self, at: int, timeout: float | None = None) -> TokenEvent | None:
        """Return event number `at`, waiting for it; None if there will be no such event.

        Raises:
            TimeoutError: it did not come within `timeout` seconds.
        """
        self._refuse_forked()
        with self._changed:
            if not self._changed.wait_for(lambda: self.is_ready(at), timeout):
                raise TimeoutError(f"no token within {timeout} s")
            if at < len(self._events):
                return self._events[at]
            if self._error is not None:
                raise self._error
            return None

    def is_ready(self, at: int) -> bool:
        """Return whether reading event number `at` would not wait."""
        return at < len(self._events) or self.has_ended

    def wait_to_end(self, timeout: float | None = None) -> None:
        """Wait until all answers have ended.

        Raises:
            TimeoutError: they have not within `timeout` seconds.
        """
        self._refuse_forked()
        with self._changed:
            if not self._changed.wait_for(lambda: self.has_ended, timeout):
                raise TimeoutError(f"the answer was not complete within {timeout} s")
            if self._error is not None:
                raise self._error

    def call_at_change(self, waker: Callable[[], None]) -> None:
        """Call a function, once, at the next change, from the thread that makes it."""
        with self._changed:
            self._wakers.append(waker)

    def call_at_end(self, callback: Callable[[], None]) -> None:
        """Call a function once the feed has ended, from the thread that ends it, or now if it has."""
        with self._changed:
            if not self.has_ended:
                self._wakers.append(lambda: self.call_at_end(callback))
                return
        callback()

    def _refuse_forked(self) -> None:
        if self._process != os.getpid():
            raise forked_error()

    def _wake(self) -> None:
        self._changed.notify_all()
        wakers, self._wakers = self._wakers, []
        for waker in wakers:
            waker()


def forked_error() -> GraphError:
    """Return the error of reading, in a forked process, what its parent computes."""
    return GraphError("this process was forked while its parent ran this request; submit it again here")
