"""Parts of an answer from its text: thoughts, content and calls.

    AnswerParser -> TaggedText (tagged_text.py)    -> JsonCallReader, TagCallReader, GemmaCallReader -> PartWriter
                 -> ChannelText (channel_text.py)  -> ArgumentsReader

transformers' ResponseParser is not used: with the templates that it ships, 50,000 spaces in pieces of 5 take 10 s, a
broken call raises and its text is lost, white space around values is stripped, and arguments come only at their end.
Here each character is looked at a bounded number of times, and the parts do not depend on how the text is cut.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from graphcore.serving.chat_call import Part
from graphcore.serving.tool_formats.channel_text import ChannelText
from graphcore.serving.tool_formats.part_writer import PartWriter
from graphcore.serving.tool_formats.tagged_text import TaggedText
from graphcore.serving.tool_formats.tool_format import CallSyntax, ToolFormat
from graphcore.tokenizer.text_stream import StopResult, StopStrings


class AnswerParser:
    """Parses the text of one answer, in pieces of any length; never raises for what a model writes.

    A call of a function that is not among the tools, or with a broken syntax, becomes content, with its tags. If the
    arguments of a JSON call break after they have begun, the call keeps them up to there, and the rest is content; so
    the arguments of that call, as of one that a limit cuts off, are no valid JSON.

    Args:
        tools: functions that may be called, as in `ChatCall.tools`; without any, calls are content.
        prompt_tail: end of the prompt's text, best from the header of the model's turn on.
        choice: index of the answer.
        stops: texts that end the answer where they are its content: not in thoughts, and not in calls.
        is_bound: whether a grammar binds the answer to calls or a text, so that a text has no calls.
    """

    def __init__(
        self,
        format: ToolFormat,
        tools: Sequence[Mapping[str, Any]],
        prompt_tail: str,
        choice: int = 0,
        stops: Sequence[str] = (),
        is_bound: bool = False,
    ) -> None:
        schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        self._writer, self._stops = PartWriter(choice), StopStrings(stops)
        if format.syntax is CallSyntax.CHANNELS:
            self._text: ChannelText | TaggedText = ChannelText(format, schemas, self._writer, prompt_tail, self._stops)
        else:
            known = schemas if format.knows_tools else {}
            self._text = TaggedText(format, known, self._writer, prompt_tail, self._stops, is_bound)

    @property
    def num_calls(self) -> int:
        """Number of calls that have begun."""
        return self._writer.num_calls

    @property
    def calls_in_thoughts(self) -> int:
        """Number of those that were read from thoughts which the answer did not close."""
        return self._text.calls_in_thoughts

    @property
    def is_drafting(self) -> bool:
        """Whether text of thoughts is held, because it may be a call."""
        return self._text.is_drafting

    @property
    def stopped_by(self) -> str | None:
        """The stop string that has ended the content; None before."""
        return self._stops.found

    def push(self, text: str, may_stop: bool = True) -> list[Part]:
        """Return the parts that a piece of the text completes.

        Args:
            text: the answer's next characters, special tokens included.
            may_stop: whether stop strings count yet.
        """
        self._stops.is_armed = may_stop
        self._text.push(text)
        return self._writer.taken()

    def finish(self, is_cut: bool = False) -> list[Part]:
        """Return the last parts, after the answer's end.

        Args:
            is_cut: whether a limit has ended it, so that a call without its closing tags is not completed.
        """
        self._text.finish(is_cut)
        return self._writer.taken()


class AnswerStops:
    """Ends an answer's text at the stop strings of its content, for the engine (a `StopCondition`).

    The text is passed on whole: the parser of the answer's parts, which has the same stop strings, ends it at the same
    place. A stop string that spells a tag of the family, such as </think>, is looked for everywhere.

    Args:
        parser: parser for this alone.
        spelt: stop strings that spell tags.

    Attributes:
        found: as in `StopCondition`.
        is_armed: as in `StopCondition`.
    """

    def __init__(self, parser: AnswerParser, spelt: Sequence[str]) -> None:
        self.found: str | None = None
        self.is_armed = True
        self._parser, self._spelt = parser, StopStrings(spelt)

    def push(self, text: str) -> StopResult:
        """Process a piece of text and return the part to emit."""
        self._spelt.is_armed = self.is_armed
        passed, _ = self._spelt.push(text)
        self._parser.push(passed, self.is_armed)
        self.found = self._parser.stopped_by or self._spelt.found
        return StopResult(passed, self.found is not None)

    def flush(self) -> str:
        """Return the text that is held back, at the answer's end."""
        return self._spelt.flush()


def split_stops(format: ToolFormat, stops: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the stop strings of an answer's content, and those that spell one of the family's tags."""
    markup = (format.reasoning_open, format.reasoning_close, format.call_open, format.call_close, *format.more_opens)
    tags = [tag.strip() for tag in (*markup, format.calls_open, format.calls_close, *format.controls) if tag.strip()]
    spelt = [stop for stop in stops if any(tag in stop for tag in tags)]
    return [stop for stop in stops if stop not in spelt], spelt
