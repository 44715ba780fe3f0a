"""JSON schemas of parameters: the types that they allow, and values of these types from text.

Models write values without quotes in some syntaxes, so that only the schema tells the number 5 from the text "5".
"""

import re
from collections.abc import Mapping
from typing import Any

from graphcore.serving.tool_formats.json_scanner import is_json, json_string
from graphcore.serving.tool_formats.python_literal import literal_json

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?P<fraction>\.[0-9]+)?(?P<exponent>[eE][+-]?[0-9]+)?")
_MOST_REFERENCES = 16  # schemas within schemas that are looked into for a type
_WORDS = {"true": "true", "false": "false", "True": "true", "False": "false"}
_ANYTHING: Mapping[str, Any] = {}
_NULLS = ("null", "None")
_JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array"}


def resolved(schema: object, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema, or what its `$ref` into the root schema points at; an empty one if it allows anything."""
    for _ in range(_MOST_REFERENCES):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = root
        for step in reference.removeprefix("#").strip("/").split("/") if reference != "#" else ():
            schema = schema.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(schema, Mapping) else None
    return {}


def types_of(schema: object, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Return the names of the JSON types that a schema allows; empty if it names none."""
    if depth > _MOST_REFERENCES:
        return frozenset()
    known = resolved(schema, root)
    named = known.get("type")
    found = {named} if isinstance(named, str) else {name for name in named or () if isinstance(name, str)}
    for value in [*known.get("enum", ()), *([known["const"]] if "const" in known else [])] if not found else ():
        found.add(_JSON_TYPES.get(type(value), "object"))
    for word in ("anyOf", "oneOf", "allOf"):
        choices = known.get(word)
        for choice in choices if isinstance(choices, list) and not named else ():
            found |= types_of(choice, root, depth + 1)
    if not found and "properties" in known:
        found.add("object")
    if found and known.get("nullable") is True:
        found.add("null")
    return frozenset(found)


def property_schema(schema: object, name: str, root: Mapping[str, Any]) -> object:
    """Return the schema of an object's property; an empty one if there is none."""
    properties = resolved(schema, root).get("properties")
    return properties.get(name, _ANYTHING) if isinstance(properties, Mapping) else _ANYTHING


def json_of(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value that was written without quotes: of the first type that it can be, else a string.

    An array or object may be written as JSON or as Python writes it.
    """
    bare = text.strip()
    if "null" in types and bare in _NULLS:
        return "null"
    if "boolean" in types and bare in _WORDS:
        return _WORDS[bare]
    if types & {"integer", "number"} and (number := _NUMBER.fullmatch(bare)):
        if not (number["fraction"] or number["exponent"]) or "number" in types:
            return bare
        if abs(float(bare)) < 2**63 and float(bare).is_integer():
            return str(int(float(bare)))
    opens = ("{" if "object" in types else "") + ("[" if "array" in types else "")
    if bare[:1] and bare[0] in opens:
        found = bare if is_json(bare) else literal_json(bare)
        if found is not None:
            return found
    return json_string(text)
