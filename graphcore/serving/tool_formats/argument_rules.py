"""Grammar rules for arguments that are no JSON object: the values of tags, Python's arguments, and Gemma's objects.

Parameters come in one order, required ones always: in the schema's order in tags and in Python's calls, sorted by name
in Gemma's objects, as the chat templates write them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from graphcore.serving.tool_formats.gemma_call import QUOTE
from graphcore.serving.tool_formats.lark_rules import TEXT, LarkRules, choice_of, inline_json, quoted_literal
from graphcore.serving.tool_formats.schema_types import resolved, types_of
from graphcore.serving.tool_formats.tool_format import CallTags

Schema = Mapping[str, Any]

_WORDS = {"boolean": ("true", "false", "True", "False"), "null": ("null", "None")}
_NUMBERS = ("integer", "number")
_MOST_LEVELS = 8  # objects within objects; deeper ones may be anything


class TagRules:
    """Rules for calls in tags, as Qwen 3 Coder and GLM 4.5 write them."""

    def __init__(self, rules: LarkRules, tags: CallTags) -> None:
        line, pad = tags.line_break, tags.line_break if tags.pads_values else ""
        self._rules = rules
        self._tags = tags
        self._call_begin = line + tags.name_open if tags.name_open else ""
        self._value_begin = (line + tags.value_open if tags.value_open else "") + pad
        self._value_end = pad + tags.value_close + line
        self._call_end = tags.end + line if tags.end else ""
        self._text = f"{rules.up_to(tags.value_close)} {quoted_literal(line)}"

    def call(self, name: str, root: Schema | None) -> str:
        """Return the element for a call of a function.

        Args:
            root: JSON schema of the parameters; None if they may be anything.
        """
        tags = self._tags
        members = [self._parameter(key, schema, root) for key, schema in _properties(root, root)] if root else []
        if not members and _is_open(root):
            key = self._rules.add_terminal(r"/[^<>\n]{1,100}/")
            key_end = quoted_literal(tags.key_close + self._value_begin)
            members = [f"({quoted_literal(tags.key_open)} {key} {key_end} {self._text})*"]
        head = quoted_literal(self._call_begin + name + tags.name_close + tags.line_break)
        return f"{head} {' '.join(members)} {quoted_literal(self._call_end)}"

    def _parameter(self, key: str, schema: object, root: Schema) -> str:
        head = quoted_literal(self._tags.key_open + key + self._tags.key_close + self._value_begin)
        rule = self._rules.add(f"{head} {self._value(schema, root)}")
        return rule if key in _required(root, root) else f"{rule}?"

    def _value(self, schema: object, root: Schema) -> str:
        types, texts = types_of(schema, root), _texts(schema, root)
        if texts:
            return choice_of(quoted_literal(text + self._value_end) for text in texts)
        if not types or "string" in types:
            return self._text
        return f"{_bare_value(schema, root, types)} {quoted_literal(self._value_end)}"


class PythonRules:
    """Rules for calls as Python writes them; texts, arrays and objects are written as JSON, which Python reads, too."""

    def __init__(self, rules: LarkRules) -> None:
        self._rules = rules

    def call(self, name: str, root: Schema | None) -> str:
        """Return the element for a call of a function.

        Args:
            root: JSON schema of the parameters; None if they may be anything.
        """
        properties = _properties(root, root) if root else []
        if not properties and _is_open(root):
            value = _bare_value({}, {}, frozenset())
            member = self._rules.add(f"{self._rules.add_terminal(r'/[a-zA-Z_][a-zA-Z0-9_]{0,99}=/')} {value}")
            return f"{quoted_literal(name + '(')} ({member} ({quoted_literal(', ')} {member})*)? {quoted_literal(')')}"
        members = []
        for key, schema in properties:
            value = _bare_value(schema, root or {}, types_of(schema, root or {}))
            is_required = key in _required(root, root or {})
            members.append((self._rules.add(f"{quoted_literal(key + '=')} {value}"), is_required))
        return f"{quoted_literal(name + '(')} {joined_members(self._rules, members, ', ')} {quoted_literal(')')}"


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
        members = []
        for key, value in properties:
            member = self._rules.add(f"{quoted_literal(key + ':')} {self._value(value, root, level + 1)}")
            members.append((member, key in _required(known, root)))
        return f'"{{" {joined_members(self._rules, members, ",")} "}}"'

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


def joined_members(rules: LarkRules, members: Sequence[tuple[str, bool]], separator: str) -> str:
    """Return the element for members in their order, of which those may be left out that are not required.

    Args:
        members: element of each member, and whether it is required.
        separator: text between two members.
    """
    comma = quoted_literal(separator)
    rest, first = '""', '""'  # the members from one on, with a separator before them or not
    for member, is_required in reversed(members):
        first = rules.add(f"{member} {rest}" + ("" if is_required else f" | {first}"))
        rest = rules.add(f"{comma} {member} {rest}" if is_required else f"({comma} {member})? {rest}")
    return first


def _bare_value(schema: object, root: Schema, types: frozenset[str]) -> str:
    """Return the element for a value in JSON, with the words of Python and JSON for truth values and null."""
    is_json = not types or bool(types - _WORDS.keys())
    named = [word for name in sorted(types & _WORDS.keys() if types else _WORDS) for word in _WORDS[name]]
    words = [quoted_literal(word) for word in named if types or word.istitle()]  # JSON's own are in the schema's
    return choice_of([*([inline_json(_with_definitions(schema, root))] if is_json else ()), *words])


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
    return {**definitions_of(root), **resolved(schema, root)}


def definitions_of(root: Schema) -> dict[str, Any]:
    """Return the definitions to which references in a schema point."""
    return {word: root[word] for word in ("$defs", "definitions") if word in root}
