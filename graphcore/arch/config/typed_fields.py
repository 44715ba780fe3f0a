"""Typed reads of untyped settings. Values are checked here once, and errors name the setting.

JSON null counts as absent, so that a field falls back to its default; `has` and `is_null` tell the two apart. JSON
booleans are never numbers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from graphcore.errors import CheckpointError, quoted

LARGEST_SIZE = 2**31 - 1  # far above any dimension, vocabulary or context of a real model


@dataclass(frozen=True)
class Fields:
    """Named settings from one file or one part of it.

    Each read method takes names in order of preference and returns the first value that is not null, else None.

    Attributes:
        raw: settings by name; never changed.
        source: name of the file, and of the part, for messages.
        own_names: names of a setting in this kind of file, tried before the usual name.
    """

    raw: Mapping[str, object]
    source: str
    own_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def names_of(self, name: str) -> tuple[str, ...]:
        """Return the possible names of a setting in the file, the preferred one first."""
        return (*self.own_names.get(name, ()), name)

    def has(self, name: str) -> bool:
        """Return whether the setting is present, possibly as null."""
        return any(one in self.raw for one in self.names_of(name))

    def is_null(self, name: str) -> bool:
        """Return whether the setting is present and null."""
        return self.has(name) and self._first((name,))[1] is None

    def size(self, *names: str) -> int | None:
        """Return an integer from 1 to `LARGEST_SIZE`.

        Raises:
            CheckpointError: the value is anything else.
        """
        name, value = self._first(names)
        if value is None:
            return None
        if type(value) is not int or value < 1:
            raise self.wrong(name, value, "a positive integer")
        if value > LARGEST_SIZE:
            raise self.wrong(name, value, f"at most {LARGEST_SIZE}")
        return value

    def whole(self, name: str) -> int | None:
        """Return an integer as `size` does, also from a float such as 32.0.

        Raises:
            CheckpointError: the value is anything else.
        """
        value = self._first((name,))[1]
        if not isinstance(value, float) or not value.is_integer():
            return self.size(name)
        return Fields({name: int(value)}, self.source).size(name)

    def number(self, *names: str) -> float | None:
        """Return a finite number.

        Raises:
            CheckpointError: the value is not a number, or is a boolean, infinite or NaN.
        """
        name, value = self._first(names)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
            raise self.wrong(name, value, "a finite number")
        return float(value)

    def count(self, name: str, most: int, default: int = 0) -> int:
        """Return an integer from 0 to `most`; 0 for null, and the default where the setting is absent.

        Raises:
            CheckpointError: the value is anything else.
        """
        found, value = self._first((name,))
        value = (value or 0) if self.has(name) else default
        if type(value) is not int or not 0 <= value <= most:
            raise self.wrong(found, value, f"an integer from 0 to {most}")
        return value

    def positive(self, *names: str) -> float | None:
        """Return a finite number above zero.

        Raises:
            CheckpointError: the value is anything else.
        """
        value = self.number(*names)
        if value is not None and value <= 0:
            raise self.wrong(*self._first(names), "above zero")
        return value

    def flag(self, *names: str) -> bool | None:
        """Return a boolean.

        Raises:
            CheckpointError: the value is anything else, such as 0 or 1.
        """
        name, value = self._first(names)
        if value is None or isinstance(value, bool):
            return value
        raise self.wrong(name, value, "true or false")

    def switch(self, name: str, default: bool) -> bool:
        """Return a boolean; false for null, as in transformers, and the default where the setting is absent.

        Raises:
            CheckpointError: the value is anything else.
        """
        return bool(self.flag(name)) if self.has(name) else default

    def text(self, *names: str) -> str | None:
        """Return a string.

        Raises:
            CheckpointError: the value is anything else.
        """
        name, value = self._first(names)
        if value is None or isinstance(value, str):
            return value
        raise self.wrong(name, value, "a string")

    def texts(self, name: str) -> tuple[str, ...] | None:
        """Return a list of strings as a tuple.

        Raises:
            CheckpointError: the value is anything else.
        """
        name, value = self._first((name,))
        if value is None:
            return None
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise self.wrong(name, value, "a list of strings")
        if not all(isinstance(member, str) for member in value):
            raise self.wrong(name, value, "a list of strings")
        return tuple(value)

    def divisors(self, name: str, count: int) -> tuple[float, ...]:
        """Return a list of numbers above zero as a tuple.

        Args:
            count: number of values that the list must have.

        Raises:
            CheckpointError: the value is anything else, or absent.
        """
        value, wanted = self.raw.get(name), f"a list of {count} numbers above zero"
        if not isinstance(value, list | tuple) or len(value) != count:
            raise self.wrong(name, value, wanted)
        numbers = [Fields({name: one}, self.source).positive(name) for one in value]
        if None in numbers:
            raise self.wrong(name, value, wanted)
        return tuple(number for number in numbers if number is not None)

    def indices(self, name: str) -> tuple[int, ...]:
        """Return a list of indices as a tuple; empty if the setting is absent or null.

        Raises:
            CheckpointError: the value is not a list of integers from 0 to `LARGEST_SIZE`.
        """
        value = self.raw.get(name)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or not all(
            type(one) is int and 0 <= one <= LARGEST_SIZE for one in value
        ):
            raise self.wrong(name, value, "a list of indices")
        return tuple(value)

    def section(self, name: str) -> "Fields":
        """Return the settings of a nested object; empty if it is absent or null.

        Raises:
            CheckpointError: the value is not an object.
        """
        value = self.raw.get(name)
        if value is None:
            return Fields({}, f"{self.source}: {name}")
        if not isinstance(value, Mapping):
            raise self.wrong(name, value, "an object")
        return Fields(value, f"{self.source}: {name}")

    def wrong(self, name: str, value: object, wanted: str) -> CheckpointError:
        """Return the error for a value that is not what the setting needs."""
        return CheckpointError(
            f"{self.source}: {quoted(name)} must be {wanted}, found {quoted(value)}; correct it or fetch the file again"
        )

    def _first(self, names: Sequence[str]) -> tuple[str, object]:
        known = [one for name in names for one in self.names_of(name)]
        name = next((one for one in known if self.raw.get(one) is not None), known[0])
        return name, self.raw.get(name)


def _is_finite(value: float) -> bool:
    """Return whether a number is finite as a float64; Python's integers may be too large for one."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
