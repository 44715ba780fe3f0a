"""Forwarding of an HTTP request to a replica in another process, and of its ASGI response messages back."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

KEPT = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "client", "server")
REPLICA_HEADER = b"x-replica"  # which replica has answered
Message = MutableMapping[str, Any]


@dataclass(frozen=True)
class ForwardedRequest:
    """An HTTP request as plain, picklable data.

    Attributes:
        scope: what ASGI says of it, besides its headers.
        headers: names in lower case, and values.
        body: the body, whole.
    """

    scope: Mapping[str, Any]
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes

    @classmethod
    def of(cls, request: Request, body: bytes, request_id: str) -> "ForwardedRequest":
        """Return a request with its body and the request id that both processes log."""
        headers = [(name, value) for name, value in request.scope["headers"] if name != b"x-request-id"]
        headers.append((b"x-request-id", request_id.encode()))
        return cls({key: request.scope[key] for key in KEPT if key in request.scope}, headers, body)


async def answer_messages(app: ASGIApp, request: ForwardedRequest, replica: str) -> AsyncGenerator[Message, None]:
    """Run an ASGI app and yield its response messages; closing the generator early means a client disconnect.

    Args:
        replica: id of this process, for the header of the answer.
    """
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    has_left = asyncio.Event()
    pending: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]

    async def receive() -> Message:
        if pending:
            return pending.pop()
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), (REPLICA_HEADER, replica.encode())]
        messages.put_nowait(message)

    scope = {**request.scope, "headers": list(request.headers), "asgi": {"version": "3.0"}, "root_path": ""}
    running = asyncio.ensure_future(app(scope, receive, send))
    running.add_done_callback(lambda _: messages.put_nowait(None))
    try:
        while (message := await messages.get()) is not None:
            yield message
        await running
    finally:
        has_left.set()
        await asyncio.wait((running,))
