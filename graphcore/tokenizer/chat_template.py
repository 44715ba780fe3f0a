"""Turns chat messages into the text a model was trained on, by the Jinja template that its checkpoint carries.

A template is code from a stranger: it runs in Jinja's immutable sandbox, sees plain data only, and cannot store names
that start with an underscore (the way out of older sandboxes). What templates may use is what `transformers` gives them
(utils/chat_template_utils.py: `_compile_jinja_template`), so the text is the same as from `apply_chat_template`.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from graphcore.errors import TokenizerError

Message = Mapping[str, object]
"""One turn: "role" and "content", and whatever else the template reads."""

_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """A compiled chat template.

    Raises:
        TokenizerError: the text is not a Jinja template.
    """

    def __init__(self, text: str, source: str) -> None:
        self._source = source
        try:
            self._template = _environment().from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerError(f"{source}: chat template, line {error.lineno}: {error.message}") from error

    def render(
        self, messages: Sequence[Message], variables: Mapping[str, str], add_generation_prompt: bool = True
    ) -> str:
        """Return the text of a conversation.

        Args:
            messages: the turns, oldest first.
            variables: `bos_token`, `eos_token` and the like.
            add_generation_prompt: end with what opens the model's turn.

        Raises:
            TokenizerError: there are no messages, or the template refuses them, fails on them, or tries to leave the
                sandbox.
        """
        if not messages:
            raise TokenizerError(f"{self._source}: a chat needs at least one message")
        inputs = {"messages": list(messages), "tools": None, "documents": None}
        try:
            return self._template.render(**inputs, **variables, add_generation_prompt=add_generation_prompt)
        except _TEMPLATE_FAULTS as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise TokenizerError(f"{self._source}: the chat template refuses these messages: {reason}") from error


def default_template(value: object, source: str) -> str | None:
    """Return the template in a `chat_template` entry: one text, or a list of named ones of which "default" counts.

    Raises:
        TokenizerError: the list has no "default", or the entry is something else.
    """
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        if isinstance(named.get("default"), str):
            return str(named["default"])
        raise TokenizerError(f"{source}: chat_template has no 'default' among {', '.join(map(str, named))}")
    raise TokenizerError(f"{source}: chat_template is {type(value).__name__}, where a text or a list is expected")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_PublicNamespace, dict=_new_dict
    )
    return environment


class _Sandbox(ImmutableSandboxedEnvironment):
    """Refuses what its parent would quietly render as an empty text."""

    def unsafe_undefined(self, obj: object, attribute: str) -> jinja2.Undefined:
        raise SecurityError(f"it reads '{attribute}' of a {type(obj).__name__}")


class _GenerationTag(Extension):
    """Accepts `{% generation %}...{% endgeneration %}`, which marks text for training, and renders what is inside."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it on the instance

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _PublicNamespace(Namespace):
    """Jinja's `namespace()`, without names that Python's internals read."""

    def __init__(self, /, *args: object, **kwargs: object) -> None:
        values = _new_dict(*args, **kwargs)
        for name in values:
            _check_public(name)
        super().__init__(values)

    def __setitem__(self, name: str, value: object) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace cannot hold '{name}'")


def _new_dict(*args: object, **kwargs: object) -> dict[str, object]:
    return dict(*args, **kwargs)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter, leave `<`, `>` and letters beyond ASCII as they are."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
