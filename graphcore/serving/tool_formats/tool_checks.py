"""Checks of the tools in a request, before a model sees them."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from graphcore.errors import ConfigError, quoted
from graphcore.serving.tool_formats.tool_format import ToolFormat
from graphcore.tokenizer.marked_messages import texts_in

LONGEST_NAME = 128  # characters, as Anthropic and MCP allow
_NAME = re.compile(rf"[a-zA-Z0-9_.-]{{1,{LONGEST_NAME}}}")


def check_tools(tools: Sequence[Mapping[str, Any]], format: ToolFormat) -> None:
    """Check that a model can be offered these tools.

    Args:
        tools: functions as in `ChatCall.tools`.

    Raises:
        ConfigError: the model's template knows no tools; a tool is no function, has no name or an invalid one, or one
            that another has; its parameters are no JSON schema of an object, or its `strict` is no bool.
    """
    if tools and not format.knows_tools:
        raise ConfigError("tools: this model's chat template knows no tools in a markup that is known; leave them out")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not isinstance(function, Mapping):
            raise ConfigError(f'tools[{index}] must be {{"type": "function", "function": {{...}}}}')
        name = _checked_name(function.get("name"), f"tools[{index}].function.name")
        if name in names:
            raise ConfigError(f"tools[{index}].function.name: '{name}' is the name of an earlier tool, too; change one")
        names.add(name)
        _check_parameters(function.get("parameters"), f"tools[{index}].function.parameters")
        if not isinstance(function.get("strict"), bool | None):
            raise ConfigError(f"tools[{index}].function.strict must be true or false")


def check_no_control_tokens(tools: Sequence[Mapping[str, Any]], special_tokens: Collection[str]) -> None:
    """Check that no text of a tool spells a control token, where a template reads tools as one of its variables.

    Raises:
        ConfigError: one does.
    """
    texts = ["\n".join(texts_in(tool)) for tool in tools]
    whole = "\n".join(texts)  # a vocabulary may have thousands of such tokens, and a request a thousand tools
    letters = frozenset(whole)
    for token in special_tokens:
        if token and letters.issuperset(token) and token in whole:
            index = next((at for at, text in enumerate(texts) if token in text), 0)
            raise ConfigError(f"tools[{index}] spells {quoted(token)}, a control token of the model; leave it out")


def _checked_name(name: object, field: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        found = "is missing" if name is None else f"is {quoted(name)}"
        raise ConfigError(f"{field} {found}; it must be 1 to {LONGEST_NAME} letters, digits, '_', '-' and '.'")
    return name


def _check_parameters(parameters: object, field: str) -> None:
    if parameters is None:
        return
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise ConfigError(f'{field} must be a JSON schema of {{"type": "object"}}')
    properties = parameters.get("properties", {})
    if not isinstance(properties, Mapping):
        raise ConfigError(f"{field}.properties must be an object")
    for name, schema in properties.items():
        if not isinstance(schema, Mapping | bool):
            raise ConfigError(f"{field}.properties[{quoted(name)}] must be a JSON schema")
    required = parameters.get("required", [])
    if not isinstance(required, list | tuple) or not all(isinstance(name, str) for name in required):
        raise ConfigError(f"{field}.required must be a list of names")
