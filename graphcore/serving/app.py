"""The ASGI application: paths, and what every request goes through.

CORS (if asked for) -> guard (key, Host, Origin, JSON) -> endpoint -> engine
                                                              |
                                   one line in the log, one count in the metrics
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
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

from graphcore.engine.what_if import Sizes, WhatIf
from graphcore.serving.answering import answer_chat, begin, count_prompt, limits_of, prompt_ids
from graphcore.serving.anthropic_events import messages_body, messages_events
from graphcore.serving.anthropic_messages import read_count_tokens, read_message_request
from graphcore.serving.chat_call import ChatCall, Part, Used
from graphcore.serving.engine_status import running_plan_body, status_body, what_if_body
from graphcore.serving.event_streams import CLIENT_LEFT, DONE, Event, event_of, event_response, until_end, until_left
from graphcore.serving.fields import ListOf, RequestFields, parse_request
from graphcore.serving.guard import Guard
from graphcore.serving.http_exchange import HttpExchange
from graphcore.serving.ids import new_id
from graphcore.serving.metrics import ServingMetrics
from graphcore.serving.openai_chat import ChatChunks, chat_body, read_chat
from graphcore.serving.openai_completions import Completions, read_completion
from graphcore.serving.openai_embeddings import embedding_body, read_embedding
from graphcore.serving.openai_response_events import responses_body, responses_events
from graphcore.serving.openai_responses import read_responses
from graphcore.serving.page_files import HEADERS, PREFIX, page_files
from graphcore.serving.request_errors import RETRY_AFTER, RequestError, error_body, request_error
from graphcore.serving.served_model import ServedModel
from graphcore.serving.token_texts import TokenTexts
from graphcore.threads import ThreadPool

LOG = logging.getLogger("graphcore.serving")
MOST_ASKED = 10**9  # largest number that a query may have
MOST_SEQUENCES = 1024  # of a what-if: its plan takes most of a second of the processors
LONGEST_NUMBER = 10  # digits
NUM_THREADS = 32  # of those that encode prompts and compile grammars: a slow one must not keep others waiting
Endpoint = Callable[[HttpExchange, dict[str, Any]], Awaitable[Response]]


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
        self._what_if: WhatIf | None = None
        self._planning = ThreadPool(1, "graphcore-plans")  # a plan may wait for a long pass to end

    def routes(self) -> list[Route]:
        """Return every path with its endpoint."""
        posts: dict[str, Endpoint] = {
            "/v1/chat/completions": self.chat,
            "/v1/completions": self.completions,
            "/v1/responses": self.responses,
            "/v1/embeddings": self.embeddings,
            "/v1/messages": self.messages,
            "/v1/messages/count_tokens": self.count_tokens,
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
        }
        gets: dict[str, Endpoint] = {
            "/": self.page,
            PREFIX + "{name:path}": self.page,
            "/v1/models": self.models,
            "/v1/models/{name:path}": self.model,
            "/health": self.health,
            "/ping": self.ping,
            "/version": self.version,
            "/tokenizer_info": self.tokenizer_info,
            "/metrics": self.metrics,
            "/plan": self.plan,
            "/status": self.status,
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
        found = RequestError(f"{request.method} {path:.100}: {error.detail}", status=error.status_code)
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

    def _check_ignored(self, exchange: HttpExchange, unknown: list[str], model: str | None = None) -> None:
        """Keep the names of unknown fields; with task.strict they are errors, as is another model's name, or none.

        Args:
            model: the model that is asked for; None if the endpoint needs none.
        """
        exchange.ignored = unknown
        if not self._settings.strict:
            return
        if unknown:
            raise RequestError(f"{unknown[0]!r} is unknown, or cannot be given (task.strict=true)", field=unknown[0])
        if model == "":
            raise RequestError("model is missing (task.strict=true)", field="model")
        if model is not None and model not in self._served.names:
            raise RequestError(
                f"the model {model!r:.60} is not served; ask for {self._served.name!r}",
                field="model",
                status=404,
                code="model_not_found",
            )

    # OpenAI

    async def chat(self, exchange: HttpExchange, body: dict[str, Any]) -> Response:
        """POST /v1/chat/completions."""
        request, call, unknown = read_chat(body)
        self._check_ignored(exchange, unknown, request.model)
        head = self._head("chatcmpl")
        texts = TokenTexts(self._served.engine.prompts.known, request.return_tokens_as_token_ids)
        parts = self._parts(exchange, call)
        if not request.stream:
            return JSONResponse(await until_left(exchange.request, chat_body(parts, head, texts, call)))
        chunks = ChatChunks(head, texts, call.num_answers, request.stream_options)
        events = _events_of(await until_left(exchange.request, begin(parts)), chunks.of)
        return self._stream(exchange, events, {"data": DONE})

    async def completions(self, exchange: HttpExchange, body: dict[str, Any]) -> Response:
        """POST /v1/completions."""
        request, unknown = read_completion(body)
        self._check_ignored(exchange, unknown, request.model)
        completions = Completions(self._served, request, exchange.request_id, self._head("cmpl"))
        if request.stream:
            events = self._completion_events(exchange, completions)
            await until_left(exchange.request, anext(events))
            return self._stream(exchange, events, {"data": DONE})
        with self._served.running():
            found = await until_left(exchange.request, completions.body())
        exchange.used, exchange.finish_reason = completions.used, completions.finish_reason
        return JSONResponse(found)

    async def _completion_events(self, exchange: HttpExchange, completions: Completions) -> AsyncGenerator[Event, None]:
        """Yield an event that is not sent when the requests are submitted, and then those of the answers."""
        with self._served.running():
            await completions.submit()
            yield {}
            async with aclosing(completions.chunks()) as chunks:
                async for chunk in chunks:
                    exchange.note_first(self._metrics)
                    yield event_of(chunk)
        exchange.used, exchange.finish_reason = completions.used, completions.finish_reason

    async def responses(self, exchange: HttpExchange, body: dict[str, Any]) -> Response:
        """POST /v1/responses."""
        request, call, unknown = read_responses(body)
        self._check_ignored(exchange, unknown, request.model)
        texts = TokenTexts(self._served.engine.prompts.known, request.return_tokens_as_token_ids)
        request = request.model_copy(update={"model": self._served.name})
        named = request, new_id("resp", "_"), int(time.time()), texts
        parts = self._parts(exchange, call)
        if not request.stream:
            return JSONResponse(await until_left(exchange.request, responses_body(parts, *named)))
        parts = await until_left(exchange.request, begin(parts))
        return self._stream(exchange, _named_events(responses_events(parts, *named)))

    async def embeddings(self, exchange: HttpExchange, body: dict[str, Any]) -> Response:
        """POST /v1/embeddings."""
        request, unknown = read_embedding(body)
        self._check_ignored(exchange, unknown, request.model)
        with self._served.running():
            found = await until_left(exchange.request, embedding_body(self._served, request))
        exchange.used = Used(found["usage"]["prompt_tokens"], 0, 0)
        return JSONResponse(found)

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

    # Anthropic

    async def messages(self, exchange: HttpExchange, body: dict[str, Any]) -> Response:
        """POST /v1/messages."""
        request, call, unknown = read_message_request(body)
        self._check_ignored(exchange, unknown, request.model)
        named = request.model_copy(update={"model": self._served.name}), new_id("msg", "_")
        parts = self._parts(exchange, call)
        if not request.stream:
            return JSONResponse(await until_left(exchange.request, messages_body(parts, *named)))
        parts = await until_left(exchange.request, begin(parts))
        return self._stream(exchange, _named_events(messages_events(parts, *named)), ping_name="ping")

    async def count_tokens(self, exchange: HttpExchange, body: dict[str, Any]) -> Response:
        """POST /v1/messages/count_tokens."""
        request, call, unknown = read_count_tokens(body)
        self._check_ignored(exchange, unknown, request.model)
        return JSONResponse({"input_tokens": await count_prompt(self._served, call)})

    # The server's own

    async def tokenize(self, exchange: HttpExchange, body: dict[str, Any]) -> Response:
        """POST /tokenize: token ids of a text, or of messages in the chat template."""
        request, unknown = parse_request(TokenizeRequest, body)
        engine = self._served.engine
        if (request.prompt is None) == (request.messages is None):
            raise RequestError("give one of prompt and messages", field="prompt")
        call = None
        if request.messages is not None:
            _, call, unknown = read_chat({**body, "add_special_tokens": None})
        self._check_ignored(exchange, unknown, request.model or None)
        if call is not None:
            ids = await asyncio.to_thread(prompt_ids, self._served, engine, call)
        else:
            limits_of(self._served).check_text(len(request.prompt or ""))
            ids = await asyncio.to_thread(
                engine.prompts.text_ids, request.prompt or "", is_beginning=request.add_special_tokens
            )
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": engine.choices.context_length})

    async def detokenize(self, exchange: HttpExchange, body: dict[str, Any]) -> Response:
        """POST /detokenize: the text of token ids."""
        request, unknown = parse_request(DetokenizeRequest, body)
        self._check_ignored(exchange, unknown, request.model or None)
        vocab = self._served.engine.config.vocab_size
        if not all(0 <= token < vocab for token in request.tokens):
            raise RequestError(f"tokens must be ids from 0 to {vocab - 1}", field="tokens")
        decode = partial(self._served.engine.tokenizer.decode, skip_special_tokens=False)
        text = await asyncio.to_thread(decode, request.tokens)
        return JSONResponse({"prompt": text})

    async def tokenizer_info(self, exchange: HttpExchange, body: dict[str, Any]) -> Response:
        """GET /tokenizer_info: what lm-eval's `tokenizer_backend=remote` asks, as vLLM has it."""
        tokenizer = self._served.engine.tokenizer
        spelt = {"bos_token": tokenizer.bos_token_id, "eos_token": next(iter(tokenizer.eos_token_ids), None)}
        tokens = {name: None if one is None else tokenizer.id_to_piece(one) for name, one in spelt.items()}
        return JSONResponse({**tokens, "pad_token": None, "chat_template": tokenizer.template_source})

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

    async def plan(self, exchange: HttpExchange, body: dict[str, Any]) -> Response:
        """GET /plan: the running plan and its memory; with query parameters, a plan for another budget or size."""
        engine, asked = self._served.engine, self._query(exchange, "memory_budget", "context_length", "max_sequences")
        if self._what_if is None:
            self._what_if = WhatIf(engine)
        work = partial(running_plan_body, self._served, engine, self._what_if)
        if asked:
            sizes = Sizes(_number(asked, "context_length", 1), _number(asked, "max_sequences", 1, MOST_SEQUENCES))
            work = partial(what_if_body, self._served, engine, self._what_if, asked.get("memory_budget"), sizes)
        return JSONResponse(await asyncio.get_running_loop().run_in_executor(self._planning, work))

    async def status(self, exchange: HttpExchange, body: dict[str, Any]) -> Response:
        """GET /status: what the engine does at present; with events=N, the newest events of its timeline."""
        num_events = _number(self._query(exchange, "events"), "events", 0) or 0
        return JSONResponse(await asyncio.to_thread(status_body, self._served, self._metrics, num_events))

    def _query(self, exchange: HttpExchange, *names: str) -> dict[str, str]:
        """Return the parameters that a path takes in its query, without those that are left out."""
        query = exchange.request.query_params
        self._check_ignored(exchange, [other for other in query if other not in names])
        return {name: query[name] for name in names if name in query}

    # Shared

    def _head(self, prefix: str) -> dict[str, Any]:
        return {"id": new_id(prefix), "created": int(time.time()), "model": self._served.name}

    async def _parts(self, exchange: HttpExchange, call: ChatCall) -> AsyncGenerator[Part, None]:
        """Yield the parts of an answer, and note what the log says of them."""
        async with aclosing(answer_chat(self._served, call, exchange.request_id)) as parts:
            with self._served.running():
                try:
                    async for part in parts:
                        exchange.note_part(part, self._metrics)
                        yield part
                except RequestError as error:
                    exchange.error = error  # some interfaces make an event of it
                    raise

    def _stream(
        self,
        exchange: HttpExchange,
        events: AsyncGenerator[Event, None],
        last: Event | None = None,
        ping_name: str | None = None,
    ) -> Response:
        """Return a stream of events; an error after the first becomes an event."""

        def error_event(error: RequestError) -> Event:
            body = error_body(exchange.request.scope["path"], exchange.request_id, error)
            return event_of(body, None if last else "error")

        whole = until_end(events, error_event, partial(self._note, exchange), last)
        return event_response(whole, self._settings.ping, self._settings.send_timeout, ping_name)


class TokenizeRequest(RequestFields):
    """The fields of POST /tokenize."""

    prompt: str | None = None
    messages: ListOf[dict[str, Any]] | None = None
    model: str = ""
    add_special_tokens: bool = True


class DetokenizeRequest(RequestFields):
    """The fields of POST /detokenize."""

    tokens: ListOf[int]
    model: str = ""


async def _events_of(
    parts: AsyncGenerator[Part, None], chunks_of: Callable[[Part], Iterable[dict[str, Any]]]
) -> AsyncGenerator[Event, None]:
    async with aclosing(parts):
        async for part in parts:
            for chunk in chunks_of(part):
                yield event_of(chunk)


async def _named_events(events: AsyncIterator[tuple[str, dict[str, Any]]]) -> AsyncGenerator[Event, None]:
    async for name, data in events:
        yield event_of(data, name)


def _number(asked: Mapping[str, str], name: str, least: int, most: int = MOST_ASKED) -> int | None:
    """Return a parameter of a query as a number; None if it is left out."""
    text = asked.get(name)
    if text is None:
        return None
    is_number = text.isascii() and text.isdecimal() and len(text) <= LONGEST_NUMBER
    if not is_number or not least <= int(text) <= most:
        raise RequestError(f"{name}={text!r:.40} must be a whole number from {least} to {most}", field=name)
    return int(text)


def use_request_threads() -> None:
    """Let the running loop encode prompts and compile grammars in enough threads."""
    asyncio.get_running_loop().set_default_executor(ThreadPool(NUM_THREADS, "graphcore-requests"))


def new_app(served: ServedModel, guard: Guard, metrics: ServingMetrics, cors_origins: Iterable[str] = ()) -> Starlette:
    """Return the ASGI application of a model, which begins to load it at startup.

    Args:
        cors_origins: origins of websites that may read answers; "*" for all.
    """
    application = Application(served, guard, metrics)
    origins = [origin.rstrip("/") for origin in cors_origins]
    cors = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"])

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        use_request_threads()
        loading = asyncio.create_task(served.load())
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
