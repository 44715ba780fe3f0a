"""Converts between sizes as people write them ("14GiB", "600MB", "1.5 GB", 1000000) and bytes."""

import math
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
SHOWN = ("bytes", "KiB", "MiB", "GiB", "TiB")
WRITTEN = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)", re.IGNORECASE)
LEAST_BARE = 1024  # bytes; a smaller number without a unit is taken for a mistake


def parse_nbytes(key: str, value: Any) -> int | None:
    """Return the bytes that a setting asks for, or None for "auto".

    Decimal units (kB, MB, GB, TB) are powers of 1000, binary ones (KiB, MiB, GiB, TiB) of 1024; case is ignored. A
    fraction of a byte is dropped. A whole number without a unit means bytes; 0 stays 0.

    Args:
        key: the setting's name, for messages.
        value: the parsed yaml value: a number or a text.

    Raises:
        ConfigError: the value is neither "auto" nor a size.
    """
    forms = "is no size; write auto, whole bytes, or a number with a unit: 14GiB, 600MB"
    return None if value == AUTO else number_of_bytes(key, value, forms)


def number_of_bytes(key: str, value: Any, otherwise: str) -> int:
    """Parse a size such as 900MB into bytes; it has the forms of `parse_nbytes` without "auto".

    Args:
        key, value: as for `parse_nbytes`.
        otherwise: what the message says after key=value if the value has none of these forms.

    Raises:
        ConfigError: the value is no size.
    """
    match = WRITTEN.fullmatch(_as_text(value).strip())
    if match is None or (not match[2] and Fraction(match[1]).denominator > 1):
        raise ConfigError(f"{key}={value} {otherwise}", is_unknown=True)
    if not match[2]:
        return _bare_nbytes(key, int(Fraction(match[1])))
    unit = UNITS.get(match[2].lower())
    if unit is None:
        raise ConfigError(
            f"{key}={value} has the unknown unit '{match[2]}'; known: B, kB, MB, GB, TB, KiB, MiB, GiB, TiB",
            is_unknown=True,
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


def in_words(nbytes: float) -> str:
    """Return a size in the largest binary unit that it reaches: "512 bytes", "1.50 GiB"."""
    return part_in_words(None, nbytes)


def enough_in_words(nbytes: int) -> str:
    """Return a size rounded up in its unit, so that it is enough where it is set: "118.31 GiB"."""
    power = next((power for power in range(len(SHOWN) - 1, 0, -1) if nbytes >= 1024**power), 0)
    hundredths = math.ceil(Fraction(100 * nbytes, 1024**power))
    return f"{hundredths / 100:.{2 if power else 0}f} {SHOWN[power]}"


def both_in_words(needed: float, free: float) -> tuple[str, str]:
    """Return two different sizes in words, in exact bytes where their words would be the same."""
    words = in_words(needed), in_words(free)
    return words if words[0] != words[1] else (f"{needed:.0f} bytes", f"{free:.0f} bytes")


def part_in_words(done: float | None, nbytes: float) -> str:
    """Return how much of a size is done, both in the whole's unit: "3.10/93.52 MiB"; None gives the whole alone."""
    power = next((power for power in range(len(SHOWN) - 1, 0, -1) if abs(nbytes) >= 1024**power), 0)
    whole = nbytes / 1024**power
    digits = 0 if power == 0 else 2 if whole < 100 else 1
    part = "" if done is None else f"{done / 1024**power:.{digits}f}/"
    return f"{part}{whole:.{digits}f} {SHOWN[power]}"


def rate_in_words(rate: float) -> str:
    """Return bytes per second in the units of sizes: "35.20 MiB/s", "1.31 GiB/s"."""
    return f"{in_words(rate)}/s"
