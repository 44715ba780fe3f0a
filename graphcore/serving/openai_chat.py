"""POST /v1/chat/completions: requests to ChatCall, and parts of the answer to chunks or one body."""

from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

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
    function_tool,
)
from graphcore.serving.fields import ListOf, RequestFields, parse_request, refuse_unless, reported_names
from graphcore.serving.openai_messages import chat_messages
from graphcore.serving.openai_options import (
    SamplingFields,
    StreamOptions,
    grammar_of,
    sampling_of_fields,
    stops_of_field,
)
from graphcore.serving.request_errors import RequestError
from graphcore.serving.token_texts import TokenTexts

NEUTRAL_FIELDS: Mapping[str, Sequence[object]] = {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "web_search_options": (),
    "best_of": (1,),
    "use_beam_search": (False,),
    "chat_template": (),
}
"""Fields that are known and have no effect here, with the values that can be taken."""

FINISH_REASONS: Mapping[str, str] = {"interrupted": "length"}  # OpenAI has no word for an answer that was cut short


class ToolFields(RequestFields):
    """A tool: a function, as JSON schema."""

    type: Literal["function"] = "function"
    function: dict[str, Any]


class ChatRequest(SamplingFields):
    """The fields of a request; those of NEUTRAL_FIELDS are known, too."""

    messages: ListOf[dict[str, Any]] = Field(min_length=1)
    model: str = ""
    n: int = Field(1, ge=1)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: str | ListOf[str] | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    tools: ListOf[ToolFields] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    verbosity: str | None = None
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    prediction: Any = None
    service_tier: Any = None
    store: Any = None
    web_search_options: Any = None
    best_of: Any = None
    use_beam_search: Any = None
    chat_template: Any = None


def read_chat(body: Mapping[str, Any]) -> tuple[ChatRequest, ChatCall, list[str]]:
    """Validate a request body; return it typed, the ChatCall made from it, and the names of what is ignored.

    Raises:
        RequestError: a field is wrong or cannot be taken; the error names it.
    """
    request, unknown = parse_request(ChatRequest, body)
    refuse_unless(request, NEUTRAL_FIELDS)
    choice, name = tool_choice_of(request.tool_choice, [tool.function.get("name") for tool in request.tools])
    if request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs=true", field="top_logprobs")
    most = request.max_completion_tokens or request.max_tokens
    messages, names = chat_messages(request.messages)
    call = ChatCall(
        messages=messages,
        tools=[function_tool(tool.function) for tool in request.tools],
        tool_choice=choice,
        tool_name=name,
        has_parallel_tools=request.parallel_tool_calls,
        grammar=grammar_of(request, request.response_format),
        max_new_tokens=-1 if most is None else most,
        stop=stops_of_field(request.stop),
        num_answers=request.n,
        sampling=sampling_of_fields(request),
        wants_logprobs=request.logprobs,
        num_top_logprobs=request.top_logprobs,
        options=template_options(request),
        continues_last=request.continue_final_message,
        ignores_end=request.ignore_eos,
        detects_repetition=request.repetition_detection,
        speculation=request.speculation,
    )
    return request, call, [*unknown, *reported_names(names)]


def template_options(request: ChatRequest) -> dict[str, Any]:
    """Return the variables for the chat template: chat_template_kwargs, and the effort of thinking."""
    if "chat_template" in request.chat_template_kwargs:
        raise RequestError(
            "chat_template_kwargs.chat_template is refused: the server renders its model's own template",
            field="chat_template_kwargs",
        )
    if not request.add_generation_prompt and not request.continue_final_message:
        raise RequestError(
            "add_generation_prompt=false is only possible with continue_final_message=true",
            field="add_generation_prompt",
        )
    options = dict(request.chat_template_kwargs)
    if request.reasoning_effort is not None:
        options.setdefault("reasoning_effort", request.reasoning_effort)
        options.setdefault("enable_thinking", request.reasoning_effort not in ("none", "minimal"))
    return options


def tool_choice_of(value: str | Mapping[str, Any], names: Sequence[object]) -> tuple[str, str | None]:
    """Return which tool may or must be called: "auto", "none" or "required", and the function that must be.

    Raises:
        RequestError: the value is none of OpenAI's forms, names no tool, or needs tools and there are none.
    """
    if isinstance(value, Mapping):
        function = value.get("function", value)
        name = function.get("name") if isinstance(function, Mapping) else None
        if value.get("type") != "function" or name not in names:
            raise RequestError(f"tool_choice names {name!r}, which is no function of tools", field="tool_choice")
        return "required", str(name)
    if value not in ("auto", "none", "required"):
        raise RequestError(
            f"tool_choice={value!r:.40} must be auto, none, required, or name a function", field="tool_choice"
        )
    if value == "required" and not names:
        raise RequestError("tool_choice=required needs tools", field="tool_choice")
    return ("auto" if not names else value), None


def usage_body(used: Used) -> dict[str, Any]:
    """Return the tokens of a call, as OpenAI has them."""
    return {
        "prompt_tokens": used.prompt_tokens,
        "completion_tokens": used.new_tokens,
        "total_tokens": used.prompt_tokens + used.new_tokens,
        "prompt_tokens_details": {"cached_tokens": used.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": used.reasoning_tokens},
    }


class ChatChunks:
    """The chunks of a streamed answer.

    Args:
        head: fields of all chunks: id, created, model.
        texts: texts of single tokens.
        num_answers: number of answers.
        options: the request's stream_options.
    """

    def __init__(self, head: Mapping[str, Any], texts: TokenTexts, num_answers: int, options: StreamOptions) -> None:
        self._head = {**head, "object": "chat.completion.chunk"}
        self._texts, self._num_answers, self._options = texts, num_answers, options
        self._records: dict[int, list[dict[str, Any]]] = {}

    def of(self, part: Part) -> list[dict[str, Any]]:
        """Return the chunks of a part."""
        match part:
            case Began():
                return [self._chunk(at, {"role": "assistant", "content": ""}) for at in range(self._num_answers)]
            case TokenRecord():
                self._records.setdefault(part.choice, []).append(self._texts.chat_record(part))
                return []
            case Used():
                return [{**self._head, "choices": [], "usage": usage_body(part)}] if self._options.include_usage else []
            case Ended():
                return [self._chunk(part.choice, {}, FINISH_REASONS.get(part.finish_reason, part.finish_reason))]
            case _:
                return [self._chunk(part.choice, delta_of(part))]

    def _chunk(self, choice: int, delta: Mapping[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        records = self._records.pop(choice, None)
        logprobs = {"content": records, "refusal": None} if records else None
        one = {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        usage = {"usage": None} if self._options.include_usage else {}
        return {**self._head, "choices": [one], **usage}


def delta_of(part: Reasoning | Content | ToolCallBegin | ToolCallArguments) -> dict[str, Any]:
    """Return the delta of a part of an answer. Thinking has both names that clients read."""
    match part:
        case Reasoning():
            return {"reasoning_content": part.text, "reasoning": part.text}
        case Content():
            return {"content": part.text}
        case ToolCallBegin():
            function = {"name": part.name, "arguments": ""}
            return {"tool_calls": [{"index": part.index, "id": part.call_id, "type": "function", "function": function}]}
        case ToolCallArguments():
            return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}


async def chat_body(
    parts: AsyncIterator[Part], head: Mapping[str, Any], texts: TokenTexts, call: ChatCall
) -> dict[str, Any]:
    """Return the body of a whole answer; arguments as for `ChatChunks`."""
    choices: dict[int, _Choice] = defaultdict(_Choice)  # made as they come: only the parts know whether n is allowed
    usage: dict[str, Any] = {}
    async for part in parts:
        match part:
            case Began():
                pass
            case Used():
                usage = usage_body(part)
            case TokenRecord():
                choices[part.choice].records.append(texts.chat_record(part))
            case Ended():
                choices[part.choice].finish_reason = FINISH_REASONS.get(part.finish_reason, part.finish_reason)
            case _:
                choices[part.choice].append(part)
    bodies = [choices[at].body(at, call.wants_logprobs) for at in range(call.num_answers)]
    return {**head, "object": "chat.completion", "choices": bodies, "usage": usage}


class _Choice:
    """One answer, as it grows."""

    def __init__(self) -> None:
        self.content, self.reasoning = list[str](), list[str]()
        self.calls: list[dict[str, Any]] = []
        self.records: list[dict[str, Any]] = []
        self.finish_reason = "stop"

    def append(self, part: Reasoning | Content | ToolCallBegin | ToolCallArguments) -> None:
        """Append a part."""
        match part:
            case Reasoning():
                self.reasoning.append(part.text)
            case Content():
                self.content.append(part.text)
            case ToolCallBegin():
                function = {"name": part.name, "arguments": ""}
                self.calls.append({"id": part.call_id, "type": "function", "function": function})
            case ToolCallArguments():
                self.calls[part.index]["function"]["arguments"] += part.text

    def body(self, index: int, has_logprobs: bool) -> dict[str, Any]:
        """Return the answer as OpenAI has it."""
        content, reasoning = "".join(self.content), "".join(self.reasoning)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content or (None if self.calls else ""),
            "refusal": None,
            "annotations": [],
        }
        if reasoning:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if self.calls:
            message["tool_calls"] = self.calls
        logprobs = {"content": self.records, "refusal": None} if has_logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": self.finish_reason}
