"""The server as a Ray Serve application: one address, several engine replicas, on one machine or many.

    client -> Ray's proxy -> Ingress -- PrefixRouter --> Replica: the server's app and its engine
                                     \\-----------------> Replica ...

`graphcore serve task.replicas=2` runs it (ray_server.py), or `serve run` with a file (docs/scaling.md). Ray starts
replicas again that have died or failed, and starts and stops further ones between task.replicas and task.max_replicas.

A request whose replica dies before it has sent anything is given to another. A stream that has begun ends with an
error event: text of two answers is never mixed.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve import Application
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from graphcore.config.compose import compose_settings, merge_schema
from graphcore.config.settings import Settings
from graphcore.serving.event_streams import event_of
from graphcore.serving.guard import Guard
from graphcore.serving.ids import request_id_of
from graphcore.serving.replicas.forwarding import REPLICA_HEADER, ForwardedRequest, Message, answer_messages
from graphcore.serving.replicas.prefix_keys import prefix_keys
from graphcore.serving.replicas.prefix_router import PrefixRouter
from graphcore.serving.replicas.prefix_table import RoutingHint
from graphcore.serving.replicas.replica_metrics import merged_metrics
from graphcore.serving.replicas.replica_resources import replica_resources, replica_settings
from graphcore.serving.request_errors import RequestError, error_body
from graphcore.serving.serve_settings import ServeSettings, checked_settings

LOG = logging.getLogger("ray.serve")
QUIET = {"enable_access_log": False}  # replicas write a line for each request themselves
REPLICA = "Replica"  # name of the deployment
LOST = (RayActorError, RayServeException)  # a replica has died, or cannot be reached
TRIES = 2  # replicas that a request is given to, one after another, if they die or answer that they cannot
STATUS_SECONDS = 1.0  # for which the numbers of replicas are kept
CALL_SECONDS = 5.0  # in which Ray, or all replicas, must answer what is no request for a model
LAST_SECONDS = 5.0  # in which answers that are ended by the server's end are sent
STEP = 0.05  # seconds between two looks at whether all answers have ended
UNNAMED_EVENTS = ("/v1/chat/completions", "/v1/completions")  # paths whose streams have data alone
PINNED = ("/status", "/plan")  # whose answers are about one replica: the same one for both, and each time
ABOUT_ALL = ("/health", "/ping", "/metrics")  # what the ingress answers itself
LARGE_BODY = 1 << 16  # bytes from which the keys of a body are computed beside the streams
HEALTH_SECONDS = 2.0  # between two looks at whether a replica has failed
CONTROL_REQUESTS = 100  # that an ingress takes beyond those that replicas may have
SPARE_SECONDS = 10.0  # beyond task.grace until Ray kills a replica that ends


def build(arguments: Mapping[str, Any]) -> Application:
    """Return the application for `serve run graphcore.serving.ray_app:build` or a file for `serve deploy`.

    Args:
        arguments: settings by key, such as {"model": "gemma3", "task.replicas": 2}.

    Raises:
        GraphcoreError: a setting or the checkpoint stands in the way.
    """
    given = [f"{key}={value}" for key, value in arguments.items()]
    settings = compose_settings(["task=serve", *given])
    task = merge_schema(ServeSettings, settings.task, "task=serve")
    settings, task = checked_settings(settings, task)
    settings = replica_settings(settings, None)
    return replicated(settings, task, replica_resources(settings))


def replicated(settings: Settings, task: ServeSettings, resources: Mapping[str, float]) -> Application:
    """Return the application of checked settings.

    Args:
        resources: what a replica needs of its machine: num_cpus, memory in bytes, num_gpus.
    """
    number: dict[str, Any] = {"num_replicas": task.replicas}
    if task.max_replicas is not None and task.max_replicas > task.replicas:
        bounds = {"min_replicas": task.replicas, "max_replicas": task.max_replicas}
        number = {"autoscaling_config": {**bounds, "target_ongoing_requests": task.max_sequences}}
    router = {"slack": task.max_sequences // 2}
    replicas: Any = serve.deployment(
        Replica,
        name=REPLICA,
        **number,
        ray_actor_options=dict(resources),
        max_ongoing_requests=task.max_connections,
        logging_config=QUIET,
        health_check_period_s=HEALTH_SECONDS,
        graceful_shutdown_timeout_s=task.grace + SPARE_SECONDS,
        request_router_config={"request_router_class": PrefixRouter, "request_router_kwargs": router},
    )
    ingress: Any = serve.deployment(
        Ingress,
        num_replicas=1,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=task.max_connections * (task.max_replicas or task.replicas) + CONTROL_REQUESTS,
        logging_config=QUIET,
        graceful_shutdown_timeout_s=task.grace + SPARE_SECONDS,
    )
    application: Application = ingress.bind(replicas.bind(settings, task), task)
    return application


class Replica:
    """One engine behind the server's own app; Ray sends it requests once it is loaded.

    Args:
        settings: checked settings of the engine.
        task: checked settings of the task.
    """

    async def __init__(self, settings: Settings, task: ServeSettings) -> None:  # type: ignore[misc]  # Ray awaits it
        from graphcore.engine.engine import Engine
        from graphcore.serving.app import new_app, use_request_threads
        from graphcore.serving.http_exchange import log_requests
        from graphcore.serving.metrics import ServingMetrics
        from graphcore.serving.served_model import ServedModel

        def load() -> Engine:
            engine = Engine.from_settings(settings)
            engine.warm_up(engine.runner.sizes.batch_size)
            return engine

        self._id = serve.get_replica_context().replica_id.unique_id
        log_requests(task.log, self._id)
        name = task.model_name or settings.model.display_name
        self._served = ServedModel(name, task, load, settings.model.served_names)
        metrics = ServingMetrics(self._served, task.metric_aliases)
        self._app = new_app(self._served, Guard.of(task), metrics, task.cors_origins)
        use_request_threads()
        await self._served.load()
        if self._served.failure is not None:
            raise self._served.failure

    async def answer(self, _: RoutingHint, request: ForwardedRequest) -> AsyncGenerator[Message, None]:
        """Run a request through the ASGI app and stream its response messages."""
        async for message in answer_messages(self._app, request, self._id):
            yield message

    async def whole_answer(self, _: RoutingHint, request: ForwardedRequest) -> list[Message]:
        """Run a request through the ASGI app and return all response messages at once."""
        return [message async for message in answer_messages(self._app, request, self._id)]

    async def end_answers(self, _: RoutingHint) -> None:
        """Abort all running generations; each response ends with the tokens it has (finish_reason "length")."""
        self._served.cancel_all()

    def check_health(self) -> None:
        """Raise the engine's failure, or that of a pass that does not end; Ray restarts such a replica."""
        if self._served.failure is not None:
            raise self._served.failure
        if self._served.is_stalled:
            raise TimeoutError(f"a pass has not ended for {self._served.settings.pass_timeout} s (task.pass_timeout)")

    def __del__(self) -> None:
        """Free the engine; Ray calls this after in-flight requests have finished."""
        self._served.close()


class Ingress:
    """Routes requests to replicas, and serves /health, /ping and /metrics for all of them.

    Args:
        replicas: handle of the replicas.
        task: checked settings of the task.
    """

    def __init__(self, replicas: DeploymentHandle[Any], task: ServeSettings) -> None:
        self._replicas, self._streams = replicas, replicas.options(stream=True)
        self._guard, self._grace = Guard.of(task), task.grace
        self._is_draining = False
        self._num_running = self._num_answered = 0
        self._states: dict[str, int] = {}
        self._looking: asyncio.Task[None] | None = None

    async def __call__(self, request: Request) -> Response:
        """Handle an HTTP request."""
        request_id, path = request_id_of(request.headers.get("x-request-id")), request.scope["path"]
        try:
            body, hint = b"", RoutingHint()
            if self._may_ask(request):
                if request.method == "GET" and path in ABOUT_ALL:
                    return await self._about_all(ForwardedRequest.of(request, b"", request_id), path)
                if request.method == "POST":
                    body = await self._guard.received(request)
                    hint = RoutingHint(await _keys_of(body))
                elif path in PINNED:
                    hint = RoutingHint((PINNED[0].encode(),), is_pinned=True)
            return await self._forward(hint, ForwardedRequest.of(request, body, request_id))
        except RequestError as error:
            return JSONResponse(error_body(path, request_id, error), error.status, error.headers)

    def _may_ask(self, request: Request) -> bool:
        """Return whether key, Host, Origin and content type are accepted; a replica answers rejected requests."""
        try:
            self._guard.check(request)
        except RequestError:
            return False
        return True

    async def drain(self) -> int:
        """Reject new requests, wait task.grace seconds for running ones, abort the rest; return the number served."""
        self._is_draining = True
        await self._wait_until_idle(self._grace)
        if self._num_running:
            LOG.warning("%d answers end as they are, after task.grace", self._num_running)
            with suppress(*LOST, TimeoutError):
                await self._replicas.broadcast("end_answers", RoutingHint()).results_async(timeout_s=CALL_SECONDS)
            await self._wait_until_idle(LAST_SECONDS)
        return self._num_answered

    async def _wait_until_idle(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self._num_running and time.monotonic() < end:
            await asyncio.sleep(STEP)

    async def _about_all(self, request: ForwardedRequest, path: str) -> Response:
        if path == "/ping":
            return JSONResponse({"status": "alive"})
        return await (self._health() if path == "/health" else self._metrics(request))

    async def _health(self) -> Response:
        """Return 200 if a replica is running, with the number of replicas in each of Ray's states."""
        states = await self._replica_states()
        is_ready = bool(states.get("RUNNING")) and not self._is_draining
        state = "draining" if self._is_draining else "ready" if is_ready else "loading"
        return JSONResponse({"status": state, "replicas": states}, 200 if is_ready else 503)

    async def _replica_states(self) -> dict[str, int]:
        """Return the number of replicas in each state, cached for STATUS_SECONDS; the last known one if Ray is slow."""
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        if not self._states:
            await asyncio.wait((self._looking,))
        return self._states

    async def _look(self) -> None:
        try:
            async with asyncio.timeout(CALL_SECONDS):
                self._states = await asyncio.to_thread(_replica_states)
        except (TimeoutError, KeyError, RayError, *LOST) as error:  # KeyError: Ray does not list the application yet
            LOG.warning("Ray does not say how many replicas run, which may be as many as before: %r", error)
        try:
            await asyncio.sleep(STATUS_SECONDS)
        finally:
            self._looking = None  # else nobody would ask again

    async def _metrics(self, request: ForwardedRequest) -> Response:
        """Return the metrics of all replicas with a label `replica`; an error response of one is returned as it is."""
        texts: dict[str, str] = {}
        try:
            call = self._replicas.broadcast("whole_answer", RoutingHint(), request)
            answers = await call.results_async(timeout_s=CALL_SECONDS)
        except (TimeoutError, *LOST):
            raise RequestError("a replica does not answer; ask again later", status=503, code="not_ready") from None
        for start, *pieces in answers:
            response = _whole_response(start, pieces)
            if response.status_code != 200:
                return response
            texts[response.headers["x-replica"]] = bytes(response.body).decode()
        return Response(merged_metrics(texts), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _forward(self, hint: RoutingHint, request: ForwardedRequest) -> Response:
        """Route a request; retry it on another replica if the first dies before sending anything, or returns 503.

        Raises:
            RequestError: the server is ending, no replica runs, or several have died.
        """
        if self._is_draining:
            raise RequestError("the server is draining; ask again later", status=503, code="not_ready")
        if not (await self._replica_states()).get("RUNNING"):
            raise RequestError("no replica takes requests yet; ask again later", status=503, code="not_ready")
        self._num_running += 1
        try:
            answer = await self._begun(hint, request)
        except BaseException:
            self._ended(request)
            raise
        return answer

    async def _begun(self, hint: RoutingHint, request: ForwardedRequest) -> Response:
        for attempt in range(1, TRIES + 1):
            answer = ForwardedAnswer(self._streams.answer.remote(hint, request), request, self._ended)
            try:
                head = await answer.begin()
            except LOST as error:
                LOG.warning("a replica was lost before it answered, and another is asked: %s", error)
                continue
            if head["status"] == 503 and attempt < TRIES:  # its engine is loaded again
                hint = replace(hint, excluded=hint.excluded | {dict(head["headers"])[REPLICA_HEADER].decode()})
                answer.cancel()
                continue
            return answer
        raise RequestError(f"{TRIES} replicas have died with this request; ask again later", status=503)

    def _ended(self, request: ForwardedRequest) -> None:
        self._num_running -= 1
        self._num_answered += request.scope["method"] == "POST"


async def _keys_of(body: bytes) -> tuple[bytes, ...]:
    """Return the prefix keys of a request body, computed in a thread if the body is large."""
    return prefix_keys(body) if len(body) < LARGE_BODY else await asyncio.to_thread(prefix_keys, body)


def _replica_states() -> dict[str, int]:
    """Return the number of this application's replicas in each of Ray's states."""
    context = serve.get_replica_context()
    found = serve.status().applications[context.app_name].deployments[REPLICA].replica_states
    return {str(state): number for state, number in found.items()}


def _whole_response(start: Message, pieces: Sequence[Message]) -> Response:
    """Return the Starlette response that ASGI messages describe."""
    body = b"".join(piece.get("body", b"") for piece in pieces)
    headers = {name.decode(): value.decode() for name, value in start["headers"]}
    return Response(body, start["status"], headers)


class ForwardedAnswer(Response):
    """A replica's response, streamed to the client message by message.

    Args:
        messages: the ASGI messages of the answer.
        request: what it answers.
        on_end: function that is called with the request when an answer that was sent has ended, however it has.
    """

    def __init__(self, messages: Any, request: ForwardedRequest, on_end: Callable[[ForwardedRequest], None]) -> None:
        self._messages, self._request, self._on_end = messages, request, on_end
        self._first: list[Message] = []

    def cancel(self) -> None:
        """Cancel the call to the replica."""
        self._messages.cancel()

    async def begin(self) -> Message:
        """Wait for the response's start and its first body chunk; return the start.

        Raises:
            RayActorError: the replica has died.
        """
        try:
            head: Message = await anext(self._messages)
            head["headers"] = [one for one in head["headers"] if one[0] != b"x-request-id"]  # Ray's proxy adds it
            self._first = [head, await anext(self._messages)]
            return head
        except BaseException:
            self.cancel()
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response; if the replica dies meanwhile, an SSE stream ends with an error event."""
        try:
            for message in self._first:
                await send(message)
            async for message in self._messages:
                await send(message)
        except LOST:
            await send({"type": "http.response.body", "body": self._error_event(), "more_body": False})
        finally:
            self.cancel()
            self._on_end(self._request)

    def _error_event(self) -> bytes:
        path, headers = self._request.scope["path"], dict(self._request.headers)
        error = RequestError("the replica that wrote this answer has died; ask again", status=503, code="replica_died")
        body = error_body(path, headers[b"x-request-id"].decode(), error)
        event = event_of(body, None if path in UNNAMED_EVENTS else "error")
        return "".join(f"{name}: {value}\n" for name, value in event.items()).encode() + b"\n"
