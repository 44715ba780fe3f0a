"""Tools that no model can be offered are refused, and the message names the field."""

from typing import Any

import pytest
from support.serving import serve_settings
from support.tool_texts import TOOLS

from graphcore import Engine
from graphcore.errors import ConfigError
from graphcore.serving.answering import check_call
from graphcore.serving.chat_call import ChatCall
from graphcore.serving.request_errors import RequestError
from graphcore.serving.served_model import ServedModel
from graphcore.serving.tool_formats.families import FAMILIES, HERMES, PLAIN
from graphcore.serving.tool_formats.tool_checks import check_no_control_tokens, check_tools


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        ({"type": "function", "function": {}}, r"tools\[1\]\.function\.name is missing; it must be 1 to 128 letters"),
        (function(name=""), r"tools\[1\]\.function\.name is ''"),
        (function(name="a b"), r"tools\[1\]\.function\.name is 'a b'"),
        (function(name="a\n"), r"tools\[1\]\.function\.name is 'a\\n'"),
        (function(name="\u00e9"), r"tools\[1\]\.function\.name is "),
        (function(name="x" * 129), r"tools\[1\]\.function\.name is "),
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
    valid = [*TOOLS, function(name="x" * 128), function(name="A-b.9_", parameters={}, strict=True)]
    if known is PLAIN:
        with pytest.raises(ConfigError, match="tools: this model's chat template knows no tools"):
            check_tools(valid, known)
    else:
        check_tools(valid, known)


def test_schemas_that_are_not_compiled_are_not_counted() -> None:
    """A thousand tools of two megabytes are shown to the model; only those that bind the answer have a limit."""

    def load() -> Engine:
        raise AssertionError("nothing is loaded")

    served = ServedModel("tiny", serve_settings(), load)
    served._format = HERMES
    long = {"type": "object", "description": "d" * 2000}
    tools = [function(name=f"{at:0128}", parameters=long) for at in range(1023)]
    tools.append(function(name="strict", parameters={"type": "object"}, strict=True))
    check_call(served, ChatCall([], tools))
    check_call(served, ChatCall([], tools, tool_choice="required", tool_name=f"{5:0128}"))
    check_call(served, ChatCall([], [function(**{**tools[0]["function"], "strict": True})]))
    strict = [function(**{**tool["function"], "strict": True}) for tool in tools]
    for call in (ChatCall([], tools, tool_choice="required"), ChatCall([], strict)):
        with pytest.raises(RequestError, match=r"schemas of 2\d{6} characters; this server takes 200000"):
            check_call(served, call)
    check_call(served, ChatCall([], strict, tool_choice="none"))
    with pytest.raises(RequestError, match="tools has 1025; this server takes 1024"):
        check_call(served, ChatCall([], [*tools, function(name="further")]))


def test_control_tokens_are_found_in_many_tools() -> None:
    """Which takes half a minute if each tool is looked through for each token."""
    tools = [function(name=f"f{at}", description="d" * 200) for at in range(1024)]
    tokens = [f"<unused{at}>" for at in range(6000)]
    check_no_control_tokens(tools, tokens)
    tools[700]["function"]["parameters"] = {"properties": {"a": {"enum": ["<unused59>"]}}}
    with pytest.raises(ConfigError, match=r"tools\[700\] spells '<unused59>'"):
        check_no_control_tokens(tools, tokens)
