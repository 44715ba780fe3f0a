"""A conversation to answer and the parts of its answer, whatever interface asked for it.

/v1/chat/completions    openai_chat.py          \\                                 /   chunks
/v1/responses           openai_responses.py      >  ChatCall  -->  Part, Part  -->     events
/v1/messages            anthropic_messages.py   /                                  \\   or one body
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from graphcore.engine.output import TokenLogprob


@dataclass(frozen=True)
class ChatCall:
    """A conversation to answer.

    Attributes:
        messages: turns, oldest first, in the form of OpenAI's chat completions: `role` (system, user, assistant or
            tool) and `content`, a text; an assistant's may also have `reasoning_content` and `tool_calls`, each
            {"id", "type": "function", "function": {"name", "arguments": a mapping}}; a tool's has `tool_call_id`.
        tools: functions that the model may call, {"type": "function", "function": {"name", "description",
            "parameters": a JSON schema, "strict": bool}}.
        tool_choice: "auto", "none" or "required".
        tool_name: the one function that must be called; None if any may be. With "required".
        has_parallel_tools: whether one answer may have several calls.
        grammar: a keyword of `Engine.grammar` and its value, such as {"json_schema": {...}}; empty for free text.
        max_new_tokens: most tokens of an answer; -1 is as many as the context allows.
        stop: texts that end an answer.
        num_answers: number of answers.
        sampling: keywords of `Engine.submit` that are fields of `SamplingParams`.
        wants_logprobs: whether the log probability of each token is asked for.
        num_top_logprobs: likeliest tokens that are asked for at each token's place.
        options: variables that the chat template reads.
        ignores_end: whether tokens that end an answer are ignored, for measurements.
        detects_repetition: whether an answer ends that repeats one span (`Engine.submit`).
        speculation: "off" to check no draft tokens; None is the server's setting.
        continues_last: whether the answer continues the text of the last message, the assistant's.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str = "auto"
    tool_name: str | None = None
    has_parallel_tools: bool = True
    grammar: Mapping[str, Any] = field(default_factory=dict)
    max_new_tokens: int = -1
    stop: Sequence[str] = ()
    num_answers: int = 1
    sampling: Mapping[str, Any] = field(default_factory=dict)
    wants_logprobs: bool = False
    num_top_logprobs: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    continues_last: bool = False
    ignores_end: bool = False
    detects_repetition: bool = False
    speculation: str | None = None


_NULLS = ("const", "default")  # keywords of JSON schemas for which null is a value
_SCHEMAS = (
    *("items", "prefixItems", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else"),
    *("anyOf", "oneOf", "allOf"),
)
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def function_tool(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool of `ChatCall.tools`; fields that are null are left out, also those inside of its schema."""
    fields = {name: value for name, value in function.items() if value is not None}
    if "parameters" in fields:
        fields["parameters"] = _without_nulls(fields["parameters"])
    return {"type": "function", "function": fields}


def _without_nulls(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_nulls(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _NAMED_SCHEMAS and isinstance(value, Mapping):
            found[name] = {key: _without_nulls(one) for key, one in value.items()}
        elif name in _SCHEMAS:
            found[name] = _without_nulls(value)
        else:
            found[name] = value
    return {name: value for name, value in found.items() if value is not None or name in _NULLS}


@dataclass(frozen=True)
class Began:
    """The first part: the request was accepted.

    Attributes:
        prompt_tokens: tokens of the prompt.
    """

    prompt_tokens: int


@dataclass(frozen=True)
class Reasoning:
    """A piece of the text in which the model thinks.

    Attributes:
        choice: index of the answer, from 0; also in the other parts.
    """

    text: str
    choice: int = 0


@dataclass(frozen=True)
class Content:
    """A piece of the answer's text."""

    text: str
    choice: int = 0


@dataclass(frozen=True)
class ToolCallBegin:
    """The beginning of a call.

    Attributes:
        index: number of the call in its answer, from 0.
        call_id: id of the call, unique.
        name: the function.
    """

    index: int
    call_id: str
    name: str
    choice: int = 0


@dataclass(frozen=True)
class ToolCallArguments:
    """A piece of the JSON text of a call's arguments; the pieces of a call make one valid object.

    Attributes:
        index: number of the call in its answer.
    """

    index: int
    text: str
    choice: int = 0


@dataclass(frozen=True)
class TokenRecord:
    """The log probability of a token, before the parts that its text belongs to."""

    token_id: int
    logprob: float
    top: "tuple[TokenLogprob, ...]"
    choice: int = 0


@dataclass(frozen=True)
class Ended:
    """The end of one answer.

    Attributes:
        finish_reason: "stop", "length", "tool_calls", "repetition" (if that was to be detected) or "interrupted" (the
            server is ending, or a time limit).
        stop_text: the stop string that ended it; None for another end.
    """

    finish_reason: str
    stop_text: str | None = None
    choice: int = 0


@dataclass(frozen=True)
class Used:
    """The last part: the tokens of the whole call.

    Attributes:
        prompt_tokens: tokens of the prompt.
        cached_tokens: those of them that the KV cache held already.
        new_tokens: tokens of all answers.
        reasoning_tokens: those of them that belong to `Reasoning`.
        calls_in_thoughts: calls that were read from thoughts which an answer did not close.
    """

    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    reasoning_tokens: int = 0
    calls_in_thoughts: int = 0


Part: TypeAlias = Began | Reasoning | Content | ToolCallBegin | ToolCallArguments | TokenRecord | Ended | Used
