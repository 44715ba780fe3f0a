"""Runs the application under uvicorn: connections that send too slowly are cut, and signals drain the server.

SIGTERM, SIGINT   no new requests, /health says 503, running answers finish within task.grace or end as they are, exit
a second signal   running answers are cut
"""

import asyncio
import logging
import resource
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from graphcore.errors import ConfigError
from graphcore.serving.app import new_app
from graphcore.serving.guard import Guard
from graphcore.serving.ids import request_id_of
from graphcore.serving.listener import bound_socket
from graphcore.serving.metrics import ServingMetrics
from graphcore.serving.request_errors import RequestError, error_body
from graphcore.serving.serve_settings import ServeSettings
from graphcore.serving.served_model import ServedModel

if TYPE_CHECKING:
    from graphcore.engine.engine import Engine

LOG = logging.getLogger("graphcore.serving")
KEEP_ALIVE = 65  # seconds that an idle connection stays open: longer than a proxy's 60
LAST_SECONDS = 5  # in which answers that are ended by the server's end are sent
STEP = 0.05  # seconds between two looks at whether all answers have ended
SPARE_CONNECTIONS = 50  # open beyond task.max_connections, so that their requests can be answered with status 503
OTHER_FILES = 256  # that a process has open besides its connections
LARGEST_HEAD = 64 * 1024  # bytes of a request's head


class TimeoutProtocol(H11Protocol):
    """uvicorn's HTTP protocol with time limits for the head of a request and for a client that does not read.

    Attributes:
        most_connections: number of open connections from which on requests are refused.
        head_seconds: seconds from the first byte of a connection, or from the end of an answer, to a whole head.
        send_seconds: seconds that a client may take to read what is ready to be sent.
    """

    most_connections = 1000
    head_seconds = 10.0
    send_seconds = 30.0
    _timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timeout of the first request's head; abort a connection beyond the limit and SPARE_CONNECTIONS."""
        super().connection_made(transport)
        if len(self.connections) > self.most_connections + SPARE_CONNECTIONS:
            transport.abort()
        else:
            self._start()

    def data_received(self, data: bytes) -> None:
        """Read bytes; the first after an answer start the timeout of the next head, and a whole head stops it."""
        if self._timer is None and (self.cycle is None or self.cycle.response_complete):
            self._start()
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()

    def handle_events(self) -> None:
        """Answer the requests that have arrived, or refuse them: uvicorn's own limit answers in plain text."""
        is_full = max(len(self.connections), len(self.tasks)) >= self.most_connections
        self.app = refuse_connection if is_full else self.config.loaded_app
        super().handle_events()

    def pause_writing(self) -> None:
        """Start the send timeout: the send buffer is full, because the client does not read."""
        super().pause_writing()
        self._send_timer = self.loop.call_later(self.send_seconds, self._cut)

    def resume_writing(self) -> None:
        """Stop the send timeout: the client has read."""
        self._stop_sending()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timeouts."""
        self._stop()
        self._stop_sending()
        super().connection_lost(exc)

    def _start(self) -> None:
        self._stop()
        self._timer = self.loop.call_later(self.head_seconds, self._cut)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stop_sending(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _cut(self) -> None:
        """Abort the connection after a timeout."""
        self._timer = None
        if not self.transport.is_closing():
            self.transport.abort()


async def refuse_connection(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request with status 503, because too many connections are open; this is an ASGI application."""
    error = RequestError(
        "too many connections are open (task.max_connections); ask again later", status=503, code="too_many_connections"
    )
    LOG.warning("503: %s", error.message)
    request_id = request_id_of(Headers(scope=scope).get("x-request-id"))
    body = error_body(scope["path"], request_id, error)
    headers = {"X-Request-ID": request_id, "Connection": "close", **error.headers}
    await JSONResponse(body, error.status, headers)(scope, receive, send)


class DrainingServer(uvicorn.Server):
    """uvicorn's server; a signal lets running answers end before it closes.

    Args:
        served: the model.
        grace: seconds for running answers after the first signal.
    """

    def __init__(self, config: uvicorn.Config, served: ServedModel, grace: float) -> None:
        super().__init__(config)
        self._served, self._grace = served, grace
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.on_start: Callable[[], None] = lambda: None

    async def startup(self, sockets: Any = None) -> None:
        """Listen, and say so."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            self.on_start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, and close at the second."""
        if self._loop is None or self._draining is not None:
            self.should_exit = self.force_exit = True
            return
        self._loop.call_soon_threadsafe(self.drain)

    def drain(self) -> None:
        """Take no more requests, and close when the running ones have ended, or after the grace."""
        if self._draining is None:
            LOG.info("ending: %d answers have %.0f s to finish", self._served.num_running, self._grace)
            self._served.drain()
            self._draining = asyncio.create_task(self._close_when_idle())

    async def _close_when_idle(self) -> None:
        end = asyncio.get_running_loop().time() + self._grace
        await self._wait_until_idle(end)
        self._served.cancel_all()  # answers end as they are
        await self._wait_until_idle(asyncio.get_running_loop().time() + LAST_SECONDS)
        self.should_exit = True

    async def _wait_until_idle(self, end: float) -> None:
        while self._served.num_running and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(STEP)

    async def shutdown(self, sockets: Any = None) -> None:
        """Close connections and run the application's shutdown, which uvicorn skips after a second signal."""
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals inside the block; unlike uvicorn's, do not raise them again afterwards."""
        numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
        before = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def serve_model(
    name: str,
    settings: ServeSettings,
    load: Callable[[], "Engine"],
    on_start: Callable[[int], None],
    other_names: Iterable[str] = (),
) -> ServedModel:
    """Serve a model until a signal ends it, or its engine has failed twice.

    Args:
        name: name of the model for clients.
        settings: keys of the task.
        load: function that loads the engine; it is called in a thread while the server listens already.
        on_start: function that is called with the port when the server listens.
        other_names: further names by which requests may ask for the model.

    Returns:
        The model, after the last answer.

    Raises:
        ConfigError: the address cannot be listened on.
        Exception: the engine cannot be loaded, or has failed twice.
    """
    allow_files(settings.max_connections + SPARE_CONNECTIONS + OTHER_FILES)
    served, server = new_served(name, settings, load, other_names)
    listener = bound_socket(settings.host, settings.port)
    server.on_start = lambda: on_start(listener.getsockname()[1])
    server.run([listener])
    if served.failure is not None:
        raise served.failure
    return served


def allow_files(count: int) -> None:
    """Raise the process's limit of open files to a number, if it is lower.

    Raises:
        ConfigError: the machine allows no such limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        if hard != resource.RLIM_INFINITY and hard < count:
            raise ConfigError(f"{count} open files are needed, and the limit is {hard}; set task.max_connections lower")
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def new_served(
    name: str, settings: ServeSettings, load: Callable[[], "Engine"], other_names: Iterable[str] = ()
) -> tuple[ServedModel, DrainingServer]:
    """Return a model and the server that answers for it; arguments as for `serve_model`."""
    served = ServedModel(name, settings, load, other_names)
    app = new_app(served, Guard.of(settings), ServingMetrics(served, settings.metric_aliases), settings.cors_origins)
    server = new_server(app, served)
    served.on_failure = server.drain
    return served, server


def new_server(app: ASGIApp, served: ServedModel) -> DrainingServer:
    """Return a server for an application, with the limits of its settings."""
    settings = served.settings
    limits = {
        "most_connections": settings.max_connections,
        "head_seconds": settings.receive_timeout,
        "send_seconds": settings.send_timeout,
    }
    protocol = type("Protocol", (TimeoutProtocol,), limits)
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        h11_max_incomplete_event_size=LARGEST_HEAD,
        timeout_graceful_shutdown=LAST_SECONDS,
    )
    return DrainingServer(config, served, settings.grace)
