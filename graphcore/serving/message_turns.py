"""Messages joined to turns: templates of chats want one message for each turn, and interfaces send several."""

from collections.abc import Iterable, Mapping
from typing import Any


def joined_turns(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in the form of `ChatCall.messages`, those of one role beside each other joined to one.

    Contents, and thoughts, are joined with an empty line between them, and calls are put into one list. Results of
    tools stay apart, because each belongs to a call of its own.
    """
    turns: list[dict[str, Any]] = []
    for message in messages:
        if turns and message["role"] == turns[-1]["role"] != "tool":
            _append(turns[-1], message)
        else:
            turns.append(dict(message))
    return turns


def _append(turn: dict[str, Any], message: Mapping[str, Any]) -> None:
    for name in ("content", "reasoning_content"):
        texts = [text for text in (turn.get(name), message.get(name)) if text]
        if texts:
            turn[name] = "\n\n".join(texts)
    calls = [*turn.get("tool_calls", ()), *message.get("tool_calls", ())]
    if calls:
        turn["tool_calls"] = calls
