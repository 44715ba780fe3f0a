"""What reads one call from text that comes in pieces, whatever its syntax."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from graphcore.serving.tool_formats.json_scanner import JsonScanner
from graphcore.serving.tool_formats.part_writer import PartWriter

Phase = Callable[[str, int], int]
"""Takes text from a position on and returns the position up to which it was taken."""


class CallReader(ABC):
    """Reads the text of a call and writes its parts.

    Attributes:
        is_complete: whether the call's arguments are whole, so that only its closing tag may be left.
        is_done: whether the call has ended.
        is_broken: whether the text is no call, or no longer: what follows a complete call is not its closing tag.
        taken: pieces of text that were read since the last part was written. Of a broken call they are the answer's.

    Args:
        opened: the text that opened the call.
        close: tag after the call; a call without it is a call, too.
    """

    def __init__(self, opened: str, close: str) -> None:
        self.is_complete = False
        self.is_done = False
        self.is_broken = False
        self.taken = [opened]
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
                self.taken.clear()
            elif at > before:
                self.taken.append(text[before:at])
        return at

    def finish(self) -> None:  # noqa: B027 - most readers need no closing tag
        """Take the end of the answer."""

    def _written(self) -> None:
        """Note that all text so far is in the parts that were written."""
        self._is_written = True

    def _break(self) -> None:
        self.is_broken = True

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
