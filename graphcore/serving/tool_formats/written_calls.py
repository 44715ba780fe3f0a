"""Calls in a family's syntax, for chat templates that show nothing of an answer but its content."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graphcore.serving.tool_formats.tool_format import CallSyntax, ToolFormat


def written_calls(format: ToolFormat, calls: Sequence[Mapping[str, Any]], mark: Callable[[str], str]) -> str:
    """Return the text of an answer's calls.

    Args:
        format: family whose calls are written in JSON or as Python writes them.
        calls: calls as messages have them, whose arguments are mappings.
        mark: function that returns what stands in the text for a tag.
    """
    functions = [call["function"] for call in calls]
    if format.syntax is CallSyntax.PYTHON:
        texts = [_python_call(function) for function in functions]
    else:
        texts = [_json_call(function, format.arguments_key) for function in functions]
    opened, closed = mark(format.call_open), mark(format.call_close)
    if format.list_marks:
        before, separator, after = format.list_marks
        return f"{opened}{before}{separator.join(texts)}{after}{closed}"
    return "\n".join(f"{opened}\n{text}\n{closed}" for text in texts)


def _json_call(function: Mapping[str, Any], arguments_key: str) -> str:
    return json.dumps({"name": function["name"], arguments_key: function["arguments"]}, ensure_ascii=False)


def _python_call(function: Mapping[str, Any]) -> str:
    arguments = function["arguments"] if isinstance(function["arguments"], Mapping) else {}
    return f"{function['name']}({', '.join(f'{key}={_python_value(value)}' for key, value in arguments.items())})"


def _python_value(value: object) -> str:
    return repr(value) if value is None or isinstance(value, bool) else json.dumps(value, ensure_ascii=False)
