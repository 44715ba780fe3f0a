"""What reads one call from text that comes in pieces, whatever its syntax."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from graphcore.serving.tool_formats.json_scanner import JsonScanner
from graphcore.serving.tool_formats.literal_search import LiteralSearch
from graphcore.serving.tool_formats.part_writer import PartWriter

Phase = Callable[[str, int], int]
"""Takes text from a position on and returns the position up to which it was taken."""


class CallReader(ABC):
    """Reads the text of a call and writes its parts.

    Attributes:
        is_complete: whether the call's arguments are whole, so that only its closing tag may be left.
        is_done: whether the call has ended.
        is_broken: whether the text is no call, or no longer: what follows a complete call is not its closing tag.
        taken: pieces of text that were read since the last part was written. Of a broken call they are the answer's;
            behind a complete one they are to be read again, for another call may begin in them.
        behind: end of these texts that is to be read again whatever the call is.

    Args:
        opened: the text that opened the call.
        close: tag after the call; a call without it is a call, too.
    """

    def __init__(self, opened: str, close: str) -> None:
        self.is_complete = False
        self.is_done = False
        self.is_broken = False
        self.taken = [opened]
        self.behind = ""
        self._close = close
        self._is_written = False
        self._phase: Phase = self._begin

    @abstractmethod
    def _begin(self, text: str, at: int) -> int:
        """Take the first text of the call, as a `Phase`."""

    def read(self, text: str, at: int) -> int:
        """Take text from a position on, and return the position up to which it belongs to the call."""
        while at < len(text) and not self.is_done and not self.is_broken:
            before, self._is_written = at, False
            at = self._phase(text, at)
            if self._is_written:
                self.taken[:] = [self.behind] if self.behind else []
            elif at > before:
                self.taken.append(text[before:at])
        return at

    def finish(self, is_cut: bool) -> None:  # noqa: B027 - most readers need no closing tag
        """Take the end of the answer.

        Args:
            is_cut: whether a limit has ended it, so that what is missing would have come.
        """

    def _written(self) -> None:
        """Note that all text so far is in the parts that were written."""
        self._is_written = True

    def _break(self, behind: str = "") -> None:
        self.is_broken, self.behind = True, behind

    def _expect(self, then: Callable[[str], None], *texts: str) -> None:
        """Go on with one of several texts, after white space or not; then call a function with it."""
        begun = ""

        def phase(text: str, at: int) -> int:
            nonlocal begun
            while at < len(text):
                longer = begun + text[at]
                if longer in texts:
                    then(longer)
                    return at + 1
                if any(expected.startswith(longer) for expected in texts):
                    begun = longer
                elif begun or not text[at].isspace():
                    self._break()
                    return at
                at += 1
            return at

        self._phase = phase

    def _end(self) -> None:
        """Note that the arguments are whole and written; go on with the closing tag."""
        self._written()
        self.is_complete = True
        if self._close:
            self._expect(self._closed, self._close)
        else:
            self.is_done = True

    def _closed(self, close: str) -> None:
        self._written()
        self.is_done = True


class StreamingCallReader(CallReader):
    """Reads a call whose arguments are an object in JSON, and writes them as they come.

    Args:
        opened: the text that opened the call.
        close: tag after the call; a call without it is a call, too.
    """

    def __init__(self, writer: PartWriter, opened: str, close: str) -> None:
        super().__init__(opened, close)
        self._writer = writer
        self._scanner = JsonScanner()

    def _stream_arguments(self, text: str, at: int) -> int:
        """Pass on text of the arguments, as a `Phase`."""
        end = self._scanner.scan(text, at)
        self._writer.arguments(text[at:end])
        self._written()
        if self._scanner.is_broken:
            self._break()
        elif self._scanner.is_whole:
            self._end_arguments()
        return end

    def _end_arguments(self) -> None:
        """Go on behind the arguments."""
        self._end()


class BodyCallReader(CallReader):
    """Reads the text of a call up to a literal with which it may end, and writes nothing before.

    Args:
        opened: the text that opened the call.
        close: tag after the call.
        ends: the literals.
    """

    def __init__(self, writer: PartWriter, opened: str, close: str, ends: Iterable[str]) -> None:
        super().__init__(opened, close)
        self._writer = writer
        self._ends = LiteralSearch(ends)
        self._body: list[str] = []
        self._tail = ""  # end of the text so far, if it may begin a literal

    @abstractmethod
    def _end_at(self, literal: str) -> bool:
        """End the call, or break it, at a literal; return False if the literal is part of it."""

    def _body_text(self) -> str:
        """Return the text so far, without the literal at hand."""
        return "".join(self._body) + self._tail

    def _body_end(self, size: int) -> str:
        """Return the last characters of the text so far."""
        found, length = [], 0
        for piece in reversed(self._body):
            found.append(piece)
            length += len(piece)
            if length >= size:
                break
        return "".join(reversed(found))[-size:]

    def _read_body(self, text: str, at: int) -> int:
        """Take text, as a `Phase`."""
        window, start = (self._tail + text[at:], 0) if self._tail else (text, at)
        found, literal = self._ends.search(window, start)
        end = found if literal else found - self._ends.held(window, start)
        self._body.append(window[start:end])
        self._tail = "" if literal else window[end:]
        if literal and not self._end_at(literal):
            self._body.append(literal)
        return len(text) - (len(window) - found - len(literal))

    def _write_call(self, name: str, arguments: str, behind: str = "") -> None:
        """Write a whole call, and end.

        Args:
            behind: text behind the call that was read already.
        """
        self._writer.begin(name)
        self._writer.arguments(arguments)
        self.behind, self.taken[:] = behind, [behind] if behind else []
        self._written()
        self.is_complete = self.is_done = True
