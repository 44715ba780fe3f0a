"""POST /v1/responses: requests to ChatCall, and parts of the answer to events or one body, as OpenAI has them.

Nothing is stored: each request has its whole conversation, and a response is not kept. The events of a stream:

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
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

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
from graphcore.serving.fields import (
    LONGEST_NAME,
    MOST_NAMES,
    ListOf,
    RequestFields,
    at_most,
    parse_request,
    refuse_unless,
)
from graphcore.serving.message_turns import joined_turns
from graphcore.serving.openai_chat import tool_choice_of
from graphcore.serving.openai_messages import parsed_arguments, text_of
from graphcore.serving.openai_options import (
    SamplingFields,
    StreamOptions,
    format_grammar,
    grammar_of,
    sampling_of_fields,
)
from graphcore.serving.request_errors import RequestError
from graphcore.serving.token_texts import TokenTexts

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

MOST_METADATA = 16  # entries of metadata, as in OpenAI's interface

LOGPROBS = "message.output_text.logprobs"  # the value of `include` that asks for log probabilities

FAILURES: Mapping[int, str] = {429: "rate_limit_exceeded"}
"""OpenAI's code of a failed response, by the error's HTTP status; others are server_error or invalid_prompt."""


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
    call = ChatCall(
        messages=response_messages(request),
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
        speculation=request.speculation,
    )
    return request, call, [*unknown, *_left_out(request)]


def _left_out(request: ResponsesRequest) -> list[str]:
    """Return the names of the tools and of the values of `include` that are not supported, and are ignored."""
    kinds = [f"tools.{tool.type}" for tool in request.tools if isinstance(tool, OtherTool)]
    values = [f"include.{value}" for value in request.include if value != LOGPROBS]
    return [name[:LONGEST_NAME] for name in list(dict.fromkeys([*kinds, *values]))[:MOST_NAMES]]


def response_messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    """Return the conversation of a request in the form of `ChatCall.messages`.

    Raises:
        RequestError: an item of the input is of a kind that cannot be read, or is none; the error names it.
    """
    first = [{"role": "system", "content": request.instructions}] if request.instructions else []
    found = [message for at, item in enumerate(request.input) for message in _item_messages(item, f"input[{at}]")]
    return joined_turns([*first, *found])


def _item_messages(item: Mapping[str, Any], where: str) -> Iterator[dict[str, Any]]:
    """Yield the message of an item; none for thoughts that only their sender can read."""
    kind = item.get("type", "message" if "role" in item else None)
    match kind:
        case "message":
            yield {"role": _role(item, where), "content": _text_field(item, "content", where)}
        case "reasoning":
            thought = _thought(item, where)
            if thought:
                yield {"role": "assistant", "content": "", "reasoning_content": thought}
        case "function_call":
            yield {"role": "assistant", "content": "", "tool_calls": [_past_call(item, where)]}
        case "function_call_output":
            call_id, text = _string(item, "call_id", where), _text_field(item, "output", where)
            yield {"role": "tool", "tool_call_id": call_id, "content": text}
        case _:
            raise RequestError(
                f"{where}.type={kind!r:.40} cannot be read; it must be message, reasoning, function_call or "
                "function_call_output, because nothing is stored and no tool runs here",
                field=f"{where}.type",
            )


def _role(item: Mapping[str, Any], where: str) -> str:
    role = item.get("role")
    if not isinstance(role, str) or role not in ITEM_ROLES:
        raise RequestError(f"{where}.role={role!r:.40} must be one of {', '.join(ITEM_ROLES)}", field=f"{where}.role")
    return ITEM_ROLES[role]


def _text_field(item: Mapping[str, Any], name: str, where: str) -> str:
    if item.get(name) is None:
        raise RequestError(f"{where} has no {name}", field=f"{where}.{name}")
    return text_of(item[name], f"{where}.{name}")


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
    arguments = parsed_arguments(item.get("arguments"), f"{where}.arguments")
    function = {"name": _string(item, "name", where), "arguments": arguments}
    return {"id": _string(item, "call_id", where), "type": "function", "function": function}


def _chat_tool(tool: ResponseTool) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {}} if tool.parameters is None else tool.parameters
    described = {} if tool.description is None else {"description": tool.description}
    function = {"name": tool.name, **described, "parameters": parameters, "strict": bool(tool.strict)}
    return {"type": "function", "function": function}


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
        """Yield the events of the last item's end; an answer without any item gets an empty message."""
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
