"""The table of a model family: how its answers write calls and thoughts. Parsers and grammars read nothing else."""

from dataclasses import dataclass
from enum import Enum


class CallSyntax(Enum):
    """The notation of a call's name and arguments.

    Attributes:
        JSON: {"name": "f", "arguments": {"a": 1}}
        XML: <function=f><parameter=a>1</parameter></function>
        GEMMA: call:f{a:1,b:<|"|>text<|"|>}
        CHANNELS: the name in the header of a message (`to=functions.f`), the arguments as its JSON body
    """

    JSON = "json"
    XML = "xml"
    GEMMA = "gemma"
    CHANNELS = "channels"


@dataclass(frozen=True)
class ToolFormat:
    """The markup of a family's answers.

    Attributes:
        name: family, for messages.
        syntax: notation of calls; None if the family has no tools.
        call_open, call_close: text before and after a call; empty if there is none.
        has_tag_tokens: whether `call_open` and `call_close` are special tokens of the vocabulary.
        begins_bare: whether an answer that begins with a JSON object is a call without `call_open`.
        arguments_key: key of a JSON call's arguments, as the family writes it.
        reasoning_open, reasoning_close: text before and after thoughts; empty if the family has none.
        has_reasoning_tokens: whether these begin and end with special tokens of the vocabulary. Otherwise they are text
            that an answer may also speak about, and open thoughts only at its beginning.
        turn_starts: headers of the model's turn, by one of which the prompt's last turn is found.
        controls: special tokens without content; they are left out of answers.
        is_parallel: whether one answer may have several calls.
        joins_content_to_thoughts: whether the template raises for a turn with a call, thoughts and text.
        embeds_results: whether the template reads results as `tool_responses` of the turn with their calls.
        stop_token_names: tokens that end an answer in addition to the checkpoint's own end tokens.
    """

    name: str
    syntax: CallSyntax | None = None
    call_open: str = ""
    call_close: str = ""
    has_tag_tokens: bool = False
    begins_bare: bool = False
    arguments_key: str = "arguments"
    reasoning_open: str = ""
    reasoning_close: str = ""
    has_reasoning_tokens: bool = False
    turn_starts: tuple[str, ...] = ()
    controls: tuple[str, ...] = ()
    is_parallel: bool = False
    joins_content_to_thoughts: bool = False
    embeds_results: bool = False
    stop_token_names: tuple[str, ...] = ()

    @property
    def knows_tools(self) -> bool:
        """Whether the family can call tools."""
        return self.syntax is not None

    @property
    def knows_reasoning(self) -> bool:
        """Whether the family marks its thoughts."""
        return bool(self.reasoning_open)

    @property
    def streams_arguments(self) -> bool:
        """Whether a call's arguments come while the model writes them; else they come whole, when the call is closed.

        The values of XML and Gemma's syntax become JSON only when they are whole.
        """
        return self.syntax in (CallSyntax.JSON, CallSyntax.CHANNELS)
