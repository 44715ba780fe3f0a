"""Numbers of a JSON schema that llguidance would keep only nearly: dropped where that says the same, else refused.

llguidance reads numbers as float64 and a range of integers as int64, and rounds without a word; an answer under a
rounded bound is wrong. What it keeps, found by trial and in its source (parser/src/json/numeric.rs of 1.9.1):

    minimum            above -2**63 and below 10**18, if the number's shortest text as float64 has its digits
    maximum            above -10**18 and below 2**63, in the same way
    exclusive...       within +-(2**53 - 1): it adds or subtracts 1
    const, enum        within +-(2**63 - 1), integers that float64 has
    multipleOf         up to 10**5 steps: each is a state of an automaton; several of one number if uint32 holds them
    minLength ...      below 2**32

A bound that is the end of a type (int64, uint64, float32, float64) says that the number has this type, and is dropped.
"""

import math
from decimal import Decimal
from typing import Any

from graphcore.errors import ConfigError

Number = int | float
EXACT = 2**53 - 1  # largest integer whose neighbours float64 has, too
RANGES = {
    "minimum": (-(2**63), 10**18, "above -2**63 and below 10**18"),
    "maximum": (-(10**18), 2**63, "above -10**18 and below 2**63"),
    "exclusiveMinimum": (-EXACT - 1, EXACT + 1, "above -2**53 and below 2**53"),
    "exclusiveMaximum": (-EXACT - 1, EXACT + 1, "above -2**53 and below 2**53"),
}
"""Numbers between which a bound is kept, without the two."""
FLOAT_ENDS = (3.4028234663852886e38, 1.7976931348623157e308)  # of float32 and float64
LOWEST = frozenset({-(2.0**63), *(-end for end in FLOAT_ENDS)})
"""Lower ends of types, as float64, as which JavaScript writes them."""
HIGHEST = frozenset({2.0**63, 2.0**64, *FLOAT_ENDS})
SMALLEST = 1e-60  # number beside 0; with more digits, regular expressions are nested too deep
MOST_STEPS = 10**5  # of multipleOf; 10**6 take llguidance 6 s
MOST_DIGITS = 9  # of multipleOf, behind the point
MOST_TOGETHER = 2**16  # steps of the least common multiple; llguidance multiplies two such as uint32
LARGEST_COUNT = 2**32 - 1
COUNTS = {"Length": "characters", "Items": "items", "Properties": "properties"}
VALUES = ("default", "examples", "example")
"""Keywords that hold values, which no answer has to equal."""
SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
MERGED = ("multipleOf", "$ref", "anyOf", "oneOf")
"""Keywords whose rules are merged if one schema has two of them; those of `allOf` always are."""


def with_kept_bounds(schema: Any) -> Any:
    """Return a JSON schema whose numbers llguidance keeps, without bounds that are the ends of a type.

    Raises:
        ConfigError: a number cannot be kept.
    """
    walk = _Walk()
    kept = walk.schema(schema, "")
    walk.check_multiples()
    return kept


class _Walk:
    def __init__(self) -> None:
        self._multiples: dict[Number, str] = {}  # where each stands first
        self._merges = False

    def schema(self, schema: Any, where: str) -> Any:
        """Return a schema, or a list of them; other values as they are."""
        if isinstance(schema, list):
            return [self.schema(one, f"{where}[{at}]") for at, one in enumerate(schema)]
        if not isinstance(schema, dict):
            return schema
        schema = _with_open_ends(schema)
        self._merges |= "allOf" in schema or sum(key in schema for key in MERGED) > 1
        kept: dict[Any, Any] = {}
        for key, value in schema.items():
            at = f"{where}.{key}" if where else str(key)
            if key in SCHEMAS_BY_NAME and isinstance(value, dict):
                kept[key] = {name: self.schema(one, f"{at}.{name}") for name, one in value.items()}
            elif key in ("const", "enum"):
                _check_value(value, at)
                kept[key] = value
            elif key in VALUES:
                kept[key] = value
            elif not isinstance(value, int | float) or isinstance(value, bool):
                kept[key] = self.schema(value, at)
            elif not _is_end(key, value):
                # In draft 4 a truth beside the bound says that it is exclusive.
                exclusive = f"exclusive{str(key).capitalize()}"
                self._check(exclusive if schema.get(exclusive) is True else key, value, at)
                kept[key] = value
        return kept

    def _check(self, key: str, value: Number, where: str) -> None:
        if key in RANGES:
            lowest, highest, words = RANGES[key]
            if not lowest < value < highest:
                raise _refused(where, value, f"numbers {words} are kept")
            if 0 < abs(value) < SMALLEST:
                raise _refused(where, value, f"0 and numbers from {SMALLEST} on are kept")
            if isinstance(value, int) and value != _written(value):
                raise _refused(where, value, f"{_written(value)} is the nearest number that is kept")
        elif key == "multipleOf":
            self._multiples.setdefault(abs(value), where)
            if _digits(value) > MOST_DIGITS or _steps(value, _digits(value)) > MOST_STEPS:
                raise _refused(where, value, f"up to {MOST_STEPS} units of the last of {MOST_DIGITS} digits are kept")
        elif key.startswith("min") and key[3:] in COUNTS and value > LARGEST_COUNT:
            raise _refused(where, value, f"up to {LARGEST_COUNT} {COUNTS[key[3:]]} are kept")

    def check_multiples(self) -> None:
        """Check that several `multipleOf` of one number have a least common multiple that llguidance computes right."""
        if not self._merges or len(self._multiples) < 2:
            return
        digits = max(map(_digits, self._multiples))
        if math.lcm(*(int(_steps(value, digits)) for value in self._multiples)) >= MOST_TOGETHER:
            value, where = max(self._multiples.items())
            raise _refused(where, value, "with allOf, anyOf or $ref, all multipleOf together must have small multiples")


def _with_open_ends(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema in which an open end that llguidance takes for a closed one is the next float64.

    Those are whole numbers whose range ends before the next whole number: `0 < x <= 0.5`, `-1.5 <= x < -1`.
    """
    for open_end, closed, others, sign in (
        ("exclusiveMinimum", "minimum", ("maximum", "exclusiveMaximum"), 1),
        ("exclusiveMaximum", "maximum", ("minimum", "exclusiveMinimum"), -1),
    ):
        end = schema.get(open_end)
        if end is True:  # draft 4
            end = schema.get(closed)
        if isinstance(end, bool) or not isinstance(end, int | float) or end != end // 1 or end * sign < 0:
            continue
        ends = [schema[key] for key in others if isinstance(schema.get(key), int | float)]
        beside = schema.get(closed, end)
        # Compared, not subtracted: an integer may be beyond the range of floats.
        lowest, highest = sorted((end, end + sign))
        if not isinstance(beside, int | float) or schema.get("type") == "integer":
            continue
        if any(lowest < other < highest for other in ends):
            following = math.nextafter(end, sign * math.inf) if end else sign * SMALLEST
            schema = {key: value for key, value in schema.items() if key != open_end}
            schema[closed] = following if beside * sign < following * sign else beside
    return schema


def _is_end(key: str, value: Number) -> bool:
    """Return whether a bound is the end of a type, or a length that no answer reaches."""
    if key in ("maximum", "exclusiveMaximum"):
        end = _as_float(value)
        return end in HIGHEST and value >= int(end) - 1
    if key == "minimum":
        return _as_float(value) in LOWEST and value <= _as_float(value)
    return key.startswith("max") and key[3:] in COUNTS and value > LARGEST_COUNT


def _as_float(value: Number) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _steps(value: Number, digits: int) -> float:
    """Return a `multipleOf` in units of a decimal place, as llguidance computes it: float64 times 10, and again."""
    steps = abs(_as_float(value))
    for _ in range(digits):
        steps *= 10.0
    return steps


def _digits(value: Number) -> int:
    """Return the decimal places of a `multipleOf`; MOST_DIGITS + 1 if there are more."""
    return next((at for at in range(MOST_DIGITS + 1) if _steps(value, at) % 1 == 0), MOST_DIGITS + 1)


def _written(value: int) -> int:
    """Return the integer that llguidance writes for a float64: its shortest digits, and zeros."""
    return int(Decimal(repr(float(value))))


def _check_value(value: Any, where: str) -> None:
    """Check a value that an answer may have to equal."""
    if isinstance(value, list):
        for at, one in enumerate(value):
            _check_value(one, f"{where}[{at}]")
    elif isinstance(value, dict):
        for key, one in value.items():
            _check_value(one, f"{where}.{key}")
    elif isinstance(value, int | float) and not abs(value) < 2**63:
        raise _refused(where, value, "numbers within +-(2**63 - 1) are kept, and all texts")
    elif isinstance(value, int) and float(value) != value:
        raise _refused(where, value, "it is no float64; integers within +-2**53 are kept, and all texts")


def _refused(where: str, value: Number, kept: str) -> ConfigError:
    return ConfigError(f"json_schema: {where}={value!r:.40} cannot be kept; {kept}")
