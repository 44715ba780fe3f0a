"""What two files of answers have not in common."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

ABSENT = "(none)"
LONGEST = 300  # characters of a value that are shown


class Difference(NamedTuple):
    """A field of a case that two files have different values of."""

    case: str
    field: str
    before: str
    after: str

    def __str__(self) -> str:
        """Return three lines."""
        return f"{self.case}: {self.field}\n  before {_short(self.before)}\n  after  {_short(self.after)}"


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Difference]:
    """Return the differences of two files of answers, in order of the cases' names."""
    found = []
    for case in sorted(before.keys() | after.keys()):
        if case not in after or case not in before:
            has = ("is missing", "there") if case in after else ("there", "is missing")
            found.append(Difference(case, "the case", *has))
        else:
            found += [Difference(case, *each) for each in _fields("", before[case], after[case])]
    return found


def _fields(field: str, before: Any, after: Any) -> Iterator[tuple[str, str, str]]:
    """Yield the innermost fields that differ, texts line by line."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            yield from _fields(f"{field}.{key}" if field else key, before.get(key, ABSENT), after.get(key, ABSENT))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for at, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from _fields(f"{field}[{at}]", one, other)
    elif before != after or type(before) is not type(after):
        yield (field, *_first_difference(before, after))


def _first_difference(before: Any, after: Any) -> tuple[str, str]:
    if not isinstance(before, Sequence) or not isinstance(after, Sequence):
        return repr(before), repr(after)
    at = next((at for at, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), 0)
    start = max(0, at - 60) if len(repr(before)) + len(repr(after)) > LONGEST else 0
    mark = f"[{start}:] " if start else ""
    return mark + repr(before[start:]), mark + repr(after[start:])


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
