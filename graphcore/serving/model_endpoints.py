"""The endpoints that ask the model, of OpenAI's and Anthropic's interfaces and the server's own; they need torch."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.responses import JSONResponse, Response

from graphcore.engine.what_if import Sizes, WhatIf
from graphcore.serving.answering import answer_chat, begin, count_prompt, limits_of, prompt_ids
from graphcore.serving.anthropic_events import messages_body, messages_events
from graphcore.serving.anthropic_messages import read_count_tokens, read_message_request
from graphcore.serving.chat_call import ChatCall, Part, Used
from graphcore.serving.engine_status import engine_body, running_plan_body, what_if_body
from graphcore.serving.event_streams import DONE, Event, event_of, event_response, until_end, until_left
from graphcore.serving.fields import ListOf, RequestFields, parse_request
from graphcore.serving.http_exchange import Endpoint, HttpExchange
from graphcore.serving.ids import new_id
from graphcore.serving.metrics import ServingMetrics
from graphcore.serving.openai_chat import ChatChunks, chat_body, read_chat
from graphcore.serving.openai_completions import Completions, read_completion
from graphcore.serving.openai_embeddings import embedding_body, read_embedding
from graphcore.serving.openai_response_events import responses_body, responses_events
from graphcore.serving.openai_responses import read_responses
from graphcore.serving.request_errors import RequestError, error_body
from graphcore.serving.served_model import ServedModel
from graphcore.serving.token_texts import TokenTexts
from graphcore.threads import ThreadPool

MOST_ASKED = 10**9  # largest number that a query may have
MOST_SEQUENCES = 1024  # of a what-if: its plan takes most of a second of the processors
LONGEST_NUMBER = 10  # digits


class ModelEndpoints:
    """The endpoints that ask the model.

    Args:
        served: the model.
        metrics: the counters.
    """

    def __init__(self, served: ServedModel, metrics: ServingMetrics) -> None:
        self._served, self._metrics, self._settings = served, metrics, served.settings
        self._what_if: WhatIf | None = None
        self._planning = ThreadPool(1, "graphcore-plans")  # a plan may wait for a long pass to end

    def by_path(self) -> dict[str, Endpoint]:
        """Return each endpoint by its path."""
        return {
            "/v1/chat/completions": self.chat,
            "/v1/completions": self.completions,
            "/v1/responses": self.responses,
            "/v1/embeddings": self.embeddings,
            "/v1/messages": self.messages,
            "/v1/messages/count_tokens": self.count_tokens,
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
            "/tokenizer_info": self.tokenizer_info,
            "/plan": self.plan,
            "/status": self.status,
        }

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
        """Submit the requests, yield an empty event (which the caller drops), then the events of the answers."""
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
        engine = self._served.loaded_engine
        assert engine is not None, "the application answers without it"
        found = await asyncio.to_thread(engine_body, engine, self._metrics, num_events)
        return JSONResponse({**self._served.status(), **found})

    # Shared

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

    def _query(self, exchange: HttpExchange, *names: str) -> dict[str, str]:
        """Return the parameters that a path takes in its query, without those that are left out."""
        query = exchange.request.query_params
        self._check_ignored(exchange, [other for other in query if other not in names])
        return {name: query[name] for name in names if name in query}

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

        whole = until_end(events, error_event, partial(exchange.note_end, self._metrics), last)
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
    """Return a query parameter as an integer; None if it is absent."""
    text = asked.get(name)
    if text is None:
        return None
    is_number = text.isascii() and text.isdecimal() and len(text) <= LONGEST_NUMBER
    if not is_number or not least <= int(text) <= most:
        raise RequestError(f"{name}={text!r:.40} must be a whole number from {least} to {most}", field=name)
    return int(text)
