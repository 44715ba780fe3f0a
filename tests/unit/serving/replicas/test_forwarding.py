"""A request that runs in another process is answered as it would be in its own."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from graphcore.serving.replicas.forwarding import ForwardedRequest, answer_messages

HEADERS = [(b"host", b"h:1"), (b"x-request-id", b"client's"), (b"a", b"1"), (b"a", b"2")]
SCOPE = {
    "type": "http",
    "http_version": "1.1",
    "method": "POST",
    "scheme": "http",
    "path": "/there",
    "raw_path": b"/there",
    "query_string": b"x=1",
    "client": ("192.0.2.1", 5),
    "server": ("h", 1),
    "headers": HEADERS,
    "extensions": {"something": "that does not travel"},
}


def answered(endpoint: Callable[[Request], Any], body: bytes = b"") -> list[dict[str, Any]]:
    app = Starlette(routes=[Route("/there", endpoint, methods=["POST"])])
    request = ForwardedRequest.of(Request(SCOPE), body, "mine")

    async def run() -> list[dict[str, Any]]:
        return [dict(message) async for message in answer_messages(app, request, "r1")]

    return asyncio.run(run())


def test_an_app_sees_the_request_and_the_answer_names_the_replica() -> None:
    async def endpoint(request: Request) -> Response:
        headers = [(name.decode(), value.decode()) for name, value in request.headers.raw]
        found = [
            await request.body() == b"body",
            request.url.path,
            request.url.query,
            headers,
            list(request.client or ()),
        ]
        return JSONResponse(found)

    start, piece = answered(endpoint, b"body")[:2]
    assert start["status"] == 200
    assert (b"x-replica", b"r1") in start["headers"]
    expected = [["host", "h:1"], ["a", "1"], ["a", "2"], ["x-request-id", "mine"]]
    assert JSONResponse([True, "/there", "x=1", expected, ["192.0.2.1", 5]]).body == piece["body"]


def test_pieces_come_as_they_are_sent() -> None:
    async def endpoint(_: Request) -> Response:
        async def pieces() -> Any:
            for number in range(3):
                yield f"{number}"

        return StreamingResponse(pieces())

    assert b"".join(message.get("body", b"") for message in answered(endpoint)) == b"012"


def test_an_error_of_the_app_is_raised() -> None:
    async def endpoint(_: Request) -> Response:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        answered(endpoint)


def test_an_app_learns_that_the_client_has_left_and_ends_before_the_generator_does() -> None:
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((await receive())["type"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        seen.append((await receive())["type"])
        await asyncio.sleep(0.01)
        seen.append("ended")

    async def run() -> None:
        messages = answer_messages(app, ForwardedRequest.of(Request(SCOPE), b"", "mine"), "r1")
        assert (await anext(messages))["status"] == 200
        await messages.aclose()

    asyncio.run(run())
    assert seen == ["http.request", "http.disconnect", "ended"]
