"""Answers of POST /v1/responses: parts to events or one body, as OpenAI has them. The events of a stream:

response.created, response.in_progress
    response.output_item.added                 an item for each run of parts of one kind
        response.content_part.added            of messages and thoughts
            response.output_text.delta         or .reasoning_text.delta, .function_call_arguments.delta; repeated
            response.output_text.done
        response.content_part.done
    response.output_item.done
response.completed, or response.incomplete, or response.failed

A request that sets `reasoning.summary` gets the model's thoughts as the summary, others get them as content: clients
that ask for summaries show nothing else. An answer that the server has cut short ("interrupted") is incomplete because
of max_output_tokens, like one that was too long: of the reasons that OpenAI has, this is the one for which all clients
keep the text and do not take it for the whole answer.
"""

import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
from graphcore.serving.openai_responses import ResponsesRequest
from graphcore.serving.request_errors import RequestError
from graphcore.serving.token_texts import TokenTexts

FAILURES: Mapping[int, str] = {429: "rate_limit_exceeded"}
"""OpenAI's code of a failed response, by the error's HTTP status; others are server_error or invalid_prompt."""


def response_head(request: ResponsesRequest, response_id: str, created: int) -> dict[str, Any]:
    """Return a Response object at its beginning; it repeats what was asked.

    `temperature` and `top_p` are 1 unless they were given; `store` is false, because nothing is stored.
    """
    text = {"format": _format_body(request.text.format or {"type": "text"})}
    thinking = request.reasoning
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "frequency_penalty": request.frequency_penalty or 0.0,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata,
        "model": request.model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls,
        "presence_penalty": request.presence_penalty or 0.0,
        "previous_response_id": None,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": thinking.effort, "summary": thinking.summary or thinking.generate_summary},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": text | ({"verbosity": request.text.verbosity} if request.text.verbosity else {}),
        "tool_choice": request.tool_choice,
        "tools": [tool.model_dump() for tool in request.functions],
        "top_logprobs": request.top_logprobs,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": request.user,
    }


def _format_body(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return a format of the text with all fields that a Response's has."""
    defaults = {"name": "answer", "description": None, "strict": False} if asked.get("type") == "json_schema" else {}
    return {**defaults, **{name: value for name, value in asked.items() if value is not None}}


@dataclass(frozen=True)
class ItemKind:
    """A kind of item of the output, and how its events are called.

    Attributes:
        prefix: beginning of the item's id.
        item: fields of a new item.
        text_event: event for pieces of its text, without ".delta" and ".done".
        text_field: field that has the whole text in the event's ".done".
        part: the part that has the text; None if the item itself has it.
        part_event: event for the part, without ".added" and ".done".
        part_field: list of the item that has the part, with part_field + "_index" as its place in events.
    """

    prefix: str
    item: Mapping[str, Any]
    text_event: str
    text_field: str = "text"
    part: Mapping[str, Any] | None = None
    part_event: str = "response.content_part"
    part_field: str = "content"


MESSAGE = ItemKind(
    "msg",
    {"type": "message", "role": "assistant", "content": []},
    "response.output_text",
    part={"type": "output_text", "annotations": [], "logprobs": [], "text": ""},
)
THOUGHT = ItemKind(
    "rs",
    {"type": "reasoning", "summary": [], "content": []},
    "response.reasoning_text",
    part={"type": "reasoning_text", "text": ""},
)
SUMMARY = ItemKind(
    "rs",
    {"type": "reasoning", "summary": []},
    "response.reasoning_summary_text",
    part={"type": "summary_text", "text": ""},
    part_event="response.reasoning_summary_part",
    part_field="summary",
)
FUNCTION_CALL = ItemKind(
    "fc",
    {"type": "function_call", "arguments": ""},
    "response.function_call_arguments",
    text_field="arguments",
)

NamedEvent = tuple[str, dict[str, Any]]


class OutputItem:
    """An item of the output, as it grows; its methods yield names and fields of events.

    Args:
        kind: kind of the item.
        item_id: id of the item.
        output_index: place of the item in the output.
        fields: fields of the new item besides the kind's.
    """

    def __init__(self, kind: ItemKind, item_id: str, output_index: int, fields: Mapping[str, Any]) -> None:
        self.kind = kind
        self._item = {"id": item_id, **kind.item, **fields}
        self._index = {"output_index": output_index}
        part_index = {} if kind.part is None else {f"{kind.part_field}_index": 0}
        self._place = {"item_id": item_id, **self._index, **part_index}
        self._texts: list[str] = []
        self._records: list[dict[str, Any]] = []

    def begin(self) -> Iterator[NamedEvent]:
        """Yield the events of a new item."""
        yield "response.output_item.added", {**self._index, "item": {**self._item, "status": "in_progress"}}
        if self.kind.part is not None:
            yield f"{self.kind.part_event}.added", {**self._place, "part": self.kind.part}

    def grow(self, text: str, records: Sequence[dict[str, Any]]) -> Iterator[NamedEvent]:
        """Yield the event of a piece of text.

        Args:
            records: log probabilities of its tokens; only messages have them.
        """
        self._texts.append(text)
        self._records += records
        yield f"{self.kind.text_event}.delta", {**self._place, "delta": text, **self._logprobs(records)}

    def end(self, status: str) -> Iterator[NamedEvent]:
        """Yield the events of the item's end."""
        text = "".join(self._texts)
        more = self._logprobs(self._records)
        yield f"{self.kind.text_event}.done", {**self._place, self.kind.text_field: text, **more}
        if self.kind.part is not None:
            yield f"{self.kind.part_event}.done", {**self._place, "part": {**self.kind.part, "text": text, **more}}
        yield "response.output_item.done", {**self._index, "item": self.body(status)}

    def body(self, status: str) -> dict[str, Any]:
        """Return the item as it is in the output."""
        text = "".join(self._texts)
        if self.kind.part is None:
            return {**self._item, self.kind.text_field: text, "status": status}
        part = {**self.kind.part, "text": text, **self._logprobs(self._records)}
        return {**self._item, self.kind.part_field: [part], "status": status}

    def _logprobs(self, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"logprobs": list(records)} if self.kind is MESSAGE else {}


class ResponseEvents:
    """The events of a response, part by part, and the Response object after them.

    Args:
        request: the request.
        response_id: id of the response, "resp_" and letters or digits; ids of items are made from it.
        created: Unix time of the request, seconds.
        texts: texts of tokens, for log probabilities; None leaves them out.
        now: function that returns the Unix time, for `completed_at`.

    Attributes:
        response: the Response object as it is after the parts so far.
    """

    def __init__(
        self,
        request: ResponsesRequest,
        response_id: str,
        created: int,
        texts: TokenTexts | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.response = response_head(request, response_id, created)
        self._thought = SUMMARY if self.response["reasoning"]["summary"] else THOUGHT
        self._id, self._texts, self._now = response_id.removeprefix("resp_"), texts, now
        self._item: OutputItem | None = None
        self._records: list[dict[str, Any]] = []
        self._num_events = 0

    def of(self, part: Part) -> Iterator[NamedEvent]:
        """Yield names and data of the events of a part."""
        return self._numbered(self._of(part))

    def failed(self, error: RequestError) -> Iterator[NamedEvent]:
        """Yield names and data of the events of an error after the response has begun."""
        return self._numbered(self._failed(error))

    def _numbered(self, events: Iterator[NamedEvent]) -> Iterator[NamedEvent]:
        for name, fields in events:
            yield name, {"type": name, "sequence_number": self._num_events, **fields}
            self._num_events += 1

    def _of(self, part: Part) -> Iterator[NamedEvent]:
        match part:
            case Began():
                yield "response.created", {"response": dict(self.response)}
                yield "response.in_progress", {"response": dict(self.response)}
            case TokenRecord():
                if self._texts is not None:
                    self._records.append(self._texts.chat_record(part))
            case Reasoning():
                yield from self._grown(self._thought, part.text)
            case Content():
                yield from self._grown(MESSAGE, part.text)
            case ToolCallBegin():
                yield from self._opened(FUNCTION_CALL, {"call_id": part.call_id, "name": part.name})
            case ToolCallArguments():
                yield from self._grown(FUNCTION_CALL, part.text)
            case Ended():
                yield from self._ended(part)
            case Used():
                self.response |= {"usage": response_usage(part)}
                yield f"response.{self.response['status']}", {"response": dict(self.response)}

    def _grown(self, kind: ItemKind, text: str) -> Iterator[NamedEvent]:
        """Yield the events of a piece of text; a new item is begun if the last is of another kind."""
        if not text:
            return
        records, self._records = self._records, []
        if self._item is None or self._item.kind is not kind:
            yield from self._opened(kind, {})
        assert self._item is not None, "an item was begun"
        yield from self._item.grow(text, records)

    def _opened(self, kind: ItemKind, fields: Mapping[str, Any]) -> Iterator[NamedEvent]:
        yield from self._closed("completed")
        at = len(self.response["output"])
        self._item = OutputItem(kind, f"{kind.prefix}_{self._id}_{at}", at, fields)
        yield from self._item.begin()

    def _closed(self, status: str) -> Iterator[NamedEvent]:
        item, self._item = self._item, None
        if item is not None:
            yield from item.end(status)
            self.response["output"] = [*self.response["output"], item.body(status)]

    def _ended(self, part: Ended) -> Iterator[NamedEvent]:
        """Yield the events that close the last output item; an answer without items gets an empty message."""
        is_whole = part.finish_reason in ("stop", "tool_calls")
        status = "completed" if is_whole else "incomplete"
        if self._item is None:
            yield from self._opened(MESSAGE, {})
        yield from self._closed(status)
        if is_whole:
            self.response |= {"status": status, "completed_at": int(self._now())}
        else:
            self.response |= {"status": status, "incomplete_details": {"reason": "max_output_tokens"}}

    def _failed(self, error: RequestError) -> Iterator[NamedEvent]:
        yield from self._closed("incomplete")
        code = FAILURES.get(error.status, "server_error" if error.status >= 500 else "invalid_prompt")
        self.response |= {"status": "failed", "error": {"code": code, "message": error.message}}
        yield "response.failed", {"response": dict(self.response)}


def response_usage(used: Used) -> dict[str, Any]:
    """Return the tokens of a call, as responses have them."""
    return {
        "input_tokens": used.prompt_tokens,
        "input_tokens_details": {"cached_tokens": used.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": used.new_tokens,
        "output_tokens_details": {"reasoning_tokens": used.reasoning_tokens},
        "total_tokens": used.prompt_tokens + used.new_tokens,
    }


async def responses_events(
    parts: AsyncIterator[Part],
    request: ResponsesRequest,
    response_id: str,
    created: int,
    texts: TokenTexts | None = None,
    now: Callable[[], float] = time.time,
) -> AsyncIterator[NamedEvent]:
    """Yield names and data of the events of an answer; arguments as for `ResponseEvents`.

    Raises:
        RequestError: the parts have raised it before the first; a later one becomes the event response.failed.
    """
    events = ResponseEvents(request, response_id, created, texts, now)
    has_begun = False
    try:
        async for part in parts:
            has_begun = True
            for event in events.of(part):
                yield event
    except RequestError as error:
        if not has_begun:
            raise
        for event in events.failed(error):
            yield event


async def responses_body(
    parts: AsyncIterator[Part],
    request: ResponsesRequest,
    response_id: str,
    created: int,
    texts: TokenTexts | None = None,
    now: Callable[[], float] = time.time,
) -> dict[str, Any]:
    """Return the Response object of a whole answer; arguments as for `ResponseEvents`.

    Raises:
        RequestError: the parts have raised it.
    """
    events = ResponseEvents(request, response_id, created, texts, now)
    async for part in parts:
        for _ in events.of(part):
            pass
    return events.response
