"""POST /v1/responses: requests to ChatCall, as OpenAI has them; openai_response_events.py has the answers.

Nothing is stored: each request has its whole conversation, and a response is not kept.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from graphcore.serving.chat_call import ChatCall, function_tool
from graphcore.serving.fields import ListOf, RequestFields, at_most, parse_request, refuse_unless, reported_names
from graphcore.serving.message_parts import call_arguments, without_billing
from graphcore.serving.openai_chat import tool_choice_of
from graphcore.serving.openai_messages import result_text, text_of
from graphcore.serving.openai_options import (
    SamplingFields,
    StreamOptions,
    format_grammar,
    grammar_of,
    sampling_of_fields,
)
from graphcore.serving.request_errors import RequestError
from graphcore.tokenizer.message_turns import joined_turns

NEUTRAL_RESPONSE_FIELDS: Mapping[str, Sequence[object]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "truncation": ("disabled",),
}
"""Fields that are known and have no effect here, with the values that can be taken."""

ITEM_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Roles of messages that can be given, and what the server makes of them."""

READ_ITEMS = ("message", "reasoning", "function_call", "function_call_output")

MOST_METADATA = 16  # entries of metadata, as in OpenAI's interface

LOGPROBS = "message.output_text.logprobs"  # the value of `include` that asks for log probabilities


def _items_of(value: object) -> object:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ReasoningOptions(RequestFields):
    """How much the model thinks, and whether thoughts come as a summary."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextOptions(RequestFields):
    """The form of the answer's text."""

    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseTool(RequestFields):
    """A tool: a function, as JSON schema."""

    type: Literal["function"]
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class OtherTool(RequestFields):
    """A tool of another kind, such as web_search; the request is answered without the tool."""

    type: str


def _kind_of_tool(value: object) -> str:
    kind = value.get("type") if isinstance(value, Mapping) else None
    return "another tool" if isinstance(kind, str) and kind != "function" else "a function"


AnyTool = Annotated[
    Annotated[ResponseTool, Tag("a function")] | Annotated[OtherTool, Tag("another tool")],
    Discriminator(_kind_of_tool),
]


class ResponsesRequest(SamplingFields):
    """The fields of a request."""

    model: str = ""
    input: Annotated[ListOf[dict[str, Any]], BeforeValidator(_items_of)] = Field(min_length=1)
    instructions: str | None = None
    tools: ListOf[AnyTool] = Field(default_factory=list)
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    max_output_tokens: int | None = Field(None, ge=1)
    max_tool_calls: int | None = None
    top_logprobs: int = Field(0, ge=0, le=20)
    include: ListOf[str] = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    metadata: Annotated[dict[str, str], at_most(MOST_METADATA)] = Field(default_factory=dict)
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    service_tier: str | None = None
    store: bool | None = None
    background: Any = None
    context_management: Any = None
    conversation: Any = None
    moderation: Any = None
    previous_response_id: Any = None
    prompt: Any = None
    truncation: Any = None

    @property
    def functions(self) -> list[ResponseTool]:
        """The tools that the model may call."""
        return [tool for tool in self.tools if isinstance(tool, ResponseTool)]


def read_responses(body: Mapping[str, Any]) -> tuple[ResponsesRequest, ChatCall, list[str]]:
    """Validate a request body; return it typed, the ChatCall made from it, and the names of ignored fields and values.

    Raises:
        RequestError: a field is wrong or cannot be taken; the error names it.
    """
    request, unknown = parse_request(ResponsesRequest, body)
    refuse_unless(request, NEUTRAL_RESPONSE_FIELDS)
    tools, value = _allowed_tools(request)
    choice, name = tool_choice_of(value, [tool.name for tool in tools])
    messages, items = response_messages(request)
    call = ChatCall(
        messages=messages,
        tools=[_chat_tool(tool) for tool in tools],
        tool_choice=choice,
        tool_name=name,
        has_parallel_tools=request.parallel_tool_calls,
        grammar=_text_grammar(request),
        max_new_tokens=request.max_output_tokens or -1,
        sampling=sampling_of_fields(request),
        wants_logprobs=request.top_logprobs > 0 or LOGPROBS in request.include,
        num_top_logprobs=request.top_logprobs,
        options=_thinking_options(request.reasoning.effort),
        ignores_end=request.ignore_eos,
        detects_repetition=request.repetition_detection,
        speculation=request.speculation,
    )
    kinds = [f"tools.{tool.type}" for tool in request.tools if isinstance(tool, OtherTool)]
    values = [f"include.{value}" for value in request.include if value != LOGPROBS]
    return request, call, [*unknown, *reported_names([*kinds, *values, *items])]


def response_messages(request: ResponsesRequest) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Return the conversation of a request in the form of `ChatCall.messages`, and the names of what is left out.

    Items that belong to one answer, which are its thoughts, texts and calls, are one message.

    Raises:
        RequestError: an item of the input has no known form, or none can be read; the error names it.
    """
    instructions = without_billing(request.instructions or "")
    first = [{"role": "system", "content": instructions}] if instructions else []
    names: list[str] = []
    unread = {  # calls of tools that do not run here, such as Codex's local_shell_call
        call_id
        for item in request.input
        if isinstance(call_id := item.get("call_id"), str) and item.get("type") not in READ_ITEMS
    }
    found = [
        message
        for at, item in enumerate(request.input)
        for message in _item_messages(item, f"input[{at}]", names, unread)
    ]
    if not found:
        raise RequestError(f"input has no item that can be read: {', '.join(READ_ITEMS)}", field="input")
    return joined_turns([*first, *found], ["assistant"]), names


def _item_messages(
    item: Mapping[str, Any], where: str, names: list[str], unread: Collection[str]
) -> Iterator[dict[str, Any]]:
    """Yield the message of an item; none for one that cannot be read, such as thoughts that only their sender can.

    Args:
        names: list to which the name of an item or a part that is left out is appended.
        unread: ids of calls that are left out, as their results are.
    """
    kind = item.get("type", "message" if "role" in item else None)
    match kind:
        case "message":
            role = _role(item, where)
            clean = without_billing if role == "system" else str
            text = _text_field(item, "content", where, clean)
            if text or role != "system" or not _text_field(item, "content", where):
                yield {"role": role, "content": text}
        case "reasoning":
            thought = _thought(item, where)
            if thought:
                yield {"role": "assistant", "content": "", "reasoning_content": thought}
            elif item.get("encrypted_content"):
                names.append("input.reasoning.encrypted_content")
        case "function_call":
            yield {"role": "assistant", "content": "", "tool_calls": [_past_call(item, where)]}
        case "function_call_output":
            call_id = _string(item, "call_id", where)
            if item.get("output") is None:
                raise RequestError(f"{where} has no output", field=f"{where}.output")
            text = result_text(item["output"], f"{where}.output", names, "input.function_call_output")
            if call_id not in unread:
                yield {"role": "tool", "tool_call_id": call_id, "content": text}
        case str() if kind != "item_reference":
            names.append(f"input.{kind}")
        case _:
            raise RequestError(
                f"{where}.type={kind!r:.40} cannot be read; send the items themselves, because nothing is stored",
                field=f"{where}.type",
            )


def _role(item: Mapping[str, Any], where: str) -> str:
    role = item.get("role")
    if not isinstance(role, str) or role not in ITEM_ROLES:
        raise RequestError(f"{where}.role={role!r:.40} must be one of {', '.join(ITEM_ROLES)}", field=f"{where}.role")
    return ITEM_ROLES[role]


def _text_field(item: Mapping[str, Any], name: str, where: str, clean: Callable[[str], str] = str) -> str:
    if item.get(name) is None:
        raise RequestError(f"{where} has no {name}", field=f"{where}.{name}")
    return text_of(item[name], f"{where}.{name}", clean)


def _string(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str) or not value:
        raise RequestError(f"{where}.{name} must be a text", field=f"{where}.{name}")
    return value


def _thought(item: Mapping[str, Any], where: str) -> str:
    """Return the text of an earlier thought: its content, or else its summary."""
    for name in ("content", "summary"):
        parts = item.get(name) or []
        if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
            raise RequestError(f"{where}.{name} must be a list of parts", field=f"{where}.{name}")
        text = "\n\n".join(str(part.get("text", "")) for part in parts)
        if text:
            return text
    return ""


def _past_call(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = {"name": _string(item, "name", where), "arguments": call_arguments(item.get("arguments"))}
    return {"id": _string(item, "call_id", where), "type": "function", "function": function}


def _chat_tool(tool: ResponseTool) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {}} if tool.parameters is None else tool.parameters
    described = {} if tool.description is None else {"description": tool.description}
    return function_tool({"name": tool.name, **described, "parameters": parameters, "strict": bool(tool.strict)})


def _allowed_tools(request: ResponsesRequest) -> tuple[list[ResponseTool], Any]:
    """Return the functions that may be called, and tool_choice without the form that chooses some of the tools."""
    choice, functions = request.tool_choice, request.functions
    if choice == "required" and request.tools and not functions:
        kind = request.tools[0].type
        raise RequestError(
            f"tool_choice=required needs a function in tools; one of type {kind!r:.40} cannot be called here",
            field="tool_choice",
        )
    if not isinstance(choice, Mapping) or choice.get("type") == "function":
        return functions, choice
    if choice.get("type") != "allowed_tools":
        raise RequestError(
            f"tool_choice.type={choice.get('type')!r:.40} must be function or allowed_tools: tools of other kinds "
            "cannot be called here",
            field="tool_choice",
        )
    known = {tool.name: tool for tool in functions}
    allowed = choice.get("tools")
    names = [_allowed_name(one, known) for one in allowed] if isinstance(allowed, list) else []
    if not names:
        raise RequestError("tool_choice.tools must name functions of tools", field="tool_choice.tools")
    return [known[name] for name in dict.fromkeys(names)], choice.get("mode", "auto")


def _allowed_name(tool: object, known: Mapping[str, ResponseTool]) -> str:
    """Return the name of a function in tool_choice.tools."""
    kind = tool.get("type", "function") if isinstance(tool, Mapping) else None
    name = tool.get("name") if isinstance(tool, Mapping) else None
    if kind != "function" or not isinstance(name, str) or name not in known:
        raise RequestError(
            f"tool_choice.tools must name functions of tools; {kind!r:.40} {name!r:.60} is none",
            field="tool_choice.tools",
        )
    return name


def _text_grammar(request: ResponsesRequest) -> dict[str, Any]:
    """Return the grammar of the answer's text as a keyword of `Engine.grammar`; empty for free text."""
    own = format_grammar(request.text.format, "text.format") if request.text.format else {}
    other = grammar_of(request)
    if own and other:
        raise RequestError("text.format: an answer can have one grammar, and another is given", field="text.format")
    return own or other


def _thinking_options(effort: str | None) -> dict[str, Any]:
    if effort is None:
        return {}
    return {"reasoning_effort": effort, "enable_thinking": effort not in ("none", "minimal")}
