"""Messages in the form that the published chat template of a family reads."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from graphcore.serving.tool_formats.tool_format import ToolFormat

Message = Mapping[str, Any]


def template_messages(format: ToolFormat, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages of a call for a chat template.

    The arguments of calls become mappings, and results get the `name` of the call that they answer. A list of no calls
    is left out, since templates take a turn that has one for a turn with calls. Where a family makes one call a turn, a
    turn with several becomes several, each followed by its result. Where the template raises for both text and thoughts
    beside a call (gpt-oss), the text is added to the thoughts. Where it reads results as `tool_responses` of the turn
    with the calls (Gemma 4 as first published), they are moved there.

    Args:
        messages: turns as in `ChatCall.messages`; they are not changed.
    """
    names: dict[str, str] = {}
    found: list[dict[str, Any]] = []
    left = [dict(message) for message in messages]
    while left:
        message = left.pop(0)
        calls = [_with_mapping(call) for call in message.pop("tool_calls", None) or ()]
        names |= {call["id"]: call["function"]["name"] for call in calls if "id" in call}
        if message.get("role") == "tool":
            found.append(_with_name(message, names))
        elif not calls:
            found.append(message)
        else:
            results = [_with_name(result, names) for result in _results(left)]
            del left[: len(results)]
            found += _turns(_spoken({**message, "tool_calls": calls}, format), results, format)
    return found


def _turns(message: dict[str, Any], results: Sequence[dict[str, Any]], format: ToolFormat) -> list[dict[str, Any]]:
    """Return a turn with calls and the results that follow it."""
    if format.embeds_results and results:
        responses = [{"name": result.get("name", ""), "response": result.get("content")} for result in results]
        return [{**message, "tool_responses": responses}]
    if format.is_parallel or len(message["tool_calls"]) == 1:
        return [message, *results]
    found: list[dict[str, Any]] = []
    for call in message["tool_calls"]:
        turn = message if not found else {"role": "assistant", "content": ""}
        found += [{**turn, "tool_calls": [call]}]
        found += [result for result in results if result.get("tool_call_id") == call.get("id")]
    return found + [result for result in results if result not in found]


def _results(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the tools' results with which the messages begin."""
    others = (at for at, message in enumerate(messages) if message.get("role") != "tool")
    return [dict(message) for message in messages[: next(others, len(messages))]]


def _with_mapping(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call whose arguments are a mapping, unless they are a text that is no JSON object."""
    function = call["function"]
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {**call, "function": {**function, "arguments": arguments}}


def _with_name(result: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    name = names.get(str(result.get("tool_call_id")))
    return result if name is None or result.get("name") else {**result, "name": name}


def _spoken(message: dict[str, Any], format: ToolFormat) -> dict[str, Any]:
    """Return a turn with calls, its text among the thoughts where the template takes only one of them."""
    content, thoughts = message.get("content"), message.get("reasoning_content")
    if not (format.joins_content_to_thoughts and thoughts and isinstance(content, str) and content):
        return message
    return {**message, "reasoning_content": f"{thoughts}\n{content}", "content": ""}
