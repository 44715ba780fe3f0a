"""Tools that no model can be offered are refused, and the message names the field."""

from typing import Any

import pytest
from tool_texts import TOOLS

from graphcore.errors import ConfigError
from graphcore.serving.tool_formats.families import FAMILIES, HERMES, PLAIN
from graphcore.serving.tool_formats.tool_checks import check_tools


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        ({"type": "function", "function": {}}, r"tools\[1\]\.function\.name is missing; it must be 1 to 64 letters"),
        (function(name=""), r"tools\[1\]\.function\.name is ''"),
        (function(name="a b"), r"tools\[1\]\.function\.name is 'a b'"),
        (function(name="a\n"), r"tools\[1\]\.function\.name is 'a\\n'"),
        (function(name="\u00e9"), r"tools\[1\]\.function\.name is "),
        (function(name="x" * 65), r"tools\[1\]\.function\.name is "),
        (function(name=5), r"tools\[1\]\.function\.name is 5"),
        (function(name="search_2"), r"tools\[1\]\.function\.name: 'search_2' is the name of an earlier tool"),
        (function(parameters=[]), r"tools\[1\]\.function\.parameters must be a JSON schema"),
        (function(parameters={"type": "string"}), r"tools\[1\]\.function\.parameters must be a JSON schema"),
        (function(parameters={"properties": []}), r"tools\[1\]\.function\.parameters\.properties must be"),
        (function(parameters={"properties": {"a": 5}}), r"parameters\.properties\['a'\] must be a JSON schema"),
        (function(parameters={"required": "a"}), r"parameters\.required must be a list"),
        (function(strict="yes"), r"tools\[1\]\.function\.strict must be true or false"),
        ({"type": "web_search"}, r"tools\[1\] must be "),
        ({"type": "function"}, r"tools\[1\] must be "),
        ("f", r"tools\[1\] must be "),
    ],
)
def test_a_tool_that_cannot_be_offered_is_refused_by_its_field(tool: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_tools([TOOLS[0], tool], HERMES)


@pytest.mark.parametrize("known", FAMILIES, ids=lambda family: family.name)
def test_tools_are_refused_where_the_template_knows_none(known: Any) -> None:
    check_tools([], known)
    valid = [*TOOLS, function(name="x" * 64), function(name="A-b.9_", parameters={}, strict=True)]
    if known is PLAIN:
        with pytest.raises(ConfigError, match="tools: this model's chat template knows no tools"):
            check_tools(valid, known)
    else:
        check_tools(valid, known)
