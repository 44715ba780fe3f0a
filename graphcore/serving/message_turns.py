"""Messages joined to turns: templates of chats want one message for each turn, and interfaces send several."""

from collections.abc import Iterable, Mapping
from typing import Any

TEXTS = ("content", "reasoning_content")


def joined_turns(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in the form of `ChatCall.messages`, those of one role beside each other joined to one.

    Contents, and thoughts, are joined with an empty line between them, and calls are put into one list. Results of
    tools stay apart, because each belongs to a call of its own.
    """
    turns: list[_Turn] = []
    for message in messages:
        if turns and message["role"] == turns[-1].role != "tool":
            turns[-1].append(message)
        else:
            turns.append(_Turn(message))
    return [turn.joined() for turn in turns]


class _Turn:
    """A turn, whose texts are joined at its end: a request may have a million of them."""

    def __init__(self, message: Mapping[str, Any]) -> None:
        self.role = message["role"]
        self._first = message
        self._texts = {name: [message[name]] for name in TEXTS if message.get(name)}
        self._calls = [*message.get("tool_calls", ())]
        self._is_alone = True

    def append(self, message: Mapping[str, Any]) -> None:
        """Append a further message."""
        self._is_alone = False
        for name in TEXTS:
            if message.get(name):
                self._texts.setdefault(name, []).append(message[name])
        self._calls += message.get("tool_calls", ())

    def joined(self) -> dict[str, Any]:
        """Return the turn as one message."""
        if self._is_alone:
            return dict(self._first)
        texts = {name: "\n\n".join(each) for name, each in self._texts.items()}
        return {**self._first, **texts, **({"tool_calls": self._calls} if self._calls else {})}
