"""Random JSON schemas with what schemas of strangers have: ends of types, odd counts, references, broken parts.

    python tests/random_schemas.py 0 20000      each is tried, compiled, followed, and its answers are validated

A process of its own, because a schema may end it; the line that it prints last says what came of the schemas.
"""

import decimal
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import jsonschema
from referencing.exceptions import Unresolvable
from support.comparisons import letter_tokens

from graphcore.errors import ConfigError
from graphcore.tokenizer.grammar import GrammarMask, GrammarTokens

NUMBERS: Sequence[float] = (
    *(0, 1, -1, 2, 10, 100, 255, 256, -128, 127, 32767, 2**31 - 1, -(2**31), 2**31, 2**32, 2**32 - 1),
    *(2**53, 2**53 - 1, 2**53 + 1, -(2**53), -(2**53) - 1, 10**17, 10**18 - 1, 10**18, -(10**18), 2**62),
    *(
        2**63 - 1024,
        2**63 - 1,
        2**63,
        2**63 + 2048,
        -(2**63),
        -(2**63) - 1,
        -(2**63) + 1024,
        2**64 - 1,
        2**64,
        -(2**64),
    ),
    *(1e19, -1e19, 1e22, 1e300, -1e300, 1.7976931348623157e308, 3.4028234663852886e38, 0.5, -0.5, 0.1, 1e-9, 1e-7),
    *(-1e-300, 5e-324, 0.30000000000000004, 1.5, 99.99, -99.99, 123456789.125, -0.0),
)
STEPS = (1, 2, 3, 5, 7, 10, 60, 100, 256, 1000, 0, 0.5, 0.1, 0.01, 0.25, 1e-3, 1.5, 0.3, 2.5, -3, 1e-9, 2**31)
COUNTS = (0, 1, 2, 3, 5, 10, 100, 2000, 10**5, 2**32 - 1, 2**32, 2**53, 2**64 - 1, 2**64, -1, 1.0, "3")
PATTERNS = (
    *(
        "^a+$",
        "^[a-z]{2,5}$",
        "abc",
        "^$",
        "^(foo|bar)$",
        r"\d{3}-\d{4}",
        r"^\w+@\w+\.com$",
        "^.{0,3}$",
        "(a|b)*c",
        "[",
    ),
    *("^(?!x)", r"\p{L}+", "^(a{1,50}){1,50}$", r"^\s*$", r"\bword\b", "^[^a]*$", "(?i)abc", "^x{1000}$", "a|"),
    *("^((((((a))))))$", "\u00e9", r"^\/", "(((a{1,99}){1,99}){1,99}){1,99}"),
)
FORMATS = ("date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "uri", "hostname", "duration", "regex", "no")
KEYS = ("a", "b", "c", "name", "x y", "", "\u00e4", "$ref", "minimum", "enum", '"q', "\\")
TYPES = ("null", "boolean", "number", "integer", "string", "array", "object")
UNKNOWN = ("not", "if", "contains", "propertyNames", "dependentRequired", "$dynamicRef", "unknown")
NOTES = ("title", "description", "default", "examples", "$comment")
CHECKED = jsonschema.FormatChecker(formats=("date", "email", "ipv4", "ipv6", "uuid"))
LEADING = frozenset(b'{}[]":,\\.-+eE0123456789')
STEPS_OF_ANSWER = 400


class RandomSchema:
    """A schema by its number.

    Attributes:
        schema: the schema, of which JSON's text is taken.
    """

    def __init__(self, number: int) -> None:
        self._random = random.Random(number)
        self._definitions = self._random.choice(((), (), ("d",), ("d", "e")))
        self.schema = self._of(self._random.choice((1, 2, 2, 3, 4)))
        if self._definitions and isinstance(self.schema, dict):
            self.schema["$defs"] = {name: self._of(2) for name in self._definitions}

    def _often(self, share: float) -> bool:
        return self._random.random() < share

    def _of(self, depth: int) -> Any:
        choice = self._random
        if self._often(0.03):
            return choice.choice((True, False, {}))
        schema: dict[str, Any] = {}
        if depth > 0 and self._often(0.09):
            schema[choice.choice(("anyOf", "oneOf", "allOf"))] = [
                self._of(depth - 1) for _ in range(choice.randint(1, 3))
            ]
        if self._definitions and self._often(0.1):
            known = [f"#/$defs/{name}" for name in self._definitions]
            schema["$ref"] = choice.choice([*known * 6, "#", "#/nope", "http://x.y/z", "#/properties/a"])
        if schema and self._often(0.6):
            return schema
        if self._often(0.05):
            schema.update(choice.choice(({"const": self._value(2)}, {"enum": [self._value(1) for _ in range(3)]})))
        kind = choice.choice((*TYPES, "integer", "number", "object"))
        if self._often(0.9):
            schema["type"] = kind if self._often(0.9) else [kind, choice.choice(TYPES)]
        schema.update(self._rules(kind, depth))
        if self._often(0.02):
            schema["type"] = choice.choice(("nothing", 3, [], None))
        if self._often(0.02):
            schema[choice.choice(UNKNOWN)] = choice.choice(({}, True, 3, self._of(0)))
        if self._often(0.03):
            schema[choice.choice(NOTES)] = choice.choice(("x", self._value(1), ["y"]))
        return schema

    def _rules(self, kind: str, depth: int) -> dict[str, Any]:
        rules: dict[str, Any] = {}
        if kind in ("number", "integer"):
            bounds = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
            rules = {key: self._number() for key in bounds if self._often(0.35)}
            if self._often(0.05):
                rules["exclusiveMinimum"] = True
            if self._often(0.25):
                rules["multipleOf"] = self._random.choice(STEPS)
        elif kind == "string":
            rules = self._counts("Length")
            if self._often(0.3):
                rules["pattern"] = self._random.choice(PATTERNS)
            if self._often(0.2):
                rules["format"] = self._random.choice(FORMATS)
        elif kind == "array":
            rules = self._counts("Items")
            if depth > 0 and self._often(0.8):
                rules["items"] = self._of(depth - 1)
            if depth > 0 and self._often(0.2):
                rules["prefixItems"] = [self._of(depth - 1) for _ in range(self._random.randrange(3))]
            if self._often(0.05):
                rules["uniqueItems"] = self._often(0.5)
        elif kind == "object":
            rules = self._counts("Properties") if self._often(0.3) else {}
            keys = self._random.sample(KEYS, self._random.randrange(4))
            if depth > 0:
                rules["properties"] = {key: self._of(depth - 1) for key in keys}
            if keys and self._often(0.6):
                rules["required"] = self._random.sample([*keys, "zz"], self._random.randrange(len(keys) + 1))
            if self._often(0.5):
                rules["additionalProperties"] = self._of(depth - 1) if depth > 0 and self._often(0.3) else False
            if depth > 0 and self._often(0.1):
                rules["patternProperties"] = {self._random.choice(PATTERNS): self._of(depth - 1)}
        return rules

    def _counts(self, kind: str) -> dict[str, Any]:
        counts = {}
        for key in (f"min{kind}", f"max{kind}"):
            if self._often(0.3):
                counts[key] = self._random.choice(COUNTS) if self._often(0.25) else self._random.randrange(4)
        return counts

    def _number(self) -> float:
        choice = self._random
        if self._often(0.4):
            return choice.choice(NUMBERS) + (choice.choice((-1, 1, 2, 1024, -1024)) if self._often(0.15) else 0)
        return choice.choice((choice.randint(-9, 9), choice.randint(-1000, 1000), round(choice.uniform(-100, 100), 2)))

    def _value(self, depth: int) -> Any:
        choice = self._random
        if self._often(0.35):
            return self._number()
        if depth <= 0 or self._often(0.5):
            return choice.choice((None, True, False, "", "a", '"', "\u00e9", "\n", "<|end|>", "\ud800"))
        if self._often(0.5):
            return [self._value(depth - 1) for _ in range(choice.randrange(3))]
        return {choice.choice(KEYS): self._value(depth - 1) for _ in range(choice.randrange(3))}


def answer_under(tokens: GrammarTokens, mask: GrammarMask, choice: random.Random) -> str | None:
    """Return a random answer that a grammar allows; None if it has no end within `STEPS_OF_ANSWER` bytes."""
    matcher, answer = mask.copy().matcher, bytearray()
    pieces = [tokens.known.decode_bytes([token_id]) for token_id in range(256)]
    while len(answer) < STEPS_OF_ANSWER and not matcher.is_error():
        if matcher.is_stopped() or (matcher.is_accepting() and choice.random() < 0.3):
            return answer.decode("utf-8", "replace")
        bits = matcher.compute_bitmask()
        if matcher.is_error():
            break
        can_come = [at for at in range(256) if bits[at >> 3] >> (at & 7) & 1]
        leading = [at for at in can_come if pieces[at][0] in LEADING]
        chosen = choice.choice(leading if leading and choice.random() < 0.8 else can_come or [256])
        matcher.consume_token(chosen)
        answer += pieces[chosen] if chosen < 256 else b""
    return None


def is_valid(answer: str, schema: Any) -> bool | None:
    """Return what jsonschema says of an answer, with exact numbers; None if it does not know the schema.

    Bounds that are ends of types are left out, as the documentation says.
    """
    exact = without_ends(json.loads(json.dumps(schema), parse_float=Decimal))
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
        checked = jsonschema.Draft202012Validator(exact, format_checker=CHECKED)
        return checked.is_valid(json.loads(answer, parse_float=Decimal))
    except (jsonschema.SchemaError, re.error, Unresolvable, RecursionError, TypeError, ZeroDivisionError):
        return None
    except decimal.InvalidOperation:  # multipleOf 0
        return None


def without_ends(schema: Any) -> Any:
    """Return a schema without bounds of int64, of uint64, and of floats."""
    if isinstance(schema, list):
        return [without_ends(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: without_ends(value) for key, value in schema.items()}
    for key in ("minimum", "maximum", "exclusiveMaximum"):
        if isinstance(schema.get(key), int | Decimal) and abs(schema[key]) >= 2**63 - 1:
            del kept[key]
    return kept


def main(first: int, last: int) -> None:
    """Try schemas, and print what came of them."""
    decimal.getcontext().prec = 800
    tokens, found, wrong = letter_tokens(), Counter[str](), list[str]()
    for number in range(first, last):
        schema = RandomSchema(number).schema
        mask = GrammarMask(tokens, "json_schema", schema)
        try:
            mask.prepare()
        except ConfigError as error:
            named = next(
                (name for name in ("SIG", "takes more than", "cannot be kept") if name in str(error)), "refused"
            )
            found[named] += 1
            if named in ("SIG", "takes more than"):
                print(number, str(error), json.dumps(schema)[:500], flush=True)
            continue
        found["compiled"] += 1
        answer = answer_under(tokens, mask, random.Random(number))
        judged = None if answer is None else is_valid(answer, schema)
        found["valid" if judged else "unknown" if judged is None else "wrong"] += 1
        if judged is False:
            wrong.append(f"{number}: {json.dumps(schema)} allows {answer}")
    print("\n".join(wrong), json.dumps(found), sep="\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
