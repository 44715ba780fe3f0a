"""The ASGI application: paths, and what every request goes through.

CORS (if asked for) -> guard (key, Host, Origin, JSON) -> endpoint -> engine
                                                              |
                                   one line in the log, one count in the metrics

Nothing here needs torch, whose import takes seconds: a server answers before it, and with the endpoints that ask the
model (model_endpoints.py) when they are imported, in the thread that loads it.
"""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from sse_starlette import EventSourceResponse
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from graphcore.processors import uncollected_imports
from graphcore.serving.event_streams import CLIENT_LEFT
from graphcore.serving.guard import Guard
from graphcore.serving.http_exchange import Endpoint, HttpExchange
from graphcore.serving.metrics import ServingMetrics
from graphcore.serving.page_files import HEADERS, PREFIX, page_files
from graphcore.serving.request_errors import RETRY_AFTER, RequestError, error_body, request_error
from graphcore.serving.served_model import ServedModel
from graphcore.threads import ThreadPool

LOG = logging.getLogger("graphcore.serving")
NUM_THREADS = 32  # of those that encode prompts and compile grammars: a slow one must not keep others waiting
MODEL_POSTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
)
MODEL_GETS = ("/tokenizer_info", "/plan")
"""Paths whose endpoints ask the model."""
UNKNOWN_PATH = f"there is no such path; this server has POST {', '.join(MODEL_POSTS)}, and GET /v1/models"


class Application:
    """The endpoints of a server.

    Args:
        served: the model.
        guard: what a request must have.
        metrics: the counters.
    """

    def __init__(self, served: ServedModel, guard: Guard, metrics: ServingMetrics) -> None:
        self._served, self._guard, self._metrics = served, guard, metrics
        self._settings = served.settings
        self._page = page_files()
        self._of_model: Mapping[str, Endpoint] = {}  # by path; empty until they are imported

    def import_model_endpoints(self) -> None:
        """Import the endpoints that ask the model, and its metrics, unless that was done: they need torch."""
        if self._of_model:
            return
        with uncollected_imports():
            from graphcore.serving.engine_metrics import EngineCollector
            from graphcore.serving.model_endpoints import ModelEndpoints

        self._metrics.register(EngineCollector(self._served))
        self._of_model = ModelEndpoints(self._served, self._metrics).by_path()

    def routes(self) -> list[Route]:
        """Return every path with its endpoint."""
        posts: dict[str, Endpoint] = dict.fromkeys(MODEL_POSTS, self.ask_model)
        gets: dict[str, Endpoint] = {
            "/": self.page,
            PREFIX + "{name:path}": self.page,
            "/v1/models": self.models,
            "/v1/models/{name:path}": self.model,
            "/health": self.health,
            "/ping": self.ping,
            "/version": self.version,
            "/metrics": self.metrics,
            "/status": self.status,
            **dict.fromkeys(MODEL_GETS, self.ask_model),
        }
        return [
            *(Route(path, partial(self._answer, one, True), methods=["POST"]) for path, one in posts.items()),
            *(Route(path, partial(self._answer, one, False), methods=["GET"]) for path, one in gets.items()),
        ]

    async def _answer(self, endpoint: Endpoint, has_body: bool, request: Request) -> Response:
        """Answer a request: check it, call its endpoint, and turn errors into bodies."""
        exchange = HttpExchange(request)
        try:
            self._guard.check(request)
            body = await self._guard.body(request) if has_body else {}
            response = await endpoint(exchange, body)
        except ClientDisconnect:
            self._note(exchange, CLIENT_LEFT)
            return Response(status_code=CLIENT_LEFT)
        except Exception as error:  # noqa: BLE001 - it becomes the answer, and is logged
            return self._error(exchange, request_error(error), error)
        response.headers.update(exchange.headers)
        if not isinstance(response, EventSourceResponse):
            self._note(exchange, response.status_code)
        return response

    async def refuse(self, request: Request, error: Exception) -> Response:
        """Answer a request for an unknown path, or with a method that its path has not."""
        assert isinstance(error, HTTPException), "no other error has this handler"
        exchange = HttpExchange(request)
        path = request.scope["path"]
        detail = UNKNOWN_PATH if error.status_code == 404 else error.detail
        found = RequestError(f"{request.method} {path:.100}: {detail}", status=error.status_code)
        try:
            self._guard.check_sender(request)
        except RequestError as refusal:
            found = refusal
        response = self._error(exchange, found, error)
        if found.status == error.status_code:
            response.headers.update(error.headers or {})  # Allow, for a method
        return response

    def _error(self, exchange: HttpExchange, error: RequestError, raised: Exception) -> Response:
        if error.status == 500:
            LOG.error("request %s has failed", exchange.request_id, exc_info=raised)
        self._note(exchange, error.status, error.message)
        body = error_body(exchange.request.scope["path"], exchange.request_id, error)
        return JSONResponse(body, error.status, {**exchange.headers, **error.headers})

    def _note(self, exchange: HttpExchange, status: int, message: str = "") -> None:
        exchange.note_end(self._metrics, status, message)

    async def ask_model(self, exchange: HttpExchange, body: dict[str, Any]) -> Response:
        """Answer at an endpoint of the model."""
        endpoint = self._of_model.get(exchange.endpoint)
        if endpoint is None:
            raise self._served.not_ready()
        return await endpoint(exchange, body)

    async def models(self, exchange: HttpExchange, body: dict[str, Any]) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._model_body()]})

    async def model(self, exchange: HttpExchange, body: dict[str, Any]) -> Response:
        """GET /v1/models/{name}."""
        if exchange.request.path_params["name"] not in self._served.names:
            raise RequestError("there is no such model; GET /v1/models lists it", status=404, code="model_not_found")
        return JSONResponse(self._model_body())

    def _model_body(self) -> dict[str, Any]:
        engine = self._served.loaded_engine
        context = None if engine is None else engine.choices.context_length
        return {
            "id": self._served.name,
            "object": "model",
            "created": int(self._served.created),
            "owned_by": "graphcore",
            "max_model_len": context,
        }

    async def page(self, exchange: HttpExchange, body: dict[str, Any]) -> Response:
        """GET / and /page/{name}: the page and its files, which are open; what it asks for needs the key."""
        file = self._page.get(exchange.request.scope["path"])
        if file is None:
            raise RequestError("the page has no such file", status=404)
        headers = {**HEADERS, "ETag": file.etag}
        if exchange.request.headers.get("if-none-match") == file.etag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, headers=headers, media_type=file.media_type)

    async def health(self, exchange: HttpExchange, body: dict[str, Any]) -> Response:
        """GET /health: 200 if requests are taken and computed."""
        is_healthy = self._served.is_healthy
        headers = {} if is_healthy else {"Retry-After": str(RETRY_AFTER)}
        return JSONResponse({"status": self._served.health}, 200 if is_healthy else 503, headers)

    async def ping(self, exchange: HttpExchange, body: dict[str, Any]) -> Response:
        """GET /ping: 200 while the server answers at all."""
        return JSONResponse({"status": "alive"})

    async def version(self, exchange: HttpExchange, body: dict[str, Any]) -> Response:
        """GET /version."""
        import graphcore

        return JSONResponse({"version": graphcore.__version__})

    async def metrics(self, exchange: HttpExchange, body: dict[str, Any]) -> Response:
        """GET /metrics, in Prometheus's text format."""
        text = await asyncio.to_thread(self._metrics.text)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def status(self, exchange: HttpExchange, body: dict[str, Any]) -> Response:
        """GET /status: the server's state and, when the model is loaded, what the engine does at present."""
        if self._served.loaded_engine is None:
            return JSONResponse(self._served.status())
        return await self.ask_model(exchange, body)


def use_request_threads() -> None:
    """Let the running loop encode prompts and compile grammars in enough threads."""
    asyncio.get_running_loop().set_default_executor(ThreadPool(NUM_THREADS, "graphcore-requests"))


def new_app(served: ServedModel, guard: Guard, metrics: ServingMetrics, cors_origins: Iterable[str] = ()) -> Starlette:
    """Return the ASGI application of a model, which begins to load it at startup.

    Args:
        cors_origins: origins of websites that may read answers; "*" for all.
    """
    application = Application(served, guard, metrics)
    if "torch" in sys.modules:  # nothing has to be waited for
        application.import_model_endpoints()
    origins = [origin.rstrip("/") for origin in cors_origins]
    cors = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"])

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        use_request_threads()
        loading = asyncio.create_task(served.load(application.import_model_endpoints))
        yield
        loading.cancel()

    app = Starlette(
        routes=application.routes(),
        middleware=[cors] if origins else [],
        exception_handlers={HTTPException: application.refuse},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # a redirection would repeat the Host header, whatever it is
    return app
