"""The table of a model family: how its answers write calls and thoughts. Parsers and grammars read nothing else."""

from dataclasses import dataclass
from enum import Enum


class CallSyntax(Enum):
    """The notation of a call's name and arguments.

    Attributes:
        JSON: {"name": "f", "arguments": {"a": 1}}
        NAMED: f[ARGS]{"a": 1}
        TAGS: <function=f><parameter=a>1</parameter></function>
        PYTHON: f(a=1, b="text")
        GEMMA: call:f{a:1,b:<|"|>text<|"|>}
        CHANNELS: the name in the header of a message (`to=functions.f`), the arguments as its JSON body
    """

    JSON = "json"
    NAMED = "named"
    TAGS = "tags"
    PYTHON = "python"
    GEMMA = "gemma"
    CHANNELS = "channels"


@dataclass(frozen=True)
class CallTags:
    """The tags of a call whose arguments stand between tags.

    Attributes:
        name_open, name_close: around the function's name; empty if the name stands alone at the call's beginning.
        key_open, key_close: around a parameter's name.
        value_open, value_close: around its value, of which the former is empty if the value follows `key_close`.
        end: after the last parameter; empty if the call's closing tag ends it.
        line_break: what the family writes between tags.
        pads_values: whether a value stands on lines of its own, so that one line break at either end is no part of it.
    """

    name_open: str
    name_close: str
    key_open: str
    key_close: str
    value_open: str
    value_close: str
    end: str
    line_break: str = "\n"
    pads_values: bool = False


@dataclass(frozen=True)
class MessageForm:
    """What the family's chat template expects of messages besides the fields that all templates read.

    Attributes:
        writes_calls: whether it shows an answer's content alone, so that calls of earlier turns are written into it.
        calls_are_metadata: whether a call is a turn with the name in `metadata` and the arguments as content.
        result_role: role of the turns with results.
        id_length: number of letters and digits that the id of a call must have; 0 if any id will do.
        has_thinking_parts: whether thoughts are parts of the content, {"type": "thinking", "thinking": text}.
        tools_in_system: whether it reads tools as a text in the field `tools` of the system's turn.
        tools_variable: name of the variable in which it reads tools.
        joins_content_to_thoughts: whether it raises for a turn with a call, thoughts and text.
        embeds_results: whether it reads results as `tool_responses` of the turn with their calls.
    """

    writes_calls: bool = False
    calls_are_metadata: bool = False
    result_role: str = "tool"
    id_length: int = 0
    has_thinking_parts: bool = False
    tools_in_system: bool = False
    tools_variable: str = "tools"
    joins_content_to_thoughts: bool = False
    embeds_results: bool = False


@dataclass(frozen=True)
class ToolFormat:
    """The markup of a family's answers.

    Attributes:
        name: family, for messages.
        syntax: notation of calls; None if the family has no tools.
        call_open, call_close: text before and after a call, or after a list of calls; empty if there is none.
        more_opens: other texts with which some versions of the family open a call.
        calls_open, calls_close: text before the first and after the last call of an answer; empty if there is none.
            They are among the `controls`.
        list_marks: open, separator and close of the list of calls between `call_open` and `call_close`; empty if each
            call stands between tags of its own.
        has_tag_tokens: whether the tags around calls are special tokens of the vocabulary.
        begins_bare: whether an answer that begins like a call is one without `call_open`.
        arguments_key: key of a JSON call's arguments, as the family writes it.
        name_end: text between the name and the arguments of a named call.
        id_open: text that may follow the name of a named call, before an id of the call; empty if there is none.
        tags: tags of a call in tags.
        reasoning_open, reasoning_close: text before and after thoughts; empty if the family has none.
        has_reasoning_tokens: whether these begin and end with special tokens of the vocabulary. Otherwise they are text
            that an answer may also speak about, and open thoughts only at its beginning.
        turn_starts: headers of the model's turn, by one of which the prompt's last turn is found.
        begins_line: whether an answer's text begins on a line of its own, so that line breaks before it are no text.
        controls: special tokens without content; they are left out of answers.
        is_parallel: whether one answer may have several calls.
        stop_token_names: tokens that end an answer in addition to the checkpoint's own end tokens.
        messages: form of the messages for the chat template.
    """

    name: str
    syntax: CallSyntax | None = None
    call_open: str = ""
    call_close: str = ""
    more_opens: tuple[str, ...] = ()
    calls_open: str = ""
    calls_close: str = ""
    list_marks: tuple[str, str, str] | tuple[()] = ()
    has_tag_tokens: bool = False
    begins_bare: bool = False
    arguments_key: str = "arguments"
    name_end: str = ""
    id_open: str = ""
    tags: CallTags | None = None
    reasoning_open: str = ""
    reasoning_close: str = ""
    has_reasoning_tokens: bool = False
    turn_starts: tuple[str, ...] = ()
    begins_line: bool = False
    controls: tuple[str, ...] = ()
    is_parallel: bool = False
    stop_token_names: tuple[str, ...] = ()
    messages: MessageForm = MessageForm()

    @property
    def knows_tools(self) -> bool:
        """Whether the family can call tools."""
        return self.syntax is not None

    @property
    def knows_reasoning(self) -> bool:
        """Whether the family marks its thoughts."""
        return bool(self.reasoning_open)
