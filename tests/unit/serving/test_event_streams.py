"""The end of a stream of events, as the log and the metrics have it."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from graphcore.serving.event_streams import CLIENT_LEFT, DONE, Event, event_of, until_end
from graphcore.serving.request_errors import RequestError


def stream_of(error: Exception | None, noted: list[tuple[int, str]]) -> AsyncGenerator[Event, None]:
    async def events() -> AsyncGenerator[Event, None]:
        yield {"data": "first"}
        if error is not None:
            raise error

    def note(status: int, message: str) -> None:
        noted.append((status, message))

    stream = until_end(events(), lambda found: event_of({"error": found.message}), note, {"data": DONE})
    assert isinstance(stream, AsyncGenerator)
    return stream


@pytest.mark.parametrize(
    ("error", "last", "expected"),
    [(None, DONE, (200, "")), (RequestError("too long", status=413), '{"error":"too long"}', (413, "too long"))],
)
def test_a_stream_ends_with_its_mark_or_its_error(
    error: Exception | None, last: str, expected: tuple[int, str]
) -> None:
    noted: list[tuple[int, str]] = []

    async def read() -> list[str]:
        return [event["data"] async for event in stream_of(error, noted)]

    assert asyncio.run(read()) == ["first", last]
    assert noted == [expected]


def test_a_fault_of_the_server_is_no_client_that_left() -> None:
    noted: list[tuple[int, str]] = []

    async def read() -> None:
        async for _ in stream_of(KeyError("fault"), noted):
            pass

    with pytest.raises(KeyError, match="fault"):
        asyncio.run(read())
    assert noted == [(500, "")]


def test_a_client_that_leaves_is_noted_as_such() -> None:
    noted: list[tuple[int, str]] = []

    async def leave() -> None:
        stream = stream_of(None, noted)
        await anext(stream)
        await stream.aclose()

    asyncio.run(leave())
    assert noted == [(CLIENT_LEFT, "")]
