"""Splits an answer at tags: <think> thoughts </think> text <tool_call> a call </tool_call>.

White space between these parts belongs to the markup and is left out.
"""

from collections.abc import Callable, Mapping
from typing import Any

from graphcore.serving.tool_formats.call_reader import CallReader
from graphcore.serving.tool_formats.gemma_call import GemmaCallReader
from graphcore.serving.tool_formats.held_text import HeldText
from graphcore.serving.tool_formats.json_call import JsonCallReader
from graphcore.serving.tool_formats.literal_search import LiteralSearch
from graphcore.serving.tool_formats.named_call import NamedCallReader
from graphcore.serving.tool_formats.part_writer import PartWriter
from graphcore.serving.tool_formats.prompt_state import is_at_start, is_reasoning_open
from graphcore.serving.tool_formats.python_call import PythonCallReader
from graphcore.serving.tool_formats.tag_call import TagCallReader
from graphcore.serving.tool_formats.tool_format import CallSyntax, ToolFormat

_MOST_BEGINNING = 200  # characters: a name and what follows it

Step = Callable[[str, int], int]
"""Takes text from a position on; returns the position up to which it was taken, the same one if more is needed."""


class TaggedText:
    """Splits the text of an answer.

    Args:
        schemas: JSON schema of each tool's parameters, by name.
        prompt_tail: end of the prompt.
    """

    def __init__(
        self, known: ToolFormat, schemas: Mapping[str, Mapping[str, Any]], writer: PartWriter, prompt_tail: str
    ) -> None:
        self._format = known
        self._schemas = schemas
        self._writer = writer
        self._content = HeldText(writer.content)
        self._content.skips_newlines = known.begins_line and is_at_start(known, prompt_tail)
        self._thoughts = HeldText(writer.reasoning, "\n")
        self._thoughts.skips_newlines = True
        self._reader: CallReader | None = None
        self._is_after_call = False
        self._waiting = ""
        self._in_content = LiteralSearch([known.reasoning_open, known.call_open, *known.more_opens, *known.controls])
        self._in_thoughts = LiteralSearch([known.reasoning_close, *known.controls])
        self._controls = LiteralSearch(known.controls)
        is_named = known.syntax is CallSyntax.NAMED
        named = [name + space + known.name_end for name in schemas for space in ("", " ")]
        self._beginnings = named if is_named else ["{"]  # of a call without a tag
        self._step: Step = self._take_content
        if is_reasoning_open(known, prompt_tail):
            self._step = self._take_thoughts
        elif known.begins_bare and is_at_start(known, prompt_tail):
            self._step = self._take_start

    def push(self, text: str) -> None:
        """Take a piece of the answer."""
        text, at = self._waiting + text, 0
        while at < len(text):
            step, after = self._step, self._step(text, at)
            if after == at and step == self._step:
                break
            at = after
        self._waiting = text[at:]

    def finish(self) -> None:
        """Take the end of the answer."""
        waiting, self._waiting = self._waiting, ""
        if self._reader is not None:
            if waiting not in self._format.controls:
                self._read(self._reader, waiting, 0)
            if self._reader is not None:
                self._finish(self._reader)
            if self._reader is not None and not self._reader.is_complete:
                self._content.push("".join(self._reader.taken))
        elif self._step == self._take_thoughts:
            self._thoughts.push(waiting)
            self._writer.reasoning(self._thoughts.taken())
        else:
            self._put_content(waiting)
        if not self._is_after_call:
            self._writer.content(self._content.taken())

    def _take_start(self, text: str, at: int) -> int:
        """Take the first characters of an answer that may be a call without a tag."""
        after = len(text) - len(text[at:].lstrip())
        rest = text[after : after + _MOST_BEGINNING]
        if any(rest.startswith(beginning) for beginning in self._beginnings):
            self._begin_call(self._content.taken() + text[at:after])
            return after
        self._content.push(text[at:after])
        if not any(beginning.startswith(rest) for beginning in self._beginnings):
            self._step = self._take_content
            return self._take_content(text, after)
        return after

    def _take_content(self, text: str, at: int) -> int:
        found, literal = self._in_content.search(text, at)
        if not literal:
            found -= self._in_content.held(text, at)
        self._put_content(text[at:found])
        if literal in self._format.controls:
            pass
        elif literal == self._format.reasoning_open:
            self._open_thoughts(literal)
        elif literal:
            self._open_call(literal)
        return found + len(literal)

    def _put_content(self, text: str) -> None:
        if text.strip():
            self._is_after_call = False
        self._content.push(text)

    def _open_thoughts(self, literal: str) -> None:
        if literal and (self._format.has_reasoning_tokens or not (self._content.has_text or self._writer.num_calls)):
            self._content.taken()
            self._step = self._take_thoughts
        else:
            self._put_content(literal)

    def _open_call(self, literal: str) -> None:
        if self._writer.num_calls and not self._format.is_parallel:
            self._put_content(literal)
        else:
            self._begin_call(self._content.taken() + literal)

    def _take_thoughts(self, text: str, at: int) -> int:
        found, literal = self._in_thoughts.search(text, at)
        if not literal:
            found -= self._in_thoughts.held(text, at)
        self._thoughts.push(text[at:found])
        if literal == self._format.reasoning_close and literal:
            self._thoughts.taken()
            self._content.skips_newlines = not self._content.has_text
            self._step = self._take_start if self._format.begins_bare else self._take_content
        return found + len(literal)

    def _begin_call(self, opened: str) -> None:
        self._reader = self._new_reader(opened)
        self._step = self._take_call

    def _new_reader(self, opened: str) -> CallReader:
        known, writer, close = self._format, self._writer, self._format.call_close
        if known.syntax is CallSyntax.TAGS:
            assert known.tags is not None, "a family with tags names them"
            return TagCallReader(writer, self._schemas, opened, close, known.tags)
        if known.syntax is CallSyntax.GEMMA:
            return GemmaCallReader(writer, self._schemas, opened, close)
        if known.syntax is CallSyntax.PYTHON:
            return PythonCallReader(writer, self._schemas, opened, close, known.is_parallel)
        if known.syntax is CallSyntax.NAMED:
            return NamedCallReader(writer, self._schemas, opened, close, known.name_end, known.id_open)
        takes_list = known.is_parallel or bool(known.list_marks)
        return JsonCallReader(writer, self._schemas, opened, close, takes_list, known.is_parallel)

    def _take_call(self, text: str, at: int) -> int:
        """Take text of a call; a control token at the end of the text waits, for it may end the answer."""
        assert self._reader is not None, "a call has its reader"
        end = len(text) - self._controls.held(text, at, with_whole=True)
        return self._read(self._reader, text[:end], at) if at < end else at

    def _read(self, reader: CallReader, text: str, at: int) -> int:
        num_calls = self._writer.num_calls
        at = reader.read(text, at)
        self._note(reader, num_calls)
        return at

    def _finish(self, reader: CallReader) -> None:
        num_calls = self._writer.num_calls
        reader.finish()
        self._note(reader, num_calls)

    def _note(self, reader: CallReader, num_calls: int) -> None:
        """Note whether a call has begun or ended."""
        if self._writer.num_calls > num_calls:
            self._is_after_call = True
        if reader.is_done or reader.is_broken:
            self._reader = None
            self._step = self._take_content
            self._put_content("".join(reader.taken))
