"""POST /v1/messages and /v1/messages/count_tokens: requests to ChatCall, as Anthropic has them.

anthropic_events.py has the answers.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from graphcore.serving.chat_call import (
    ChatCall,
)
from graphcore.serving.fields import ListOf, RequestFields, parse_request, refuse_unless
from graphcore.tokenizer.message_turns import joined_turns
from graphcore.serving.openai_options import stops_of_field
from graphcore.serving.request_errors import NO_THREADS, RequestError

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
