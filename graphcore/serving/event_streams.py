"""Streams of server-sent events, and work that ends when the client leaves."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from sse_starlette import EventSourceResponse
from sse_starlette.event import ServerSentEvent
from starlette.requests import ClientDisconnect, Request

from graphcore.serving.request_errors import RequestError

CLIENT_LEFT = 499  # status in the log and the metrics of a request whose client left; nobody reads it
DONE = "[DONE]"
LINE_ENDS = {ord(letter): f"\\u{ord(letter):04x}" for letter in "\x85\u2028\u2029"}
"""Characters of which some clients, such as httpx's `iter_lines`, take each for the end of a line."""

Event = dict[str, str]
Answer = TypeVar("Answer")


def event_of(data: Mapping[str, Any], name: str | None = None) -> Event:
    """Return a server-sent event with JSON as its data."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    if not text.isascii():
        text = text.translate(LINE_ENDS)
    return {"data": text} if name is None else {"event": name, "data": text}


async def until_end(
    events: AsyncGenerator[Event, None],
    error_event: Callable[[RequestError], Event],
    note: Callable[[int, str], None],
    last: Event | None,
) -> AsyncIterator[Event]:
    """Yield events; an error becomes the last one.

    Args:
        error_event: function from an error to its event.
        note: function that is called at the end, whatever it is, with a status and a message.
        last: event after the others; None for none.
    """
    status, message = CLIENT_LEFT, ""
    try:
        async with aclosing(events):
            async for event in events:
                yield event
        if last is not None:
            yield last
        status = 200
    except RequestError as error:
        status, message = error.status, error.message
        yield error_event(error)
    except Exception:  # a fault of the server's own, which uvicorn logs
        status = 500
        raise
    finally:
        note(status, message)


def event_response(
    events: AsyncIterator[Event], ping_seconds: float, send_seconds: float, ping_name: str | None = None
) -> EventSourceResponse:
    """Return the response that sends events.

    Args:
        ping_seconds: seconds between two pings, which keep proxies from closing a silent connection.
        send_seconds: seconds in which a client must take what is sent.
        ping_name: name of the pings' event; None sends comments, which clients do not see.
    """

    def named_ping() -> ServerSentEvent:
        return ServerSentEvent(json.dumps({"type": ping_name}), event=ping_name)

    return EventSourceResponse(
        events,
        ping=ping_seconds,
        ping_message_factory=None if ping_name is None else named_ping,
        send_timeout=send_seconds,
        sep="\n",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


async def until_left(request: Request, work: Coroutine[Any, Any, Answer]) -> Answer:
    """Return the result of some work, which is cancelled when the client leaves.

    Raises:
        ClientDisconnect: the client has left.
    """
    task = asyncio.create_task(work)
    left = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((task, left), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for one in (task, left):
            one.cancel()
        await asyncio.gather(task, left, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    """Return when the client has left; its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
