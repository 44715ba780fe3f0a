"""Answers of POST /v1/messages: parts to events or one body, as Anthropic has them. The events of a stream:

message_start
    content_block_start       a block for each run of parts of one kind: thinking, text, tool_use
    content_block_delta       thinking_delta, text_delta or input_json_delta; repeated; a signature_delta ends thinking
    content_block_stop
message_delta                 why the answer ended, and its tokens
message_stop

An answer that the server has cut short ("interrupted") ends with max_tokens, like one that was too long: clients keep
its text, and do not take it for the whole answer, as they would with end_turn.
"""

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from graphcore.serving.anthropic_messages import MessagesRequest
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
from graphcore.serving.message_parts import call_arguments
from graphcore.serving.request_errors import RequestError, anthropic_error

SIGNATURE = "unsigned"  # of thoughts; clients send thoughts back only if they have one, and none is checked here

STOP_REASONS: Mapping[str, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "repetition": "max_tokens",
    "tool_calls": "tool_use",
    "interrupted": "max_tokens",
}
"""Why an answer ended, by `Ended.finish_reason`."""


class MessageBlock:
    """A content block of a message that is being generated.

    Args:
        start: the block at its beginning.
        delta: type of its deltas.
        field: field of deltas, and of the whole block unless it is a tool_use, that has the text.
        is_hidden: True if the text is not sent.
    """

    def __init__(self, start: Mapping[str, Any], delta: str, field: str, is_hidden: bool = False) -> None:
        self.start, self.delta, self._field, self._is_hidden = start, delta, field, is_hidden
        self._texts: list[str] = []

    def grow(self, text: str) -> Iterator[dict[str, Any]]:
        """Yield the delta of a piece of text."""
        if not self._is_hidden:
            self._texts.append(text)
            yield {"type": self.delta, self._field: text}

    def end(self) -> Iterator[dict[str, Any]]:
        """Yield the delta of the block's end: a signature, if the block has one."""
        if "signature" in self.start:
            yield {"type": "signature_delta", "signature": SIGNATURE}

    def body(self) -> dict[str, Any]:
        """Return the whole block. Arguments that were cut short are read as far as they go."""
        text = "".join(self._texts)
        if "input" in self.start:
            return {**self.start, "input": call_arguments(text)}
        signature = {"signature": SIGNATURE} if "signature" in self.start else {}
        return {**self.start, self._field: text, **signature}


MessageEvent = tuple[str, dict[str, Any]]


class MessageEvents:
    """The events of an answer, part by part, and the Message object after them.

    Args:
        request: the request.
        message_id: id of the message, "msg_" and letters or digits.

    """

    def __init__(self, request: MessagesRequest, message_id: str) -> None:
        self._blocks: list[MessageBlock] = []
        self._head: dict[str, Any] = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": request.model,
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "container": None,
            "usage": message_usage(Used(0, 0, 0)),
        }
        self._hides_thoughts = request.thinking is not None and request.thinking.display == "omitted"

    @property
    def message(self) -> dict[str, Any]:
        """The Message object as it is after the parts so far."""
        return {**self._head, "content": [block.body() for block in self._blocks]}

    def of(self, part: Part) -> Iterator[MessageEvent]:
        """Yield names and data of the events of a part."""
        for fields in self._of(part):
            yield fields["type"], fields

    def _of(self, part: Part) -> Iterator[dict[str, Any]]:
        match part:
            case Began():
                self._head["usage"] = message_usage(Used(part.prompt_tokens, 0, 0))
                yield {"type": "message_start", "message": self.message}
            case TokenRecord():
                pass
            case Reasoning():
                yield from self._grown(_thinking_block(self._hides_thoughts), part.text)
            case Content():
                yield from self._grown(_text_block(), part.text)
            case ToolCallBegin():
                yield from self._opened(_tool_block(part))
            case ToolCallArguments():
                yield from self._deltas(self._blocks[-1].grow(part.text))
            case Ended():
                yield from self._ended(part)
            case Used():
                self._head["usage"] = message_usage(part)
                yield self._delta_event(part)
                yield {"type": "message_stop"}

    def _grown(self, new: MessageBlock, text: str) -> Iterator[dict[str, Any]]:
        """Yield the events of a piece of text; the new block is begun if the last is of another kind."""
        if not text:
            return
        if not self._blocks or self._blocks[-1].delta != new.delta:
            yield from self._opened(new)
        yield from self._deltas(self._blocks[-1].grow(text))

    def _opened(self, block: MessageBlock) -> Iterator[dict[str, Any]]:
        yield from self._closed()
        self._blocks.append(block)
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block.start}

    def _closed(self) -> Iterator[dict[str, Any]]:
        if self._blocks:
            yield from self._deltas(self._blocks[-1].end())
            yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _deltas(self, deltas: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for delta in deltas:
            yield {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _ended(self, part: Ended) -> Iterator[dict[str, Any]]:
        """Yield the events of the last block's end; an answer without any block gets an empty text."""
        if not self._blocks:
            yield from self._opened(_text_block())
        yield from self._closed()
        reason = "stop_sequence" if part.stop_text is not None else STOP_REASONS[part.finish_reason]
        self._head |= {"stop_reason": reason, "stop_sequence": part.stop_text}

    def _delta_event(self, used: Used) -> dict[str, Any]:
        names = ("container", "stop_details", "stop_reason", "stop_sequence")
        counts = {
            name: value
            for name, value in message_usage(used).items()
            if name not in ("cache_creation", "inference_geo", "service_tier")
        }
        return {"type": "message_delta", "delta": {name: self._head[name] for name in names}, "usage": counts}


def _text_block() -> MessageBlock:
    return MessageBlock({"type": "text", "text": "", "citations": None}, "text_delta", "text")


def _thinking_block(is_hidden: bool) -> MessageBlock:
    start = {"type": "thinking", "thinking": "", "signature": ""}
    return MessageBlock(start, "thinking_delta", "thinking", is_hidden)


def _tool_block(call: ToolCallBegin) -> MessageBlock:
    called = {"type": "tool_use", "id": call.call_id, "name": call.name}
    start = {**called, "input": {}, "caller": {"type": "direct"}}
    return MessageBlock(start, "input_json_delta", "partial_json")


def message_usage(used: Used) -> dict[str, Any]:
    """Return the tokens of a call, as messages have them: `input_tokens` are those that were not cached."""
    return {
        "cache_creation": None,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": used.cached_tokens,
        "inference_geo": None,
        "input_tokens": used.prompt_tokens - used.cached_tokens,
        "output_tokens": used.new_tokens,
        "output_tokens_details": {"thinking_tokens": used.reasoning_tokens},
        "server_tool_use": None,
        "service_tier": "standard",
    }


async def messages_events(
    parts: AsyncIterator[Part], request: MessagesRequest, message_id: str
) -> AsyncIterator[MessageEvent]:
    """Yield names and data of the events of an answer; arguments as for `MessageEvents`.

    Raises:
        RequestError: the parts have raised it before the first; a later one becomes the event "error".
    """
    events = MessageEvents(request, message_id)
    has_begun = False
    try:
        async for part in parts:
            has_begun = True
            for event in events.of(part):
                yield event
    except RequestError as error:
        if not has_begun:
            raise
        yield "error", anthropic_error(error)


async def messages_body(parts: AsyncIterator[Part], request: MessagesRequest, message_id: str) -> dict[str, Any]:
    """Return the Message object of a whole answer; arguments as for `MessageEvents`.

    Raises:
        RequestError: the parts have raised it.
    """
    events = MessageEvents(request, message_id)
    async for part in parts:
        for _ in events.of(part):
            pass
    return events.message
