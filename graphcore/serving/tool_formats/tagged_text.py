"""Splits an answer at tags: <think> thoughts </think> text <tool_call> a call </tool_call>.

White space between these parts belongs to the markup and is left out.

A call in thoughts, or in a code block of the text, may be no more than a draft or a quotation. Its text is held until
this is known:
  - thoughts that are closed are thoughts, and all in them. Where an answer ends within thoughts, the last calls in them
    that are complete, of known tools and beside each other, are the answer's.
  - in a code block, or between backquotes on a line, calls are the answer's if it ends with them. Where their tags are
    special tokens, they are calls at once: no model quotes these.
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
from graphcore.serving.tool_formats.prompt_state import is_at_start, is_reasoning_closed, is_reasoning_open
from graphcore.serving.tool_formats.python_call import PythonCallReader
from graphcore.serving.tool_formats.tag_call import TagCallReader
from graphcore.serving.tool_formats.tool_format import CallSyntax, ToolFormat
from graphcore.tokenizer.text_stream import StopStrings

_MOST_BEGINNING = 200  # characters: a name and what follows it
_MOST_READ = 4096  # characters that a call reads at once, so that many short calls in one text take linear time

Step = Callable[[str, int], int]
"""Takes text from a position on; returns the position up to which it was taken, the same one if more is needed."""


class CodeSpans:
    """Tells whether the end of a text is quoted as code, in Markdown: in a fenced block, or in backquotes on its line.

    Attributes:
        begins_line: whether the text ends with a line that has nothing but white space.
    """

    def __init__(self) -> None:
        self._is_block = False
        self._head = ""  # first characters of the last line
        self._num_ticks = 0

    @property
    def is_code(self) -> bool:
        """Whether text that follows would be code."""
        return self._is_block or self._num_ticks % 2 == 1

    @property
    def begins_line(self) -> bool:
        """Whether the last line is blank so far."""
        return not self._head

    def push(self, text: str) -> None:
        """Take a piece of the text."""
        for number, piece in enumerate(text.split("\n")):
            if number:
                self._is_block ^= self._head in ("```", "~~~")
                self._head, self._num_ticks = "", 0
            self._head = self._head if len(self._head) == 3 else (self._head + piece).lstrip()[:3]
            self._num_ticks += piece.count("`")


class TaggedText:
    """Splits the text of an answer.

    Args:
        schemas: JSON schema of each tool's parameters, by name.
        prompt_tail: end of the prompt.
        stops: what ends the answer's content; white space beside thoughts and calls is not looked at.
        is_bound: whether a grammar binds the answer to calls or a text, so that a text has no calls.

    Attributes:
        calls_in_thoughts: calls that were read from thoughts that were not closed.
        is_drafting: whether it holds text of thoughts, because it may be a call.
    """

    def __init__(
        self,
        known: ToolFormat,
        schemas: Mapping[str, Mapping[str, Any]],
        writer: PartWriter,
        prompt_tail: str,
        stops: StopStrings,
        is_bound: bool,
    ) -> None:
        self.calls_in_thoughts = 0
        self._format = known
        self._schemas = schemas
        self._writer = writer
        self._stops = stops
        self._is_bound = is_bound
        self._is_ending = False
        self._waiting = self._returned = ""  # text for the next step; text that is to be read again
        self._content = HeldText(writer.content)
        self._content.skips_newlines = known.begins_line and is_at_start(known, prompt_tail)
        self._has_content = False
        self._is_between = is_at_start(known, prompt_tail) or is_reasoning_closed(known, prompt_tail)
        self._thoughts = HeldText(writer.reasoning, "\n")
        self._thoughts.skips_newlines = True
        self._code, self._code_of_thoughts = CodeSpans(), CodeSpans()
        self._reader: CallReader | None = None
        self._is_after_call = False
        self._draft: CallReader | None = None
        self._draft_text: list[str] = []
        self._held: list[str] = []  # complete calls and white space that neither thoughts nor content have
        self._calls = ""  # text of the last complete calls beside each other
        self._is_quoted = False  # whether they are in code
        self._is_decided = False  # whether it is known that they are calls
        self._bare_open = known.tags.name_open if known.tags is not None and schemas else ""
        opens = [known.call_open, *known.more_opens, self._bare_open]
        self._in_content = LiteralSearch([known.reasoning_open, *opens, *known.controls])
        self._in_thoughts = LiteralSearch([known.reasoning_close, *(opens if schemas else ()), *known.controls])
        self._thoughts_end = LiteralSearch([known.reasoning_close])
        self._controls = LiteralSearch(known.controls)
        is_named = known.syntax is CallSyntax.NAMED
        named = [name + space + known.name_end for name in schemas for space in ("", " ")]
        self._beginnings = named if is_named else ["{"]  # of a call without a tag
        self._is_thinking = is_reasoning_open(known, prompt_tail)
        self._step: Step = self._take_content
        if self._is_thinking:
            self._step = self._take_thoughts
        elif known.begins_bare and is_at_start(known, prompt_tail):
            self._step = self._take_start

    @property
    def is_drafting(self) -> bool:
        """Whether text of thoughts is held, because it may be a call."""
        return self._is_thinking and (self._draft is not None or bool(self._held))

    def push(self, text: str) -> None:
        """Take a piece of the answer; nothing of it behind a stop string."""
        text, at = self._returned + self._waiting + text, 0
        self._returned = ""
        while at < len(text) and self._stops.found is None:
            step, after = self._step, self._step(text, at)
            if self._returned:
                text, at, self._returned = self._returned + text[after:], 0, ""
            elif after == at and step == self._step:
                break
            else:
                at = after
        self._waiting = text[at:]

    def finish(self, is_cut: bool) -> None:
        """Take the end of the answer.

        Args:
            is_cut: whether a limit has ended it.
        """
        if (self._reader is not None or self._draft is not None) and self._waiting in self._format.controls:
            self._waiting = ""
        opened = self._format.reasoning_open
        if self._format.has_reasoning_tokens and self._waiting.startswith(opened[: opened.find(">") + 1]):
            self._waiting = ""  # a part of the tag behind its token, such as <|channel> of <|channel>thought
        self._is_ending = True
        self.push("")
        self._finish_calls(is_cut)
        if self._held or self._calls:
            self._finish_drafts(is_cut)
        self._content.push(self._stops.flush())
        if self._is_thinking:
            self._writer.reasoning(self._thoughts.taken())
        if not self._is_after_call or self._stops.found is not None:
            self._writer.content(self._content.taken())

    def _finish_calls(self, is_cut: bool) -> None:
        """End the call that is being read, and those that begin in what it gives back."""
        while self._stops.found is None and (reader := self._reader or self._draft) is not None:
            num_calls = self._writer.num_calls
            reader.finish(is_cut)
            if not reader.is_done and not reader.is_broken:
                reader.is_broken = True
                if reader.is_complete:  # what is left is a part of its closing tag
                    reader.taken.clear()
            if reader is self._reader:
                self._note(reader, num_calls)
            else:
                self._note_draft(reader)
            self.push("")

    def _finish_drafts(self, is_cut: bool) -> None:
        """Decide on calls in thoughts or in code where the answer ends."""
        held = "".join(self._held)
        self._held.clear()
        if is_cut or not self._calls:
            self._sink(held)
            return
        if self._is_thinking:
            rest = self._thoughts.taken()
            self._writer.reasoning("" if held else rest)
        was_thinking, self._is_thinking = self._is_thinking, False
        calls, self._calls = self._calls, ""
        num_calls = self._writer.num_calls
        self._is_decided, self._step = True, self._take_content
        self.push(calls)
        self._finish_calls(is_cut)
        self.calls_in_thoughts += self._writer.num_calls - num_calls if was_thinking else 0
        if not was_thinking:
            self._put_content(held[len(calls) :])

    def _take_start(self, text: str, at: int) -> int:
        """Take the first characters of an answer that may be a call without a tag."""
        after = len(text) - len(text[at:].lstrip())
        rest = text[after : after + _MOST_BEGINNING]
        if any(rest.startswith(beginning) for beginning in self._beginnings):
            self._begin_call(text[at:after])
            return after
        self._put_content(text[at:after])
        if self._is_ending or not any(beginning.startswith(rest) for beginning in self._beginnings):
            self._step = self._take_content
            return self._take_content(text, after)
        return after

    def _take_content(self, text: str, at: int) -> int:
        found, literal = self._in_content.search(text, at)
        if not literal and not self._is_ending:
            found -= self._in_content.held(text, at)
        self._say(text[at:found])
        if not literal or self._stops.found is not None or literal in self._format.controls:
            pass
        elif literal == self._format.reasoning_open:
            self._open_thoughts(literal)
        else:
            self._open_call(literal)
        return found + len(literal)

    def _put_content(self, text: str) -> None:
        if self._stops.found is not None:
            return
        if text.strip():
            self._is_after_call, self._has_content = False, True
        self._code.push(text)
        if self._is_between:
            body = text.lstrip()
            self._content.push(text[: len(text) - len(body)])
            self._is_between, text = not body, body
        self._content.push(self._stops.push(text).text)

    def _open_thoughts(self, literal: str) -> None:
        if self._format.has_reasoning_tokens or not (self._has_content or self._writer.num_calls):
            self._leave_content()
            self._is_thinking, self._step = True, self._take_thoughts
        else:
            self._say(literal)

    def _leave_content(self) -> str:
        """Return the white space at the content's end, which belongs to the markup behind it."""
        self._content.push(self._stops.flush())
        return self._content.taken()

    def _open_call(self, literal: str) -> None:
        is_extra = self._writer.num_calls > 0 and not self._format.is_parallel
        is_bare = literal == self._bare_open and not (self._is_decided or self._held or self._code.begins_line)
        if is_extra or is_bare or (self._is_bound and self._has_content):
            self._say(literal)
        elif self._held or (self._code.is_code and not self._format.has_tag_tokens and not self._is_decided):
            self._open_draft(literal)
        else:
            self._begin_call(literal)

    def _take_thoughts(self, text: str, at: int) -> int:
        found, literal = self._in_thoughts.search(text, at)
        if not literal and not self._is_ending:
            found -= self._in_thoughts.held(text, at)
        self._say(text[at:found])
        if not literal or literal in self._format.controls:
            pass
        elif literal == self._format.reasoning_close:
            self._close_thoughts()
        elif literal == self._bare_open and not (self._held or self._code_of_thoughts.begins_line):
            self._say(literal)
        else:
            self._open_draft(literal)
        return found + len(literal)

    def _close_thoughts(self) -> None:
        self._sink("".join(self._held))
        self._held.clear()
        self._calls = ""
        self._thoughts.taken()
        self._is_thinking, self._is_between = False, True
        self._content.skips_newlines = not self._content.has_text
        self._step = self._take_start if self._format.begins_bare else self._take_content

    def _sink(self, text: str) -> None:
        """Put text into the thoughts or the content."""
        if self._is_thinking:
            self._code_of_thoughts.push(text)
            self._thoughts.push(text)
        else:
            self._put_content(text)

    def _say(self, text: str) -> None:
        """Put text that is no call into the thoughts or the content, and before it the calls that are held."""
        if self._held and not text.strip(" \t\r\n`~" if self._is_quoted else None):
            self._held.append(text)
            return
        if self._held and self._is_quoted:
            self._calls = ""
        self._sink("".join([*self._held, text]))
        self._held.clear()

    def _open_draft(self, literal: str) -> None:
        if not self._held:
            self._is_quoted = (self._code_of_thoughts if self._is_thinking else self._code).is_code
        self._draft, self._draft_text = self._new_reader(literal, PartWriter(0)), [literal]
        self._step = self._take_draft

    def _take_draft(self, text: str, at: int) -> int:
        """Take text of a call in thoughts or in code; thoughts end at their closing tag all the same."""
        assert self._draft is not None, "a draft has its reader"
        piece = text[at : at + _MOST_READ]
        is_last = self._is_ending and at + len(piece) == len(text)
        end = len(piece) - (0 if is_last else self._controls.held(piece, 0, with_whole=True))
        if self._is_thinking:
            found, literal = self._thoughts_end.search(piece, 0)
            if literal and found == 0:
                self._draft, raw = None, "".join(self._draft_text)
                self._step = self._take_thoughts
                self._say(raw)
                return at
            end = min(end, found - (0 if literal or is_last else self._thoughts_end.held(piece, 0)))
        after = self._draft.read(piece[:end], 0)
        self._draft_text.append(piece[:after])
        self._note_draft(self._draft)
        return at + after

    def _note_draft(self, reader: CallReader) -> None:
        """Note whether a call in thoughts or in code has ended, or is none."""
        if not reader.is_done and not reader.is_broken:
            return
        self._draft = None
        self._step = self._take_thoughts if self._is_thinking else self._take_content
        raw = "".join(self._draft_text)
        if reader.is_complete:
            self._returned = "".join(reader.taken)
            self._held.append(raw.removesuffix(self._returned))
            self._calls = "".join(self._held)
        else:
            self._returned = reader.behind
            self._say(raw.removesuffix(self._returned))

    def _begin_call(self, literal: str) -> None:
        self._reader = self._new_reader(literal, self._writer, self._leave_content())
        self._step = self._take_call

    def _new_reader(self, literal: str, writer: PartWriter, before: str = "") -> CallReader:
        """Return what reads a call from the text on that opens it.

        Args:
            before: white space before it.
        """
        known, close = self._format, self._format.call_close
        opened = before if literal == self._bare_open else before + literal
        if known.syntax is CallSyntax.TAGS:
            assert known.tags is not None, "a family with tags names them"
            reader = TagCallReader(writer, self._schemas, opened, known.call_open, close, known.tags)
            if literal == self._bare_open:
                reader.read(literal, 0)
            return reader
        if known.syntax is CallSyntax.GEMMA:
            return GemmaCallReader(writer, self._schemas, opened, known.call_open, close)
        if known.syntax is CallSyntax.PYTHON:
            return PythonCallReader(writer, self._schemas, opened, close, known.is_parallel)
        if known.syntax is CallSyntax.NAMED:
            return NamedCallReader(writer, self._schemas, opened, close, known.name_end, known.id_open)
        takes_list = known.is_parallel or bool(known.list_marks)
        return JsonCallReader(writer, self._schemas, opened, close, takes_list, known.is_parallel)

    def _take_call(self, text: str, at: int) -> int:
        """Take text of a call; a control token at the end of the text waits, for it may end the answer."""
        assert self._reader is not None, "a call has its reader"
        piece, num_calls = text[at : at + _MOST_READ], self._writer.num_calls
        is_last = self._is_ending and at + len(piece) == len(text)
        end = len(piece) - (0 if is_last else self._controls.held(piece, 0, with_whole=True))
        after = self._reader.read(piece[:end], 0)
        self._note(self._reader, num_calls)
        return at + after

    def _note(self, reader: CallReader, num_calls: int) -> None:
        """Note whether a call has begun or ended."""
        if self._writer.num_calls > num_calls:
            self._is_after_call = self._is_between = True
        if not reader.is_done and not reader.is_broken:
            return
        self._reader = None
        self._step = self._take_content
        self._code.push("\n")  # a call ends its line
        left = "".join(reader.taken)
        self._returned = left if reader.is_complete else reader.behind
        self._put_content("" if reader.is_complete else left.removesuffix(reader.behind))
