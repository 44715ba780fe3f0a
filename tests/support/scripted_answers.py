"""Answers as parts, for tests of the interfaces that turn parts into events and bodies."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable
from typing import TypeVar

from pydantic import BaseModel

from graphcore.engine.output import TokenLogprob
from graphcore.serving.chat_call import (
    Began,
    Content,
    Ended,
    Part,
    Reasoning,
    TokenRecord,
    ToolCallArguments,
    ToolCallBegin,
    Used,
)
from graphcore.serving.request_errors import RequestError

CALLS: list[Part] = [
    ToolCallBegin(0, "call_1", "get_weather"),
    ToolCallArguments(0, '{"city": '),
    ToolCallArguments(0, '"Par\\u00eds"}'),
    ToolCallBegin(1, "call_2", "get_time"),
    ToolCallArguments(1, "{}"),
]
THOUGHT: list[Part] = [Reasoning("I must "), Reasoning("look it up.")]
TEXT: list[Part] = [Content("It is "), Content(""), Content("sunny.")]


def answer(parts: list[Part], finish_reason: str = "stop", stop_text: str | None = None) -> list[Part]:
    """Return the parts of an answer of 20 prompt tokens, 16 of them cached, and 9 new tokens, 4 of them thoughts."""
    return [Began(20), *parts, Ended(finish_reason, stop_text), Used(20, 16, 9, 4)]


ANSWERS: dict[str, list[Part]] = {
    "text": answer(TEXT),
    "stop string": answer(TEXT, stop_text="END"),
    "thought and text": answer([*THOUGHT, *TEXT]),
    "calls": answer(CALLS, "tool_calls"),
    "everything, twice": answer([*THOUGHT, *TEXT, *CALLS, *THOUGHT, *TEXT], "tool_calls"),
    "nothing": answer([]),
    "cut text": answer(TEXT, "length"),
    "cut thought": answer(THOUGHT, "length"),
    "cut call": answer([*TEXT, *CALLS[:2]], "length"),
    "interrupted text": answer(TEXT, "interrupted"),
}
RECORDS: list[Part] = [
    TokenRecord(5, -0.25, (TokenLogprob(5, -0.25), TokenLogprob(7, -1.5))),
    TokenRecord(6, -0.5, (TokenLogprob(6, -0.5),)),
]
FAILURE = RequestError("the request has failed inside the server", status=500)
ValueT = TypeVar("ValueT")


async def streamed(parts: Iterable[Part], error: RequestError | None = None) -> AsyncIterator[Part]:
    """Yield parts, then raise an error if there is one."""
    for part in parts:
        await asyncio.sleep(0)
        yield part
    if error is not None:
        raise error


def collected(values: AsyncIterator[ValueT]) -> list[ValueT]:
    """Return all values of an asynchronous iterator."""

    async def collect() -> list[ValueT]:
        return [value async for value in values]

    return asyncio.run(collect())


def finished(value: Awaitable[ValueT]) -> ValueT:
    """Return the value that a coroutine returns."""

    async def wait() -> ValueT:
        return await value

    return asyncio.run(wait())


def unknown_fields(value: object, where: str = "") -> list[str]:
    """Return the fields of a client's object, at any depth, that its classes do not have."""
    found: list[str] = []
    if isinstance(value, BaseModel):
        found = [f"{where}.{name}" for name in value.model_extra or ()]
        for name in value.model_fields_set - set(value.model_extra or ()):
            found += unknown_fields(getattr(value, name), f"{where}.{name}")
    elif isinstance(value, list):
        for one in value:
            found += unknown_fields(one, f"{where}[]")
    return found
