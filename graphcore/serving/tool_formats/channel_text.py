"""Splits an answer of gpt-oss, which consists of messages in channels (OpenAI's harmony format).

    <|channel|>analysis<|message|>thoughts<|end|><|start|>assistant
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>

transformers has no template for it, and its ResponseParser would give the arguments only at their end.
"""

import re
from collections.abc import Callable, Container

from graphcore.serving.tool_formats.call_reader import StreamingCallReader
from graphcore.serving.tool_formats.literal_search import LiteralSearch
from graphcore.serving.tool_formats.part_writer import PartWriter
from graphcore.serving.tool_formats.tool_format import ToolFormat
from graphcore.tokenizer.text_stream import StopStrings

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_ROLE = "assistant"
_RECIPIENT = re.compile(r"(?:^|[\s>])to=([^\s<]+)")
_THOUGHTS = re.compile(re.escape(_CHANNEL) + r"\s*analysis\b")
_FUNCTIONS = "functions."
_MOST_HEADER = 300  # characters


class ChannelText:
    """Splits the text of an answer. Two messages of one kind are separated by a line break.

    A call stands in a message with a header of its own, so that thoughts hold none.

    Args:
        tools: names of the tools.
        prompt_tail: end of the prompt.
        stops: what ends the answer's content.
    """

    def __init__(
        self, known: ToolFormat, tools: Container[str], writer: PartWriter, prompt_tail: str, stops: StopStrings
    ) -> None:
        self.calls_in_thoughts = 0
        self.is_drafting = False
        self._format = known
        self._tools = tools
        self._writer = writer
        self._stops = stops
        self._in_message = LiteralSearch([*_ENDS, _START, _CHANNEL])
        self._in_header = LiteralSearch([_MESSAGE, *_ENDS, _START])
        self._ends = LiteralSearch(_ENDS)
        self._header = ""
        self._has_role = True  # whether the header's role was read already
        self._waiting = ""
        self._write: Callable[[str], None] = writer.content
        self._separator = ""  # before the next text of the message
        self._space: list[str] = []  # white space between messages
        self._kinds: list[Callable[[str], None]] = []  # of messages with text so far
        self._reader: ArgumentsReader | None = None
        self._step: Callable[[str, int], int] = self._take_header
        self._resume(prompt_tail)

    def _resume(self, prompt_tail: str) -> None:
        """Go on where the prompt ends: in a header, in a message, or between messages."""
        begun = prompt_tail.rpartition(_START)[2] if _START in prompt_tail else _ROLE
        header, message, body = begun.rpartition(_MESSAGE)
        if not message:
            self._header = begun.removeprefix(_ROLE)
        elif any(end in body for end in _ENDS):
            self._step = self._take_between
        else:
            self._header = header.removeprefix(_ROLE)
            self._open_message()

    def push(self, text: str) -> None:
        """Take a piece of the answer; nothing of it behind a stop string."""
        text, at = self._waiting + text, 0
        while at < len(text) and self._stops.found is None:
            step, after = self._step, self._step(text, at)
            if after == at and step == self._step:
                break
            at = after
        self._waiting = text[at:]

    def finish(self, is_cut: bool) -> None:
        """Take the end of the answer."""
        waiting, self._waiting = self._waiting, ""
        if self._stops.found is not None:
            return
        if self._reader is not None:
            if waiting not in _ENDS or not self._reader.has_begun:
                self._read(self._reader, waiting, 0)
            if self._reader is not None:
                self._put("".join(self._reader.taken))
        elif self._step == self._take_message:
            self._put(waiting)
        elif self._step == self._take_header and _RECIPIENT.search(self._header):
            self._leave_header(waiting)
        self._end_message()

    def _put(self, text: str) -> None:
        """Write text of a message."""
        if self._write == self._writer.content:
            text = self._stops.push(text).text
        self._write_text(text)

    def _end_message(self) -> None:
        """Write the end of a message that may have begun a stop string."""
        if self._stops.found is None:
            self._write_text(self._stops.flush())

    def _write_text(self, text: str) -> None:
        if text:
            self._write(self._separator + text)
            self._separator = ""
            self._kinds.append(self._write)

    def _open(self, write: Callable[[str], None]) -> None:
        """Begin a message, a line behind the last of its kind."""
        self._write = write
        self._separator = "\n" if write in self._kinds else ""
        self._step = self._take_message

    def _take_between(self, text: str, at: int) -> int:
        """Take text outside of messages; it is content, unless it is only white space."""
        found, literal = self._in_message.search(text, at)
        if not literal:
            found -= self._in_message.held(text, at)
        after = min(found, len(text) - len(text[at:].lstrip()))
        self._space.append(text[at:after])
        if after < found:
            self._open(self._writer.content)
            self._put("".join(self._space))
            self._space.clear()
            return after
        if literal:
            self._space.clear()
        return self._after_text(found, literal)

    def _take_message(self, text: str, at: int) -> int:
        found, literal = self._in_message.search(text, at)
        if not literal:
            found -= self._in_message.held(text, at)
        self._put(text[at:found])
        return self._after_text(found, literal)

    def _after_text(self, found: int, literal: str) -> int:
        """Go on with what a literal begins, and return the position behind it."""
        if literal:
            self._end_message()
            self._step = self._take_between if literal in _ENDS else self._take_header
            self._has_role = literal == _CHANNEL
            self._header = literal if literal == _CHANNEL else ""
        return found + len(literal)

    def _take_header(self, text: str, at: int) -> int:
        found, literal = self._in_header.search(text, at)
        if not literal:
            found -= self._in_header.held(text, at)
        end = min(found, at + _MOST_HEADER - len(self._header))
        longer = self._header + text[at:end]
        if not self._may_be_header(longer):
            self._leave_header("")
            return at
        self._header = longer
        if end < found or len(longer) == _MOST_HEADER:
            self._leave_header("")
        elif literal == _MESSAGE:
            self._open_message()
            return end + len(literal)
        elif literal:
            self._leave_header("")
        return end

    def _may_be_header(self, header: str) -> bool:
        """Return whether a text is a header or the beginning of one."""
        if not self._has_role:
            if not header.startswith(_ROLE):
                return _ROLE.startswith(header)
            header = header.removeprefix(_ROLE)
        begun = header.lstrip()
        return any(begun.startswith(mark) or mark.startswith(begun) for mark in ("to=", _CHANNEL))

    def _leave_header(self, message: str) -> None:
        """Go on with a text that was taken for a header as text of an answer."""
        self._open(self._writer.content)
        self._put(self._header + message)

    def _open_message(self) -> None:
        """Begin the message of a header: thoughts, an answer's text, or a call."""
        recipient = _RECIPIENT.search(self._header)
        if recipient is None:
            self._open(self._writer.reasoning if _THOUGHTS.search(self._header) else self._writer.content)
            return
        name = recipient[1].removeprefix(_FUNCTIONS)
        is_extra = self._writer.num_calls > 0 and not self._format.is_parallel
        if name == recipient[1] or name not in self._tools or is_extra:
            self._leave_header(_MESSAGE)
        else:
            self._reader = ArgumentsReader(self._writer, name, self._header + _MESSAGE)
            self._step = self._take_call

    def _take_call(self, text: str, at: int) -> int:
        """Take text of a call; a control token at the end of the text waits, for it may end the answer."""
        assert self._reader is not None, "a call has its reader"
        end = len(text) - self._ends.held(text, at, with_whole=True)
        return self._read(self._reader, text[:end], at) if at < end else at

    def _read(self, reader: "ArgumentsReader", text: str, at: int) -> int:
        at = reader.read(text, at)
        if reader.is_done:
            self._reader, self._step = None, self._take_between
        elif reader.is_broken:
            self._reader = None
            self._open(self._writer.content)
            self._put("".join(reader.taken))
        return at


class ArgumentsReader(StreamingCallReader):
    """Reads a call's arguments, an object in JSON, and writes them as they come; no text is no arguments.

    Args:
        name: the function.
        opened: header of the message.

    Attributes:
        has_begun: whether the call was written.
    """

    def __init__(self, writer: PartWriter, name: str, opened: str) -> None:
        super().__init__(writer, opened, "")
        self.has_begun = False
        self._name = name

    def _begin(self, text: str, at: int) -> int:
        self._expect(self._begun, "{", *_ENDS)
        return at

    def _begun(self, found: str) -> None:
        self.has_begun = True
        self._writer.begin(self._name)
        self._written()
        if found in _ENDS:
            self._writer.arguments("{}")
            self._end()
        else:
            self._writer.arguments(found)
            self._scanner.scan(found)
            self._phase = self._stream_arguments
