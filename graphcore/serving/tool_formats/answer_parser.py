"""Parts of an answer from its text: thoughts, content and calls.

    AnswerParser -> TaggedText (tagged_text.py)    -> JsonCallReader, XmlCallReader, GemmaCallReader -> PartWriter
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


class AnswerParser:
    """Parses the text of one answer, in pieces of any length; never raises for what a model writes.

    A call of a function that is not among the tools, or with a broken syntax, becomes content, with its tags. If the
    arguments of a JSON call break after they have begun, the call keeps them up to there, and the rest is content; so
    the arguments of that call, as of one that a limit cuts off, are no valid JSON.

    Args:
        tools: functions that may be called, as in `ChatCall.tools`; without any, calls are content.
        prompt_tail: end of the prompt's text, best from the header of the model's turn on.
        choice: index of the answer.

    Attributes:
        num_calls: calls that have begun.
    """

    def __init__(
        self, format: ToolFormat, tools: Sequence[Mapping[str, Any]], prompt_tail: str, choice: int = 0
    ) -> None:
        schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        self._writer = PartWriter(choice)
        if format.syntax is CallSyntax.CHANNELS:
            self._text: ChannelText | TaggedText = ChannelText(format, schemas, self._writer, prompt_tail)
        else:
            known = schemas if format.knows_tools else {}
            self._text = TaggedText(format, known, self._writer, prompt_tail)

    @property
    def num_calls(self) -> int:
        """Number of calls that have begun."""
        return self._writer.num_calls

    def push(self, text: str) -> list[Part]:
        """Return the parts that a piece of the text completes.

        Args:
            text: the answer's next characters, special tokens included.
        """
        self._text.push(text)
        return self._writer.taken()

    def finish(self) -> list[Part]:
        """Return the last parts, after the answer's end."""
        self._text.finish()
        return self._writer.taken()
