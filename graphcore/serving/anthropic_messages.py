"""POST /v1/messages and /v1/messages/count_tokens: requests to ChatCall, as Anthropic has them.

anthropic_events.py has the answers.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from graphcore.serving.chat_call import ChatCall, function_tool
from graphcore.serving.fields import ListOf, RequestFields, parse_request, refuse_unless, reported_names
from graphcore.serving.message_parts import call_arguments, left_out, without_billing
from graphcore.serving.openai_options import stops_of_field
from graphcore.serving.request_errors import NO_THREADS, RequestError
from graphcore.tokenizer.message_turns import joined_turns

NEUTRAL_MESSAGE_FIELDS: Mapping[str, Sequence[object]] = {"container": ()}
"""Fields that are known and have no effect here, with the values that can be taken."""

BLOCKS: Mapping[str, Sequence[str]] = {
    "system": ("text",),
    "user": ("text", "document", "search_result", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "tool": ("text", "document", "search_result"),
}
"""Types of blocks that can be read, by the role of their message; those of tool are in a tool_result.

In other messages than a user's and a system's, blocks of other types are left out, and named: what a model or a tool
has said stays in the conversation. A user who asks about a picture must know that it is not seen.
"""

ROLES_OF_MESSAGES = ("user", "assistant", "system")


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
    fields, blocks = _prompt_fields(request)
    call = ChatCall(
        **fields,
        grammar=_output_grammar(request.output_config),
        max_new_tokens=request.max_tokens,
        stop=stops_of_field(request.stop_sequences, "stop_sequences"),
        sampling={name: value for name, value in sampling.items() if value is not None},
    )
    return request, call, [*unknown, *_unused(request), *blocks]


def read_count_tokens(body: Mapping[str, Any]) -> tuple[CountTokensRequest, ChatCall, list[str]]:
    """Return a request, the call whose prompt is to be counted, and the names of fields that are ignored.

    Raises:
        RequestError: a field is wrong or cannot be taken; the error names it.
    """
    request, unknown = parse_request(CountTokensRequest, body)
    fields, blocks = _prompt_fields(request)
    return request, ChatCall(**fields), [*unknown, *_unused(request), *blocks]


def _unused(request: CountTokensRequest) -> list[str]:
    has_budget = request.thinking is not None and request.thinking.budget_tokens is not None
    return ["thinking.budget_tokens"] if has_budget else []


def _prompt_fields(request: CountTokensRequest) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of a ChatCall that make the prompt, and the names of blocks that are left out."""
    if request.thread is not None:
        raise RequestError(
            "thread is not supported, because nothing is stored; leave it out, and send all messages",
            field="thread",
            code=NO_THREADS,
        )
    choice, name = _tool_choice(request)
    names: list[str] = []
    messages, continues_last = _ending(anthropic_turns(request, names))
    fields = {
        "messages": messages,
        "tools": [_chat_tool(tool) for tool in request.tools],
        "tool_choice": choice,
        "tool_name": name,
        "has_parallel_tools": not request.tool_choice.disable_parallel_tool_use,
        "options": _template_options(request),
        "continues_last": continues_last,
    }
    return fields, reported_names(names)


def anthropic_turns(request: CountTokensRequest, names: list[str]) -> list[Mapping[str, Any]]:
    """Return the conversation of a request in the form of `ChatCall.messages`; the blocks of a message are one turn.

    Args:
        names: list to which the names of blocks that are left out are appended.

    Raises:
        RequestError: a message has an unknown role, or a block that cannot be read; the error names it.
    """
    given = [] if request.system is None else [("system", request.system, "system")]
    for at, message in enumerate(request.messages):
        role, where = message.get("role"), f"messages[{at}]"
        if role not in ROLES_OF_MESSAGES:
            roles = ", ".join(ROLES_OF_MESSAGES)
            raise RequestError(f"{where}.role={role!r:.40} must be one of {roles}", field=f"{where}.role")
        given.append((str(role), message.get("content"), f"{where}.content"))
    return [turn for one in given for turn in joined_turns(_blocks_messages(*one, names))]


def _blocks_messages(role: str, content: object, where: str, names: list[str]) -> Iterator[dict[str, Any]]:
    """Yield a message for each block of a content; a text is one block."""
    if isinstance(content, str):
        yield from _text_message(role, content)
        return
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a text or a list of blocks", field=where)
    for at, block in enumerate(content):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind in BLOCKS[role]:
            yield from _block_messages(role, block, f"{where}[{at}]", names)
        elif isinstance(kind, str) and role in ("assistant", "tool"):
            names.append(f"messages.{'tool_result' if role == 'tool' else role}.{kind}")
            if role == "tool":
                yield {"role": role, "content": left_out(kind)}
        else:
            raise RequestError(
                f"{where}[{at}]: a block of type {kind!r:.40} cannot be read here; it must be "
                f"{' or '.join(BLOCKS[role])}",
                field=f"{where}[{at}]",
            )


def _text_message(role: str, text: str) -> Iterator[dict[str, Any]]:
    """Yield the message of a text; none for a system's that is nothing but a billing line."""
    said = without_billing(text) if role == "system" else text
    if said or not text:
        yield {"role": role, "content": said}


def _block_messages(role: str, block: Mapping[str, Any], where: str, names: list[str]) -> Iterator[dict[str, Any]]:
    match block["type"]:
        case "text":
            yield from _text_message(role, _string(block, "text", where))
        case "document":
            yield {"role": role, "content": _document(role, block, where, names)}
        case "search_result":
            found = [block.get("title"), block.get("source"), _nested(block.get("content"), f"{where}.content", names)]
            yield {"role": role, "content": "\n\n".join(text for text in found if isinstance(text, str) and text)}
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
                "content": _nested(block.get("content"), f"{where}.content", names),
            }


def _nested(content: object, where: str, names: list[str]) -> str:
    """Return the text of what a tool has returned: a text, blocks, or nothing."""
    if content is None:
        return ""
    return "\n\n".join(message["content"] for message in _blocks_messages("tool", content, where, names))


def _document(role: str, block: Mapping[str, Any], where: str, names: list[str]) -> str:
    """Return a text document with its title, or a placeholder for another document in a tool result.

    Raises:
        RequestError: the document of a user is no text.
    """
    source = block.get("source")
    kind = source.get("type") if isinstance(source, Mapping) else None
    if isinstance(source, Mapping) and kind == "text":
        text = _string(source, "data", f"{where}.source")
    elif isinstance(source, Mapping) and kind == "content":
        text = _nested(source.get("content"), f"{where}.source.content", names)
    elif role == "tool":
        names.append("messages.tool_result.document")
        return left_out("document")
    else:
        raise RequestError(
            f"{where}: a document with a source of type {kind!r:.40} cannot be read; it must be text or content",
            field=where,
        )
    head = [block.get("title"), block.get("context")]
    return "\n\n".join([*(one for one in head if isinstance(one, str) and one), text])


def _string(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{name} must be a text", field=f"{where}.{name}")
    return value


def _past_use(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = {"name": _string(block, "name", where), "arguments": call_arguments(block.get("input"))}
    return {"id": _string(block, "id", where), "type": "function", "function": function}


def _ending(turns: list[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], bool]:
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
    return function_tool({"name": tool.name, **described, "parameters": tool.input_schema, "strict": bool(tool.strict)})


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
