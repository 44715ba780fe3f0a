"""Grammar rules for arguments that are no JSON: the values of tags, and Gemma's objects.

Parameters come in one order, required ones always: in the schema's order in tags, sorted by name in Gemma's objects, as
the chat templates write them.
"""

from collections.abc import Mapping
from typing import Any

from graphcore.serving.tool_formats.gemma_call import QUOTE
from graphcore.serving.tool_formats.lark_rules import TEXT, LarkRules, choice_of, inline_json, quoted_literal
from graphcore.serving.tool_formats.schema_types import resolved, types_of

Schema = Mapping[str, Any]

_PARAMETER_END = "\n</parameter>\n"
_WORDS = {"boolean": ("true", "false", "True", "False"), "null": ("null", "None")}
_NUMBERS = ("integer", "number")
_MOST_LEVELS = 8  # objects within objects; deeper ones may be anything


class TagRules:
    """Rules for calls in tags, as Qwen 3 Coder writes them."""

    def __init__(self, rules: LarkRules) -> None:
        self._rules = rules
        self._text = f'{rules.up_to("</parameter>")} "\\n"'

    def call(self, name: str, root: Schema | None) -> str:
        """Return the element for a call of a function.

        Args:
            root: JSON schema of the parameters; None if they may be anything.
        """
        members = [self._parameter(key, schema, root) for key, schema in _properties(root, root)] if root else []
        if not members and _is_open(root):
            key = self._rules.add_terminal(r"/[^>\n]{1,100}/")
            members = [f'("<parameter=" {key} ">\\n" {self._text})*']
        body = " ".join(members)
        return f"{quoted_literal(f'<function={name}>' + chr(10))} {body} {quoted_literal('</function>' + chr(10))}"

    def _parameter(self, key: str, schema: object, root: Schema) -> str:
        rule = self._rules.add(f"{quoted_literal(f'<parameter={key}>' + chr(10))} {self._value(schema, root)}")
        return rule if key in _required(root, root) else f"{rule}?"

    def _value(self, schema: object, root: Schema) -> str:
        types, texts = types_of(schema, root), _texts(schema, root)
        if texts:
            return choice_of(quoted_literal(text + _PARAMETER_END) for text in texts)
        if not types or "string" in types:
            return self._text
        words = [quoted_literal(word) for name in sorted(types & _WORDS.keys()) for word in _WORDS[name]]
        is_json = bool(types - _WORDS.keys())
        values = [*([inline_json(_with_definitions(schema, root))] if is_json else ()), *words]
        return f"{choice_of(values)} {quoted_literal(_PARAMETER_END)}"


class GemmaRules:
    """Rules for calls in Gemma's syntax."""

    def __init__(self, rules: LarkRules) -> None:
        self._rules = rules
        self._anything: str | None = None

    def call(self, name: str, root: Schema | None) -> str:
        """Return the element for a call of a function.

        Args:
            root: JSON schema of the parameters; None if they may be anything.
        """
        return f"{quoted_literal(f'call:{name}')} {self._object(root or {}, root or {}, 0)}"

    def _value(self, schema: object, root: Schema, level: int) -> str:
        types, texts = types_of(schema, root), _texts(schema, root)
        if texts:
            return choice_of(f"{QUOTE} {quoted_literal(text)} {QUOTE}" for text in texts)
        found = []
        for name in sorted(types):
            if name == "string":
                found.append(f"{QUOTE} {TEXT} {QUOTE}")
            elif name == "object":
                found.append(self._object(schema, root, level))
            elif name == "array":
                items = resolved(schema, root).get("items", {})
                item = self._any() if level >= _MOST_LEVELS else self._value(items, root, level + 1)
                item = self._rules.add(item)
                found.append(f'"[" ({item} ("," {item})*)? "]"')
            elif name in _WORDS:
                found += map(quoted_literal, _WORDS[name])
        if types & set(_NUMBERS):
            found.append(inline_json({**resolved(schema, root), "type": [name for name in _NUMBERS if name in types]}))
        return choice_of(found) if found else self._any()

    def _object(self, schema: object, root: Schema, level: int) -> str:
        known = resolved(schema, root)
        properties = sorted(_properties(known, root), key=lambda pair: pair[0].lower())
        if level >= _MOST_LEVELS or (not properties and _is_open(known)):
            return self._any_object()
        rest, first = '""', '""'  # the members from one on, with a comma before them or not
        for key, value in reversed(properties):
            member = self._rules.add(f"{quoted_literal(key + ':')} {self._value(value, root, level + 1)}")
            is_required = key in _required(known, root)
            first = self._rules.add(f"{member} {rest}" + ("" if is_required else f" | {first}"))
            rest = self._rules.add(f'{"" if is_required else "("}"," {member}{"" if is_required else ")?"} {rest}')
        return f'"{{" {first} "}}"'

    def _any_object(self) -> str:
        self._any()
        return f"{self._anything}_object"

    def _any(self) -> str:
        """Return the name of the rule for any value."""
        if self._anything is None:
            self._anything = "anything"
            text = f"{QUOTE} {TEXT} {QUOTE}"
            scalar = inline_json({"type": ["number", "boolean", "null"]})
            key = self._rules.add_terminal(r"/[a-zA-Z0-9_]{1,100}/")
            self._rules.define("anything_member", f'({key} | {text}) ":" anything')
            self._rules.define("anything_object", '"{" (anything_member ("," anything_member)*)? "}"')
            array = '"[" (anything ("," anything)*)? "]"'
            self._rules.define("anything", f'{text} | {scalar} | "None" | {array} | anything_object')
        return self._anything


def _properties(schema: object, root: Schema | None) -> list[tuple[str, object]]:
    properties = resolved(schema, root or {}).get("properties")
    return list(properties.items()) if isinstance(properties, Mapping) else []


def _required(schema: object, root: Schema) -> list[str]:
    required = resolved(schema, root).get("required")
    return list(required) if isinstance(required, list) else []


def _is_open(schema: object) -> bool:
    """Return whether an object may have members that its schema does not name."""
    return not isinstance(schema, Mapping) or schema.get("additionalProperties", True) is not False


def _texts(schema: object, root: Schema) -> list[str]:
    """Return the texts that a schema allows, if it lists them; else none."""
    known = resolved(schema, root)
    values = known.get("enum", [known["const"]] if "const" in known else [])
    return list(values) if values and all(isinstance(value, str) for value in values) else []


def _with_definitions(schema: object, root: Schema) -> dict[str, Any]:
    """Return a part of a schema with the definitions that it may refer to."""
    definitions = {word: root[word] for word in ("$defs", "definitions") if word in root}
    return {**definitions, **resolved(schema, root)}
