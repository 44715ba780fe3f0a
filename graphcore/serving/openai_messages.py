"""Messages of OpenAI's chat completions in the one form that the server works with (`ChatCall.messages`)."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from graphcore.serving.guard import DEEPEST, depth_of
from graphcore.serving.request_errors import RequestError

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Roles that can be given, and what the server makes of them; `function` is that of an older interface."""


def chat_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with texts as content and mappings as arguments of calls.

    Raises:
        RequestError: a message has an unknown role, a part that is no text, or a call that is none; the error names it.
    """
    return [_message(message, f"messages[{at}]") for at, message in enumerate(messages)]


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise RequestError(f"{where}.role={role!r:.40} must be one of {', '.join(ROLES)}", field=f"{where}.role")
    found: dict[str, Any] = {"role": ROLES[role], "content": text_of(message.get("content"), f"{where}.content")}
    if isinstance(message.get("name"), str):
        found["name"] = message["name"]
    if role == "assistant":
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(reasoning, str) and reasoning:
            found["reasoning_content"] = reasoning
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list):
            raise RequestError(f"{where}.tool_calls must be a list", field=f"{where}.tool_calls")
        if calls:
            found["tool_calls"] = [_call(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(calls)]
    if role == "tool":
        if not isinstance(message.get("tool_call_id"), str):
            raise RequestError(f"{where} has no tool_call_id", field=f"{where}.tool_call_id")
        found["tool_call_id"] = message["tool_call_id"]
    if role != "assistant" and message.get("content") is None:
        raise RequestError(f"{where} has no content", field=f"{where}.content")
    return found


def text_of(content: object, where: str) -> str:
    """Return the text of a content: a text, or a list of text parts; None is an empty one.

    Raises:
        RequestError: it is neither, or has a part of another kind; the error names it.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a text or a list of parts", field=where)
    texts = []
    for at, part in enumerate(content):
        texts.append(_text_of_part(part, f"{where}[{at}]"))
    return "".join(texts)


def _text_of_part(part: object, where: str) -> str:
    if not isinstance(part, Mapping):
        raise RequestError(f"{where} must be an object with a type and a text", field=where)
    kind, text = part.get("type"), part.get("text", part.get("refusal"))
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise RequestError(
            f"{where}: a part of type {kind!r:.40} cannot be read; this model takes text alone", field=where
        )
    if not isinstance(text, str):
        raise RequestError(f"{where}.text must be a text", field=f"{where}.text")
    return text


def _call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} must have a function with a name", field=where)
    arguments = parsed_arguments(function.get("arguments"), f"{where}.function.arguments")
    named = {"name": function["name"], "arguments": arguments}
    return {"id": str(call.get("id") or ""), "type": "function", "function": named}


def parsed_arguments(arguments: object, where: str) -> dict[str, Any]:
    """Return the arguments of an earlier call as a mapping, given as one or as JSON text.

    Raises:
        RequestError: they are no JSON object; the error names them.
    """
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping) or depth_of(arguments) > DEEPEST:
        raise RequestError(f"{where} must be the text of a JSON object, not nested too deeply", field=where)
    return dict(arguments)
