"""The environment of a chat template: Jinja's immutable sandbox, plain data, and what transformers gives its templates.

Names that start with an underscore cannot be stored (they were the way out of older sandboxes). The rest is as in
(utils/chat_template_utils.py: `_compile_jinja_template`), so the text is the same as from `apply_chat_template`.
Nothing here bounds time or memory: it runs in a process that does (bounded_worker.py).
"""

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from graphcore.tokenizer.bounded_worker import REFUSED, TEXT, UNREADABLE

LONGEST_REASON = 300  # characters


def template_answers(beginning: bytes, room: int) -> Callable[[bytes], tuple[bytes, str]]:
    """Return the function from a conversation, the template's inputs as JSON, to an answer: its kind and text.

    Args:
        beginning: the template.
        room: number of characters that it may add to those of the messages.
    """
    template, reason = compile_template(beginning.decode("utf-8", "surrogatepass"))

    def answer(request: bytes) -> tuple[bytes, str]:
        if template is None:
            return UNREADABLE, reason
        text, refusal = render_template(template, json.loads(request), room + len(request))
        return (REFUSED, refusal) if text is None else (TEXT, text)

    return answer


def compile_template(text: str) -> tuple[jinja2.Template | None, str]:
    """Return the template, or None and the reason why it is invalid."""
    try:
        return _environment().from_string(text), ""
    except jinja2.TemplateSyntaxError as error:
        return None, _printable(f"line {error.lineno}: {error.message}")
    except Exception as error:  # noqa: BLE001 - Jinja folds untrusted code while it compiles, so anything may be raised
        return None, _reason_of(error)


def render_template(template: jinja2.Template, inputs: Mapping[str, object], most: int) -> tuple[str | None, str]:
    """Return the text, or None and the reason why there is none.

    Args:
        inputs: the template's inputs.
        most: largest number of characters of the text.
    """
    pieces: list[str] = []
    length = 0
    try:
        for piece in template.generate(inputs):
            length += len(piece)
            if length > most:
                return None, f"it writes more than {most} characters"
            pieces.append(piece)
        return "".join(pieces), ""
    except Exception as error:  # noqa: BLE001 - untrusted code may raise anything
        return None, _reason_of(error)


def _reason_of(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "it needs more memory than a template may have"
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    return _printable(str(error)) or type(error).__name__


def _printable(text: str) -> str:
    """Return the text on one line, shortened, and without control characters for the terminal."""
    line = " ".join(text[: 10 * LONGEST_REASON].split())
    kept = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in line)
    return kept if len(kept) <= LONGEST_REASON else f"{kept[: LONGEST_REASON - 3]}..."


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_PublicNamespace, dict=_Dict()
    )
    return environment


class _Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox that rejects what its parent class would silently render as an empty text."""

    def unsafe_undefined(self, obj: object, attribute: str) -> jinja2.Undefined:
        raise SecurityError(f"it reads '{attribute}' of a {type(obj).__name__}")


class _GenerationTag(Extension):
    """Accepts `{% generation %}...{% endgeneration %}`, which marks text for training, and renders what is inside."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it on the instance

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _PublicNamespace(Namespace):
    """Jinja's `namespace()`, without names that Python uses internally."""

    def __init__(self, /, *args: object, **kwargs: object) -> None:
        values: dict[str, object] = dict(*args, **kwargs)
        for name in values:
            _check_public(name)
        super().__init__(values)

    def __setitem__(self, name: str, value: object) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace cannot hold '{name}'")


class _Dict:
    """The `dict` of templates: it makes dictionaries, and gives no access to the type."""

    def __call__(self, *args: object, **kwargs: object) -> dict[str, object]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[str], value: object = None) -> dict[str, object]:
        """Return a dictionary with the same value under each key."""
        return dict.fromkeys(keys, value)


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
    """Return a value as JSON in which, unlike in Jinja's filter, `<`, `>` and non-ASCII letters stay as they are."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
