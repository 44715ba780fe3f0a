"""Grammar rules for the messages of gpt-oss."""

from collections.abc import Iterable

from graphcore.serving.tool_formats.lark_rules import TEXT, choice_of, quoted_literal

_JSON_MARK = '(" json" | " " <|constrain|> "json")?'
_NEXT = '<|end|> <|start|> "assistant"'


def channel_call(name: str, arguments: str) -> str:
    """Return the element for a call; the function's name stands in the role or in the channel.

    Args:
        arguments: element for the arguments.
    """
    recipient = f" to=functions.{name}"
    in_role = f'{quoted_literal(recipient)} <|channel|> "commentary"'
    in_channel = f"<|channel|> {quoted_literal('commentary' + recipient)}"
    return f"({in_role} | {in_channel}) {_JSON_MARK} <|message|> {arguments}"


def channel_answer(calls: Iterable[str], text: str, is_reasoning_open: bool) -> str:
    """Return the body of the rule for an answer: thoughts, then a final text or a call.

    Args:
        calls: elements for the calls.
        text: element for the final text; empty if the answer may not be a text. Where it is not any text, nothing else
            is content, either: texts in the channel "commentary" would be.
        is_reasoning_open: whether it begins within thoughts.
    """
    before = '("analysis" | "commentary")' if text == TEXT else '"analysis"'
    messages = f"(<|channel|> {before} <|message|> {TEXT} {_NEXT})*"
    final = [f'<|channel|> "final" {_JSON_MARK} <|message|> {text}'] if text else []
    first = f"{TEXT} {_NEXT} " if is_reasoning_open else ""
    return f"{first}{messages} {choice_of([*final, *calls])}"
