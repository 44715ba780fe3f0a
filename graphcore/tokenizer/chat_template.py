"""Turns chat messages into the text a model was trained on, with the Jinja template of its checkpoint.

    ChatTemplate -> BoundedProcess (bounded_process.py) ~~> serve (bounded_worker.py) -> Jinja (template_sandbox.py)

A template is untrusted code, so it runs in a process of its own, within bounds (`Bounds`) and in a sandbox.
"""

import contextlib
import json
import math
import time
from collections.abc import Mapping, Sequence

from graphcore.errors import TemplateError, ThreadLimitError, TokenizerError
from graphcore.tokenizer.bounded_process import BoundedProcess, Bounds, NoAnswerError
from graphcore.tokenizer.bounded_worker import TEXT, UNREADABLE
from graphcore.tokenizer.message_turns import Message, fitted_turns, is_alternating, refused_turns

Tool = Mapping[str, object]
"""A function that the model may call: {"type": "function", "function": {"name", "description", "parameters"}}."""

_NOT_OPTIONS = ("messages", "tools", "add_generation_prompt", "continue_final_message")
_REASONING = ("reasoning_content", "thinking", "reasoning")
WHAT_TO_DO = "change the messages, or give the prompt as plain text"

_TRIAL_TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
}
END_MARK = "<<the-message-ends-here>> "  # its space is gone where a template trims messages

CHATML = """{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}"""
"""The template that llama.cpp takes for a file whose template is the word "chatml" (common/chat.cpp)."""


class ChatTemplate:
    """A chat template; several threads may use it.

    Args:
        text: Jinja source.
        source: name that the user gave, for messages.
    """

    def __init__(self, text: str, source: str, bounds: Bounds | None = None) -> None:
        self._text = text
        self._source = source
        self._bounds = bounds or Bounds()
        self._process: BoundedProcess | None = None
        self._refused: dict[bool, frozenset[str]] = {}  # by whether there are tools

    def start(self) -> None:
        """Start the process that reads and compiles the template, without waiting; `render` reports any error."""
        with contextlib.suppress(NoAnswerError, ThreadLimitError):
            self._usable_process()

    def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, object],
        add_generation_prompt: bool = True,
        tools: Sequence[Tool] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """Return the text of a conversation.

        Args:
            messages: the turns, oldest first.
            variables: `bos_token`, `eos_token` and the like, and the template's own, such as `enable_thinking`.
            add_generation_prompt: True to end with the text that opens the model's turn.
            tools: functions that the model may call.
            continue_final_message: True to end with the text of the last message, so that the model continues it;
                `add_generation_prompt` is then False. Source: transformers, utils/chat_template_utils.py.

        Raises:
            TokenizerError: there are no messages, they contain more than plain data, a variable has the name of another
                argument, or the last message is to be continued and has no text, or the template leaves it out.
            TemplateError: the template is invalid, rejects the messages, fails on them, tries to leave the sandbox, or
                exceeds its bounds.
        """
        if not messages:
            raise TokenizerError(f"{self._source}: a chat needs at least one message")
        for name in _NOT_OPTIONS:
            if name in variables:
                raise TokenizerError(f"{self._source}: '{name}' is no option of a chat template, but an argument")
        listed = None if tools is None else list(tools)
        if continue_final_message:
            add_generation_prompt, messages = False, [*messages[:-1], self._marked(messages[-1])]
        inputs = {"messages": list(map(_plain, messages)), "tools": listed, "documents": None, **variables}
        try:
            text = self._text_of({**inputs, "add_generation_prompt": add_generation_prompt})
            return self._up_to_mark(text) if continue_final_message else text
        except NoAnswerError as error:
            raise TemplateError(f"{self._source}: the chat template {error}; {WHAT_TO_DO}") from error
        except (TypeError, ValueError, RecursionError) as error:
            raise TokenizerError(f"{self._source}: messages must be plain data, as JSON has it ({error})") from error

    def _text_of(self, inputs: Mapping[str, object]) -> str:
        request = json.dumps(inputs, ensure_ascii=False).encode("utf-8", "surrogatepass")
        kind, text = self._usable_process().ask(request)
        if kind == TEXT:
            return text
        raise NoAnswerError(f"cannot be read: {text}" if kind == UNREADABLE else f"refuses these messages: {text}")

    def fitted(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, object],
        has_tools: bool,
        continues_last: bool = False,
    ) -> list[Message]:
        """Return a conversation in turns that the template takes; one that it takes already stays as it is."""
        if is_alternating(messages):
            return list(messages)
        return fitted_turns(messages, self.refused(variables, has_tools), continues_last)

    def refused(self, variables: Mapping[str, object], has_tools: bool = False) -> frozenset[str]:
        """Return the names of the trials of `TRIALS` that the template refuses; it is tried once.

        A template that takes longer for all trials than its bound for one conversation is tried no further.
        """
        if has_tools not in self._refused:
            until = math.inf
            tools = [_TRIAL_TOOL] if has_tools else None
            is_slow = False

            def render(messages: Sequence[Message]) -> str | None:
                nonlocal is_slow, until
                is_slow = is_slow or time.monotonic() > until
                try:
                    return None if is_slow else self.render(messages, variables, tools=tools)
                except TemplateError:
                    return None
                finally:  # from the end of the first one, which waits for the start of the process
                    until = min(until, time.monotonic() + self._bounds.seconds)

            refused = refused_turns(render)
            self._refused[has_tools] = frozenset() if is_slow else refused
        return self._refused[has_tools]

    def _marked(self, message: Message) -> Message:
        """Return a message whose text ends with END_MARK."""
        content = message.get("content")
        if isinstance(content, str):
            return {**message, "content": content + END_MARK}
        parts = list(content) if isinstance(content, list | tuple) else []
        texts = [at for at, part in enumerate(parts) if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
        if not texts:
            raise TokenizerError(f"{self._source}: the last message has no text that could be continued")
        parts[texts[-1]] = {**parts[texts[-1]], "text": parts[texts[-1]]["text"] + END_MARK}
        return {**message, "content": parts}

    def _up_to_mark(self, text: str) -> str:
        """Return a conversation's text up to END_MARK; spaces before it are left out where the template trims them."""
        before, mark, after = text.rpartition(END_MARK.strip())
        if not mark:
            raise TokenizerError(
                f"{self._source}: the chat template leaves out the last message, which was to be continued"
            )
        return before if after.startswith(" ") else before.rstrip()

    def _usable_process(self) -> BoundedProcess:
        process = self._process
        if process is None or not process.is_usable:
            process = self._process = BoundedProcess(
                "template", self._text.encode("utf-8", "surrogatepass"), self._bounds
            )
        return process


def _plain(message: Message) -> Message:
    """Return a message without fields that are null, and with its reasoning under the names that templates read.

    Source: transformers, utils/chat_template_utils.py: `_normalize_chat_messages` and `_alias_reasoning_fields`.
    """
    kept = {name: value for name, value in message.items() if value is not None}
    reasoning = next((kept[name] for name in _REASONING if name in kept), None)
    return kept if reasoning is None else {"thinking": reasoning, **kept, "reasoning_content": reasoning}


def has_tags(text: str) -> bool:
    """Return whether a text is a Jinja template, so that messages can enter it."""
    return "{{" in text or "{%" in text


def named_templates(value: object, source: str) -> dict[str, str]:
    """Return the templates in a `chat_template` entry by name: a text ("default"), a list of named ones, or an object.

    Raises:
        TokenizerError: the entry is none of these.
    """
    match value:
        case None:
            return {}
        case str():
            return {"default": value}
        case list():
            entries = [(one.get("name"), one.get("template")) for one in value if isinstance(one, dict)]
        case dict():
            entries = list(value.items())
        case _:
            raise TokenizerError(
                f"{source}: chat_template is {type(value).__name__}, where a text or a list is expected"
            )
    return {name: text for name, text in entries if isinstance(name, str) and isinstance(text, str)}
