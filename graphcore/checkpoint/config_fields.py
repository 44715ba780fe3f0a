"""Typed reads of untyped settings: what is there is checked once, here, and named when it is wrong.

JSON null counts as absent, so a field that cannot be null falls back to its default; `has` and `is_null` tell the two
apart where it matters. JSON booleans are never numbers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graphcore.checkpoint.quoted import quoted
from graphcore.errors import CheckpointError

LARGEST_SIZE = 2**31 - 1  # no dimension, vocabulary or context of a real model comes near


@dataclass(frozen=True)
class Fields:
    """Named settings out of one place.

    Every reader takes names in order of preference and returns the value of the first that is not null, else None.

    Attributes:
        raw: the settings; never changed.
        source: the file and part they come from, for messages.
    """

    raw: Mapping[str, object]
    source: str

    def has(self, name: str) -> bool:
        """Return whether the name is there at all, null included."""
        return name in self.raw

    def is_null(self, name: str) -> bool:
        """Return whether the name is there and null."""
        return name in self.raw and self.raw[name] is None

    def size(self, *names: str) -> int | None:
        """Return a count of at least one and at most `LARGEST_SIZE`.

        Raises:
            CheckpointError: it is anything else.
        """
        name, value = self._first(names)
        if value is None:
            return None
        if type(value) is not int or value < 1:
            raise self.wrong(name, value, "a positive integer")
        if value > LARGEST_SIZE:
            raise self.wrong(name, value, f"at most {LARGEST_SIZE}")
        return value

    def number(self, *names: str) -> float | None:
        """Return a finite number.

        Raises:
            CheckpointError: it is a string, a boolean, infinite or not a number.
        """
        name, value = self._first(names)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
            raise self.wrong(name, value, "a finite number")
        return float(value)

    def positive(self, *names: str) -> float | None:
        """Return a finite number above zero.

        Raises:
            CheckpointError: it is anything else.
        """
        value = self.number(*names)
        if value is not None and value <= 0:
            raise self.wrong(*self._first(names), "above zero")
        return value

    def flag(self, *names: str) -> bool | None:
        """Return a boolean.

        Raises:
            CheckpointError: it is anything else, 0 and 1 included.
        """
        name, value = self._first(names)
        if value is None or isinstance(value, bool):
            return value
        raise self.wrong(name, value, "true or false")

    def text(self, *names: str) -> str | None:
        """Return a string.

        Raises:
            CheckpointError: it is anything else.
        """
        name, value = self._first(names)
        if value is None or isinstance(value, str):
            return value
        raise self.wrong(name, value, "a string")

    def texts(self, name: str) -> tuple[str, ...] | None:
        """Return a list of strings.

        Raises:
            CheckpointError: it is anything else.
        """
        value = self.raw.get(name)
        if value is None:
            return None
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise self.wrong(name, value, "a list of strings")
        if not all(isinstance(member, str) for member in value):
            raise self.wrong(name, value, "a list of strings")
        return tuple(value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Return one token id or a list of them as a tuple; absent or null is the empty one.

        Raises:
            CheckpointError: something is not an integer from zero up.
        """
        value = self.raw.get(name)
        if value is None:
            return ()
        members: Sequence[object] = value if isinstance(value, list | tuple) else (value,)
        ids = tuple(member for member in members if type(member) is int and 0 <= member <= LARGEST_SIZE)
        if len(ids) < len(members):
            raise self.wrong(name, value, "a token id or a list of token ids")
        return ids

    def section(self, name: str) -> "Fields":
        """Return the settings of a nested object; absent or null is an empty one.

        Raises:
            CheckpointError: it is not an object.
        """
        value = self.raw.get(name)
        if value is None:
            return Fields({}, f"{self.source}: {name}")
        if not isinstance(value, Mapping):
            raise self.wrong(name, value, "an object")
        return Fields(value, f"{self.source}: {name}")

    def wrong(self, name: str, value: object, wanted: str) -> CheckpointError:
        """Return the error for a value that is not what it must be."""
        return CheckpointError(
            f"{self.source}: {quoted(name)} must be {wanted}, found {quoted(value)}; correct it or fetch the file again"
        )

    def _first(self, names: Sequence[str]) -> tuple[str, object]:
        found = (name for name in names if self.raw.get(name) is not None)
        name = next(found, names[0])
        return name, self.raw.get(name)


def _is_finite(value: float) -> bool:
    """Return whether `value` is a number that float64 holds (Python's integers may be larger)."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
