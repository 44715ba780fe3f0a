"""The model that a server serves: loading, ready, failed and rebuilt once, or draining before the end."""

import asyncio
import gc
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from typing import TYPE_CHECKING, Any

from graphcore import __version__
from graphcore.serving.request_errors import RequestError, request_error
from graphcore.serving.serve_settings import ServeSettings
from graphcore.serving.tool_formats.families import tool_format_of
from graphcore.serving.tool_formats.tool_format import ToolFormat
from graphcore.threads import start_thread

if TYPE_CHECKING:
    from graphcore.engine.engine import Engine
    from graphcore.engine.request_handle import RequestHandle

WATCH = 1.0  # seconds between two looks at whether a ring has lost a rank, and whether a pass takes too long
STALLED = "stalled"  # what /health says while a pass takes longer than task.pass_timeout
LOG = logging.getLogger("graphcore.serving")


class ServingState(Enum):
    """What a server can do at present; the value is what /health says."""

    LOADING = "loading"
    READY = "ready"
    REBUILDING = "rebuilding"
    FAILED = "failed"
    DRAINING = "draining"


class ServedModel:
    """The engine of a server.

    Args:
        name: name of the model for clients.
        settings: keys of the task.
        load: function that loads the engine; it is called in a thread.
        other_names: further names by which requests may ask for the model.

    Attributes:
        names: all names by which requests may ask for the model.
        state: what the server can do at present.
        created: time.time() of the start.
        num_running: requests that are being answered.
        num_answered: requests that were answered.
        link_rate: bytes/s at which weights arrive in slots when nothing else runs, measured after loading; None if none
            do.
        special_ids: id of each special token, by its spelling; empty before the engine is loaded.
        longest_token: most characters that a token spells; 0 before the engine is loaded, or without a tokenizer.
        failure: error that ends the server: the engine could not be loaded, or has failed twice.
        on_failure: function that ends the server after a failure.
    """

    def __init__(
        self, name: str, settings: ServeSettings, load: Callable[[], "Engine"], other_names: Iterable[str] = ()
    ) -> None:
        self.name, self.settings, self._load = name, settings, load
        self.names = frozenset((name, *other_names))
        self.special_ids: Mapping[str, int] = {}
        self._engine: Engine | None = None
        self._format: ToolFormat | None = None
        self._was_rebuilt = False
        self._rebuilding: asyncio.Task[None] | None = None  # kept, because the loop does not keep tasks
        self._watching: asyncio.Task[None] | None = None
        self.state = ServingState.LOADING
        self.created = time.time()
        self.num_running = self.num_answered = self.longest_token = 0
        self.link_rate: float | None = None
        self.failure: BaseException | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self._loading: threading.Thread | None = None
        self._handles: set[RequestHandle] = set()

    async def load(self, prepare: Callable[[], None] = lambda: None) -> None:
        """Load the engine in a thread that does not keep the process from ending; an error ends the server.

        Args:
            prepare: function that is called in the thread before, such as one that imports what needs torch.
        """
        loop, loaded = asyncio.get_running_loop(), asyncio.Event()

        def work() -> None:
            try:
                prepare()
                self._engine = self._loaded()
            except BaseException as error:  # noqa: BLE001 - raised by the command that serves
                self.failure = error
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(loaded.set)

        self._loading = start_thread(work, "graphcore-load")
        await loaded.wait()
        if self.failure is not None:
            self._fail(self.failure)
        elif self.state is ServingState.LOADING:
            self.state = ServingState.READY
            self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """Log passes that take too long, and end the server if an idle ring fails: a rank may be lost between requests.

        A pass that waits for a disk or a device that does not answer cannot be ended from outside; a supervisor that
        asks for /health can start the server again.
        """
        was_stalled = False
        while self.state in (ServingState.READY, ServingState.REBUILDING):
            engine = self._engine
            failure = None if engine is None or engine.can_rebuild else engine.failure
            if failure is not None:
                self.error_of(failure)
            if self.is_stalled != was_stalled:
                was_stalled = self.is_stalled
                limit = self.settings.pass_timeout
                if was_stalled:
                    LOG.error("a pass has not ended for %s s (task.pass_timeout); /health says %s", limit, STALLED)
                else:
                    LOG.warning("the pass that took longer than %s s has ended", limit)
            await asyncio.sleep(WATCH)

    @property
    def is_stalled(self) -> bool:
        """Whether the engine's running pass takes longer than task.pass_timeout."""
        limit = self.settings.pass_timeout
        return limit is not None and self._engine is not None and self._engine.pass_seconds > limit

    @property
    def is_healthy(self) -> bool:
        """Whether requests are taken and computed."""
        return self.state is ServingState.READY and not self.is_stalled

    @property
    def health(self) -> str:
        """What /health says: the state, or "stalled" for a server that is ready, but whose pass takes too long."""
        return STALLED if self.state is ServingState.READY and self.is_stalled else self.state.value

    def _fail(self, error: BaseException) -> None:
        self.state, self.failure = ServingState.FAILED, error
        self.on_failure()

    def _loaded(self) -> "Engine":
        engine = self._load()
        tokenizer = engine.prompts.known
        if tokenizer is None:
            self._format = tool_format_of(None, engine.config.model_type)
        else:
            self.special_ids = {tokenizer.id_to_piece(token_id): token_id for token_id in tokenizer.special_ids}
            self._format = tool_format_of(tokenizer.template_source, engine.config.model_type, self.special_ids)
            self.longest_token = max(map(len, map(tokenizer.id_to_piece, range(engine.config.vocab_size))))
            refused = ", ".join(sorted(tokenizer.refused_turns()))
            if refused:
                LOG.info("turns that the chat template does not take, and that are put into others: %s", refused)
        if tokenizer is not None and engine.loaded.end_ids:
            engine.prepare_grammars()
        self.link_rate = engine.loaded.weight_stream.raw_link()
        gc.freeze()  # else the first full collection stops everything for 0.1 s
        return engine

    @property
    def engine(self) -> "Engine":
        """The engine, if it can answer.

        Raises:
            RequestError: it is loading, has failed, or the server is ending.
        """
        if self._engine is None or self.state is not ServingState.READY:
            raise self.not_ready()
        return self._engine

    def not_ready(self) -> RequestError:
        """Return the error of a request that comes while none is taken."""
        is_loading = self.state in (ServingState.LOADING, ServingState.REBUILDING)
        what = "the model is loading" if is_loading else f"the server is {self.state.value}"
        return RequestError(f"{what}; ask again later", status=503, code="not_ready")

    def status(self) -> dict[str, Any]:
        """Return what /status says of the server, with or without an engine."""
        return {
            "model": self.name,
            "state": self.health,
            "version": __version__,
            "uptime_seconds": round(time.time() - self.created, 3),
            "time": round(time.perf_counter(), 6),
        }

    @property
    def loaded_engine(self) -> "Engine | None":
        """The engine in any state; None before it is loaded."""
        return self._engine

    @property
    def tool_format(self) -> ToolFormat:
        """How the model writes calls of tools and thinking; known once it is loaded."""
        assert self._format is not None, "the model is loaded"
        return self._format

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count a request that is being answered inside the block."""
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1
            self.num_answered += 1

    @contextmanager
    def ended_after(self, handles: "Sequence[RequestHandle]") -> Iterator[None]:
        """Cancel requests of the engine after the block, or when the server ends before."""
        self._handles.update(handles)
        try:
            yield
        finally:
            self._handles.difference_update(handles)
            for handle in handles:
                handle.cancel()

    def cancel_all(self) -> None:
        """End all answers that are being made, as they are."""
        for handle in tuple(self._handles):
            handle.cancel()

    def drain(self) -> None:
        """Take no more requests."""
        if self.state is not ServingState.FAILED:
            self.state = ServingState.DRAINING

    def error_of(self, error: BaseException) -> RequestError:
        """Return the error of a failed request; if no other can run, rebuild the engine, once, or end the server."""
        engine = self._engine
        failure = None if engine is None else engine.failure
        is_draining = self.state is ServingState.DRAINING
        if engine is not None and failure is not None and (is_draining or self.state is ServingState.READY):
            if is_draining or self._was_rebuilt or not engine.can_rebuild:
                again = " again" if self._was_rebuilt else ""
                LOG.error("the engine has failed%s, and the server ends: %s", again, failure)
                self._fail(failure)
            else:
                LOG.error("the engine has failed, and is loaded again: %s", failure)
                self.state, self._was_rebuilt = ServingState.REBUILDING, True
                self._rebuilding = asyncio.create_task(self._rebuild())
        return request_error(error, is_usable=failure is None)

    async def _rebuild(self) -> None:
        assert self._engine is not None, "it has failed"
        try:
            await asyncio.to_thread(self._engine.rebuild)
        except Exception as error:  # noqa: BLE001 - raised by the command that serves
            self._fail(error)
            return
        if self.state is ServingState.REBUILDING:
            self.state = ServingState.READY

    def close(self) -> None:
        """Free the engine, after a load that is under way: threads of native code must not outlive the process."""
        if self._loading is not None:
            self._loading.join()
        if self._engine is not None:
            self._engine.close()
