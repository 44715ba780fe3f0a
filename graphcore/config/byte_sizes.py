"""Sizes as people write them ("14GiB", "600MB", "1.5 GB", 1000000) as bytes."""

import re
from fractions import Fraction
from typing import Any

from graphcore.errors import ConfigError

AUTO = "auto"
UNITS = {
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)},
}
WRITTEN = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)", re.IGNORECASE)
LEAST_BARE = 1024  # bytes; a smaller number without a unit is a forgotten one


def parse_nbytes(key: str, value: Any) -> int | None:
    """Return the bytes that a setting asks for, or None for "auto".

    Decimal units (kB, MB, GB, TB) are powers of 1000, binary ones (KiB, MiB, GiB, TiB) of 1024; case does not count.
    A fraction of a byte is dropped. A whole number without a unit is bytes; 0 stays 0.

    Args:
        key: the setting's name, for messages.
        value: what yaml made of it: a number or a text.

    Raises:
        ConfigError: it is neither "auto" nor a size.
    """
    if value == AUTO:
        return None
    match = WRITTEN.fullmatch(_as_text(value).strip())
    if match is None or (not match[2] and Fraction(match[1]).denominator > 1):
        raise ConfigError(f"{key}={value} is no size; write auto, whole bytes, or a number with a unit: 14GiB, 600MB")
    if not match[2]:
        return _bare_nbytes(key, int(Fraction(match[1])))
    unit = UNITS.get(match[2].lower())
    if unit is None:
        raise ConfigError(
            f"{key}={value} has the unknown unit '{match[2]}'; known: B, kB, MB, GB, TB, KiB, MiB, GiB, TiB"
        )
    return int(Fraction(match[1]) * unit)


def _bare_nbytes(key: str, nbytes: int) -> int:
    if 0 < nbytes < LEAST_BARE:
        raise ConfigError(f"{key}={nbytes} would be {nbytes} bytes; write the unit, such as {key}={nbytes}GiB")
    return nbytes


def _as_text(value: Any) -> str:
    """Return a number as digits; yaml reads 1e9 as a float."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)
