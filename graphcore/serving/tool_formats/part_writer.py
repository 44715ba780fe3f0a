"""Parts of one answer, collected while its text is parsed."""

import secrets

from graphcore.serving.chat_call import Content, Part, Reasoning, ToolCallArguments, ToolCallBegin


class PartWriter:
    """Writes parts; neighbouring pieces of the same text become one part.

    Args:
        choice: index of the answer.

    Attributes:
        num_calls: calls that have begun.
    """

    def __init__(self, choice: int) -> None:
        self.num_calls = 0
        self._choice = choice
        self._parts: list[Part] = []
        self._kind: type[Reasoning] | type[Content] | type[ToolCallArguments] | None = None
        self._pieces: list[str] = []

    def reasoning(self, text: str) -> None:
        """Write a piece of thoughts."""
        self._write(Reasoning, text)

    def content(self, text: str) -> None:
        """Write a piece of the answer's text."""
        self._write(Content, text)

    def begin(self, name: str) -> None:
        """Begin a call."""
        self._close_part()
        call_id = f"call_{secrets.token_hex(12)}"
        self._parts.append(ToolCallBegin(self.num_calls, call_id, name, self._choice))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Write a piece of the arguments of the last call that began."""
        self._write(ToolCallArguments, text)

    def taken(self) -> list[Part]:
        """Return what was written since the last time."""
        self._close_part()
        parts, self._parts = self._parts, []
        return parts

    def _write(self, kind: type[Reasoning] | type[Content] | type[ToolCallArguments], text: str) -> None:
        if not text:
            return
        if kind is not self._kind:
            self._close_part()
            self._kind = kind
        self._pieces.append(text)

    def _close_part(self) -> None:
        text, kind = "".join(self._pieces), self._kind
        self._pieces, self._kind = [], None
        if kind is ToolCallArguments:
            self._parts.append(ToolCallArguments(self.num_calls - 1, text, self._choice))
        elif kind is Reasoning:
            self._parts.append(Reasoning(text, self._choice))
        elif kind is Content:
            self._parts.append(Content(text, self._choice))
