"""Messages in the form that the published chat template of a family reads."""

import hashlib
import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from graphcore.serving.tool_formats.tool_format import ToolFormat
from graphcore.serving.tool_formats.written_calls import written_calls
from graphcore.tokenizer.marked_messages import texts_in

Message = Mapping[str, Any]

_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_PRIVATE_USE = range(0xE000, 0xF900)
_SYSTEM = "You are a helpful assistant with some tools."  # of Phi 4 mini's model card


class StandIns:
    """Letters that stand for markup in messages, so that a message that spells markup is told from markup itself.

    Args:
        messages: messages without these letters, which are of Unicode's private-use area.

    Attributes:
        markup: the markup that each letter stands for.
    """

    def __init__(self, messages: Sequence[Message]) -> None:
        used = frozenset(chain.from_iterable(texts_in(list(messages))))
        self._free = (letter for letter in map(chr, _PRIVATE_USE) if letter not in used)
        self._letters: dict[str, str] = {}
        self.markup: dict[str, str] = {}

    def __call__(self, markup: str) -> str:
        """Return the letter for a markup; the markup itself if there is none left."""
        if markup and markup not in self._letters:
            letter = self._letters[markup] = next(self._free, markup)
            self.markup[letter] = markup
        return self._letters.get(markup, markup)


def template_messages(
    format: ToolFormat,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] = (),
    mark: Callable[[str], str] = str,
) -> list[dict[str, Any]]:
    """Return the messages of a call for a chat template.

    The arguments of calls become mappings, and results get the `name` of the call that they answer. A list of no calls
    is left out, since templates take a turn that has one for a turn with calls. Where a family makes one call a turn, a
    turn with several becomes several, each followed by its result. The rest is as the family's `MessageForm` says: a
    template that shows an answer's content alone gets the calls in it, in the family's syntax.

    Args:
        messages: turns as in `ChatCall.messages`; they are not changed.
        tools: functions that the template shows; most templates read them beside the messages.
        mark: function that returns what stands for markup that is written into a message, such as `StandIns`.
    """
    names: dict[str, str] = {}
    found: list[dict[str, Any]] = []
    left = deque(dict(message) for message in messages)
    while left:
        message = left.popleft()
        calls = [_with_mapping(call) for call in message.pop("tool_calls", None) or ()]
        names |= {call["id"]: call["function"]["name"] for call in calls if "id" in call}
        if message.get("role") == "tool":
            found += _linked([], [message], names)[1]
        elif not calls:
            found.append(message)
        else:
            results: list[dict[str, Any]] = []
            while left and left[0].get("role") == "tool":
                results.append(left.popleft())
            calls, results = _linked(calls, results, names)
            found += _turns(_spoken({**message, "tool_calls": calls}, format), results, format)
    shaped = list(chain.from_iterable(_shaped(message, format, mark) for message in found))
    return _with_system_tools(shaped, tools) if format.messages.tools_in_system and tools else shaped


def _shaped(message: dict[str, Any], format: ToolFormat, mark: Callable[[str], str]) -> list[dict[str, Any]]:
    """Return the turns of the template for a turn."""
    form = format.messages
    if message.get("role") == "tool":
        message = {**message, "role": form.result_role}
        return [_with_short_id(message, "tool_call_id", form.id_length)]
    if message.get("role") != "assistant":
        return [message]
    if form.has_thinking_parts:
        message = _with_thinking_part(message)
    calls = [_with_short_id(call, "id", form.id_length) for call in message.get("tool_calls") or ()]
    if not calls:
        return [message]
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    if form.calls_are_metadata:
        said = [rest] if rest.get("content") else []
        return [*said, *({"role": "assistant", **_metadata(call)} for call in calls)]
    if form.writes_calls:
        return [{**rest, "content": (rest.get("content") or "") + written_calls(format, calls, mark)}]
    return [{**message, "tool_calls": calls}]


def _metadata(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {"metadata": call["function"]["name"], "content": arguments}


def _with_short_id(fields: dict[str, Any], name: str, length: int) -> dict[str, Any]:
    """Return a call or a result whose id has so many letters and digits; the same one for the same id."""
    given = str(fields.get(name, ""))
    if not length or (len(given) == length and given.isascii() and given.isalnum()):
        return fields
    digits = hashlib.sha256(given.encode("utf-8", "surrogatepass")).digest()[:length]
    return {**fields, name: "".join(_LETTERS[digit % len(_LETTERS)] for digit in digits)}


def _with_thinking_part(message: dict[str, Any]) -> dict[str, Any]:
    """Return a turn whose thoughts are a part of its content."""
    thoughts, content = message.get("reasoning_content"), message.get("content")
    if not thoughts or not isinstance(content, str | None):
        return message
    parts = [{"type": "thinking", "thinking": thoughts}, *([{"type": "text", "text": content}] if content else [])]
    return {**{name: value for name, value in message.items() if name != "reasoning_content"}, "content": parts}


def _with_system_tools(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose first is the system's, with the tools as a text."""
    listed = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    if messages and messages[0].get("role") == "system":
        return [{**messages[0], "tools": listed}, *messages[1:]]
    return [{"role": "system", "content": _SYSTEM, "tools": listed}, *messages]


def _linked(
    calls: list[dict[str, Any]], results: Sequence[dict[str, Any]], names: Mapping[str, str]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return calls with unique ids, and tool results with the id and the name of the call that they answer.

    Clients leave ids out or repeat them: such calls take the results in order, and the last one takes what is left.

    Args:
        names: function names by id of the calls so far, for a result that answers none of `calls`.
    """
    waiting: dict[object, deque[dict[str, Any]]] = {}  # linear, since a request may have a hundred thousand calls
    is_unique = len({call.get("id") or None for call in calls} - {None}) == len(calls)
    own = calls if is_unique else [{**call, "id": f"{call.get('id') or 'call'}_{at}"} for at, call in enumerate(calls)]
    for given, call in zip(calls, own, strict=True):
        waiting.setdefault(given.get("id"), deque()).append(call)
    found: list[dict[str, Any]] = []
    for result in results:
        same, name = waiting.get(result.get("tool_call_id")), names.get(str(result.get("tool_call_id")))
        if same is not None:
            call = same.popleft() if len(same) > 1 else same[0]
            name, result = call["function"]["name"], {**result, "tool_call_id": call.get("id")}
        found.append(result if name is None or result.get("name") else {**result, "name": name})
    return own, found


def _turns(message: dict[str, Any], results: Sequence[dict[str, Any]], format: ToolFormat) -> list[dict[str, Any]]:
    """Return the messages of the template for an assistant message with tool calls and the results behind it."""
    calls = message["tool_calls"]
    if format.messages.embeds_results and results:
        responses = [{"name": result.get("name", ""), "response": result.get("content")} for result in results]
        return [{**message, "tool_responses": responses}]
    if format.is_parallel or len(calls) == 1:
        return [message, *results]
    by_id: dict[object, list[dict[str, Any]]] = {}
    for result in results:
        by_id.setdefault(result.get("tool_call_id"), []).append(result)
    found: list[dict[str, Any]] = []
    for call in calls:
        turn = message if not found else {"role": "assistant", "content": ""}
        found += [{**turn, "tool_calls": [call]}, *by_id.pop(call["id"], ())]
    return [*found, *chain.from_iterable(by_id.values())]


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


def _spoken(message: dict[str, Any], format: ToolFormat) -> dict[str, Any]:
    """Return a turn with calls, its text among the thoughts where the template takes only one of them."""
    content, thoughts = message.get("content"), message.get("reasoning_content")
    if not (format.messages.joins_content_to_thoughts and thoughts and isinstance(content, str) and content):
        return message
    return {**message, "reasoning_content": f"{thoughts}\n{content}", "content": ""}
