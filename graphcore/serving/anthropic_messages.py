"""POST /v1/messages and /v1/messages/count_tokens: requests to ChatCall, and parts of the answer to events or one body.

All as Anthropic has them. The events of a stream:

message_start
    content_block_start       a block for each run of parts of one kind: thinking, text, tool_use
    content_block_delta       thinking_delta, text_delta or input_json_delta; repeated; a signature_delta ends thinking
    content_block_stop
message_delta                 why the answer ended, and its tokens
message_stop

An answer that the server has cut short ("interrupted") ends with max_tokens, like one that was too long: clients keep
its text, and do not take it for the whole answer, as they would with end_turn.
"""

import math
import re
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field
from pydantic_core import from_json

from graphcore.serving.chat_call import (
    Began,
    ChatCall,
    Content,
    Ended,
    Part,
    Reasoning,
    TokenRecord,
    ToolCallArguments,
    ToolCallBegin,
    Used,
)
from graphcore.serving.fields import ListOf, RequestFields, parse_request, refuse_unless
from graphcore.serving.message_turns import joined_turns
from graphcore.serving.openai_options import stops_of_field
from graphcore.serving.request_errors import NO_THREADS, RequestError, anthropic_error

_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)

NEUTRAL_MESSAGE_FIELDS: Mapping[str, Sequence[object]] = {"container": ()}
"""Fields that are known and have no effect here, with the values that can be taken."""

BLOCKS: Mapping[str, Sequence[str]] = {
    "system": ("text",),
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "tool": ("text",),
}
"""Types of blocks that can be read, by the role of their message; those of tool are in a tool_result."""

ROLES_OF_MESSAGES = ("user", "assistant", "system")

BILLING = "x-anthropic-billing-header:"
"""Beginning of a block of Claude Code's system prompt that is for Anthropic's bills alone.

It differs in each request, so that with it no request would find its prompt in the cache.
"""

SIGNATURE = "unsigned"  # of thoughts; clients send thoughts back only if they have one, and none is checked here

STOP_REASONS: Mapping[str, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "interrupted": "max_tokens",
}
"""Why an answer ended, by `Ended.finish_reason`."""


class AnthropicTool(RequestFields):
    """A tool: a function, as JSON schema."""

    type: Literal["custom"] | None = None
    name: str = Field(min_length=1)
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class AnthropicToolChoice(RequestFields):
    """Which tool may or must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(RequestFields):
    """Whether the model thinks, and whether the text of thoughts is sent."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Literal["summarized", "omitted"] | None = None


class OutputConfig(RequestFields):
    """The effort of thinking, and the form of the answer's text."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: dict[str, Any] | None = None


class CountTokensRequest(RequestFields):
    """The fields of a request to count the tokens of a prompt."""

    model: str = ""
    messages: ListOf[dict[str, Any]] = Field(min_length=1)
    system: Any = None
    tools: ListOf[AnthropicTool] = Field(default_factory=list)
    tool_choice: AnthropicToolChoice = AnthropicToolChoice(type="auto")
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig = OutputConfig()
    cache_control: Any = None
    speed: Any = None
    thread: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None


class MessagesRequest(CountTokensRequest):
    """The fields of a request for an answer."""

    max_tokens: int = Field(ge=1)
    stop_sequences: ListOf[str] = Field(default_factory=list)
    stream: bool = False
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0)
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    inference_geo: Any = None
    diagnostics: Any = None
    container: Any = None


def read_message_request(body: Mapping[str, Any]) -> tuple[MessagesRequest, ChatCall, list[str]]:
    """Validate a request body; return it typed, the ChatCall made from it, and the names of ignored fields.

    Raises:
        RequestError: a field is wrong or cannot be taken; the error names it.
    """
    request, unknown = parse_request(MessagesRequest, body)
    refuse_unless(request, NEUTRAL_MESSAGE_FIELDS)
    sampling = {"temperature": request.temperature, "top_p": request.top_p, "top_k": request.top_k}
    call = ChatCall(
        **_prompt_fields(request),
        grammar=_output_grammar(request.output_config),
        max_new_tokens=request.max_tokens,
        stop=stops_of_field(request.stop_sequences, "stop_sequences"),
        sampling={name: value for name, value in sampling.items() if value is not None},
    )
    return request, call, [*unknown, *_unused(request)]


def read_count_tokens(body: Mapping[str, Any]) -> tuple[CountTokensRequest, ChatCall, list[str]]:
    """Return a request, the call whose prompt is to be counted, and the names of fields that are ignored.

    Raises:
        RequestError: a field is wrong or cannot be taken; the error names it.
    """
    request, unknown = parse_request(CountTokensRequest, body)
    return request, ChatCall(**_prompt_fields(request)), [*unknown, *_unused(request)]


def _unused(request: CountTokensRequest) -> list[str]:
    has_budget = request.thinking is not None and request.thinking.budget_tokens is not None
    return ["thinking.budget_tokens"] if has_budget else []


def _prompt_fields(request: CountTokensRequest) -> dict[str, Any]:
    """Return the fields of a ChatCall that make the prompt."""
    if request.thread is not None:
        raise RequestError(
            "thread is not supported, because nothing is stored; leave it out, and send all messages",
            field="thread",
            code=NO_THREADS,
        )
    choice, name = _tool_choice(request)
    messages, continues_last = _ending(anthropic_turns(request))
    return {
        "messages": messages,
        "tools": [_chat_tool(tool) for tool in request.tools],
        "tool_choice": choice,
        "tool_name": name,
        "has_parallel_tools": not request.tool_choice.disable_parallel_tool_use,
        "options": _template_options(request),
        "continues_last": continues_last,
    }


def anthropic_turns(request: CountTokensRequest) -> list[dict[str, Any]]:
    """Return the conversation of a request in the form of `ChatCall.messages`.

    Raises:
        RequestError: a message has an unknown role, or a block that cannot be read; the error names it.
    """
    system = [] if request.system is None else _blocks_messages("system", request.system, "system")
    found = [message for message in system if not message["content"].startswith(BILLING)]
    for at, message in enumerate(request.messages):
        role, where = message.get("role"), f"messages[{at}]"
        if role not in ROLES_OF_MESSAGES:
            roles = ", ".join(ROLES_OF_MESSAGES)
            raise RequestError(f"{where}.role={role!r:.40} must be one of {roles}", field=f"{where}.role")
        found += _blocks_messages(str(role), message.get("content"), f"{where}.content")
    return joined_turns(found)


def _blocks_messages(role: str, content: object, where: str) -> Iterator[dict[str, Any]]:
    """Yield a message for each block of a content; a text is one block."""
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a text or a list of blocks", field=where)
    for at, block in enumerate(content):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind not in BLOCKS[role]:
            raise RequestError(
                f"{where}[{at}]: a block of type {kind!r:.40} cannot be read here; it must be "
                f"{' or '.join(BLOCKS[role])}",
                field=f"{where}[{at}]",
            )
        yield from _block_messages(role, block, f"{where}[{at}]")


def _block_messages(role: str, block: Mapping[str, Any], where: str) -> Iterator[dict[str, Any]]:
    match block["type"]:
        case "text":
            yield {"role": role, "content": _string(block, "text", where)}
        case "thinking":
            thought = _string(block, "thinking", where)
            if thought:
                yield {"role": role, "content": "", "reasoning_content": thought}
        case "tool_use":
            yield {"role": role, "content": "", "tool_calls": [_past_use(block, where)]}
        case "tool_result":
            yield {
                "role": "tool",
                "tool_call_id": _string(block, "tool_use_id", where),
                "content": _result(block, where),
            }


def _string(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{name} must be a text", field=f"{where}.{name}")
    return value


def _past_use(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, Mapping):
        raise RequestError(f"{where}.input must be an object", field=f"{where}.input")
    function = {"name": _string(block, "name", where), "arguments": dict(arguments)}
    return {"id": _string(block, "id", where), "type": "function", "function": function}


def _result(block: Mapping[str, Any], where: str) -> str:
    """Return the text of a tool's result: a text, blocks of text, or nothing."""
    content = block.get("content")
    if content is None:
        return ""
    return "\n\n".join(message["content"] for message in _blocks_messages("tool", content, f"{where}.content"))


def _ending(turns: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], bool]:
    """Return a conversation, and whether the answer continues its last turn, the assistant's beginning of an answer."""
    if turns and turns[-1]["role"] == "assistant":
        if "tool_calls" in turns[-1]:
            raise RequestError("messages ends with tool_use; its tool_result must come next", field="messages")
        if turns[-1]["content"]:
            return turns, True
        turns = turns[:-1]
    if not turns:
        raise RequestError("messages has no content", field="messages")
    return turns, False


def _chat_tool(tool: AnthropicTool) -> dict[str, Any]:
    described = {} if tool.description is None else {"description": tool.description}
    function = {"name": tool.name, **described, "parameters": tool.input_schema, "strict": bool(tool.strict)}
    return {"type": "function", "function": function}


def _tool_choice(request: CountTokensRequest) -> tuple[str, str | None]:
    """Return `tool_choice` and `tool_name` of a ChatCall."""
    choice, names = request.tool_choice, [tool.name for tool in request.tools]
    if choice.type == "tool" and choice.name not in names:
        raise RequestError(f"tool_choice.name={choice.name!r:.60} is no tool of tools", field="tool_choice.name")
    if choice.type == "any" and not names:
        raise RequestError("tool_choice.type=any needs tools", field="tool_choice")
    kinds = {"any": "required", "tool": "required"}
    return kinds.get(choice.type, choice.type), choice.name if choice.type == "tool" else None


def _template_options(request: CountTokensRequest) -> dict[str, Any]:
    """Return the variables for the chat template; without `thinking` the template's own default holds."""
    effort, thinking = request.output_config.effort, request.thinking
    options: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if thinking is not None:
        options["enable_thinking"] = thinking.type != "disabled"
    return options


def _output_grammar(config: OutputConfig) -> dict[str, Any]:
    if config.format is None:
        return {}
    schema = config.format.get("schema")
    if config.format.get("type") != "json_schema" or not isinstance(schema, Mapping):
        raise RequestError(
            "output_config.format must have the type json_schema and a schema", field="output_config.format"
        )
    return {"json_schema": dict(schema)}


class MessageBlock:
    """A block of the answer, as it grows.

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
            return {**self.start, "input": mapping_of_arguments(text)}
        signature = {"signature": SIGNATURE} if "signature" in self.start else {}
        return {**self.start, self._field: text, **signature}


def mapping_of_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call as an object that can be sent as JSON.

    Arguments that were cut short are read as far as they go. Numbers beyond the range of floats become its ends, and
    halves of surrogate pairs U+FFFD. Arguments that cannot be read, such as thousands of nested lists or of digits, are
    empty.
    """
    try:
        found = from_json(_ESCAPE.sub(_without_halves, text.strip() or "{}"), allow_partial=True)
    except ValueError:
        return {}
    return _sendable(found) if isinstance(found, dict) else {}


def _without_halves(escape: re.Match[str]) -> str:
    return "\\ufffd" if escape["half"] else escape[0]


def _sendable(value: Any) -> Any:
    """Return a value of JSON with numbers that JSON's readers and Python's writer have room for."""
    if isinstance(value, dict):
        return {name: _sendable(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_sendable(one) for one in value]
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) > sys.float_info.max:
        return math.copysign(sys.float_info.max, 1 if value > 0 else -1)
    return value


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
