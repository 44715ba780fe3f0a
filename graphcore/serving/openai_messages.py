"""Messages of OpenAI's chat completions in the one form that the server works with (`ChatCall.messages`)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graphcore.serving.message_parts import call_arguments, left_out, without_billing
from graphcore.serving.request_errors import RequestError

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Roles that can be given, and what the server makes of them; `function` is that of an older interface."""


def chat_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return messages with text content and parsed call arguments, and the names of the parts left out.

    Raises:
        RequestError: a message has an unknown role, a part that is no text, or a call that is none; the error names it.
    """
    names: list[str] = []
    found = [_message(message, f"messages[{at}]", names) for at, message in enumerate(messages)]
    read = [message for message in found if message is not None]
    if not read:
        raise RequestError("messages has no content", field="messages")
    return read, names


def _message(message: Mapping[str, Any], where: str, names: list[str]) -> dict[str, Any] | None:
    """Return a message; None for a system's that has nothing but a billing line.

    Args:
        names: list to which the names of parts that are left out are appended.
    """
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise RequestError(f"{where}.role={role!r:.40} must be one of {', '.join(ROLES)}", field=f"{where}.role")
    content = message.get("content")
    if ROLES[role] == "system":
        text = text_of(content, f"{where}.content", clean=without_billing)
        if not text and text_of(content, f"{where}.content"):
            return None
    elif role == "tool":
        text = result_text(content, f"{where}.content", names, "messages.tool")
    else:
        text = text_of(content, f"{where}.content")
    found: dict[str, Any] = {"role": ROLES[role], "content": text}
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


def text_of(content: object, where: str, clean: Callable[[str], str] = str) -> str:
    """Return the text of a content: a text, or a list of text parts; None is an empty one.

    Args:
        clean: function of the text, or of that of each part.

    Raises:
        RequestError: it is neither, or has a part of another kind; the error names it.
    """
    return "".join(clean(text) for text in _texts(content, where, _refuse_part))


def result_text(content: object, where: str, names: list[str], prefix: str) -> str:
    """Return the text of what a tool has returned, with a note in the place of each part that is no text.

    Args:
        names: list to which `prefix` and the type of each such part are appended, as in "messages.tool.image_url".

    Raises:
        RequestError: it is no text and no list of parts with a type; the error names it.
    """

    def other(kind: str, _: str) -> str:
        names.append(f"{prefix}.{kind}")
        return left_out(kind)

    return "".join(_texts(content, where, other))


def _texts(content: object, where: str, other: Callable[[str, str], str]) -> list[str]:
    """Return the texts of a content; `other` returns that of a part of another kind, whose type and place it gets."""
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a text or a list of parts", field=where)
    texts = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping) or not isinstance(kind, str):
            raise RequestError(f"{where}[{at}] must be an object with a type and a text", field=f"{where}[{at}]")
        if kind in ("text", "input_text", "output_text", "refusal"):
            text = part.get("text", part.get("refusal"))
            if not isinstance(text, str):
                raise RequestError(f"{where}[{at}].text must be a text", field=f"{where}[{at}].text")
            texts.append(text)
        else:
            texts.append(other(kind, f"{where}[{at}]"))
    return texts


def _refuse_part(kind: str, where: str) -> str:
    raise RequestError(f"{where}: a part of type {kind!r:.40} cannot be read; this model takes text alone", field=where)


def _call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} must have a function with a name", field=where)
    named = {"name": function["name"], "arguments": call_arguments(function.get("arguments"))}
    return {"id": str(call.get("id") or ""), "type": "function", "function": named}
