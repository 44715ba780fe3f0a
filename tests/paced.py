"""A stream whose tokens are computed one by one, when they are asked for: without it the engine runs ahead."""

import threading
from collections.abc import Iterator

from graphcore import Engine
from graphcore.engine.output import TokenEvent
from graphcore.engine.request_handle import RequestHandle

SECONDS = 60.0


class Paced(Iterator[TokenEvent]):
    """The events of one request, which computes its next token at `next`.

    Args:
        engine: engine whose thread is held back after each pass from the request's first token on, whichever request
            it was for, until `close`. An earlier request's last pass may still be ending.
        arguments, settings: those of `Engine.submit`.
    """

    def __init__(self, engine: Engine, *arguments: object, **settings: object) -> None:
        self._engine, self._before = engine, engine._on_progress
        self._passes, self._is_free, self._at = threading.Semaphore(0), False, 0
        with engine.holding_back():
            self.handle: RequestHandle = engine.submit(*arguments, **settings)  # type: ignore[arg-type]
            engine._on_progress = self._hold

    def __next__(self) -> TokenEvent:
        if self._at:
            self._passes.release()
        try:
            event = self.handle.event(self._at)
        except BaseException:
            self.let_go()
            raise
        if event is None:
            self.close()
            raise StopIteration
        self._at += 1
        return event

    def close(self) -> None:
        """Cancel the request and let the engine run freely again."""
        self.handle.cancel()
        self.let_go()

    def close_engine(self) -> None:
        """Close the engine, in a pass of this request."""
        closing = threading.Thread(target=self._engine.close)
        closing.start()
        while not self._engine._queue.is_closed:
            continue
        self.let_go()
        closing.join(SECONDS)
        assert not closing.is_alive()

    def let_go(self) -> None:
        """Let the engine run freely again."""
        self._is_free = True
        self._passes.release()
        self._engine._on_progress = self._before

    def _hold(self, stage: str, group: int | None, done: int, total: int) -> None:
        self._before(stage, group, done, total)
        has_begun = self.handle._output.is_ready(0)
        if stage == "generate" and group is None and has_begun and not self._is_free:
            assert self._passes.acquire(timeout=SECONDS), "nobody asked for the next token"
