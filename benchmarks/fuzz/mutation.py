"""How files are damaged: bytes, JSON values, and the text of templates; the same random numbers do the same damage."""

import json
from collections.abc import Callable
from copy import deepcopy
from random import Random
from typing import Any

POWERS = (15, 16, 31, 32, 48, 53, 62, 63, 64)
NUMBERS = (0, 1, 2, 3, 7, 8, 127, 128, 255, 256, *(2**bits for bits in POWERS), *(2**bits - 1 for bits in POWERS))
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e-320, 1e308, -1e308, 10**9, 2**31, 2**63, 2**64, 10**30, 10**400),
    *("", "a", "\x00", "\ud800", "\u202e\x1b[31m", "x" * 5000, "0", "-1", "1e9", "auto", "llama"),
    *([], {}, [[]], [None], [0, 0], {"a": 1}, [1, 2, 3], ["a"], {"": None}, {"type": "BPE"}),
    *(float("nan"), float("inf"), -float("inf")),
)
_MARKS = (
    "{{ }} {% %} {# #} ( ) [ ] { } ' \" | . .. ~ * ** // % - + not and or if else in 1e400 0x 1_0 self loop __class__"
)
_CALLS = (
    "messages cycler joiner() namespace() caller() loop.index0 .mro() ..format() range(10**9) lipsum(n=10**7) 10**5000"
)
_FILTERS = (
    "|attr('x') |map('upper') |groupby('role') |batch(3) |sort |tojson |int |float |list |length |center(10**9) "
    "|indent(10**9) |urlize |wordwrap(0) |truncate(-1) |round(400) |random |xmlattr |format(1)"
)
_STATEMENTS = (
    "for i in range(99999)/endfor/if x/endif/set x = x/break/macro m()/endmacro/call m()/endcall/raw/filter upper/"
    "include 'a'/import 'os' as os/extends 'b'/generation/endgeneration"
)
WORDS = (
    *f"{_MARKS} {_CALLS} {_FILTERS}".split(),
    *(" ", "\n", "\x00", "\ud800", "\U0010ffff", "'a' * 10**11", "is defined", "is in messages"),
    *(f"{{% {statement} %}}" for statement in _STATEMENTS.split("/")),
)


def damage_bytes(content: bytes, random: Random, header: int | None = None) -> bytes:
    """Return the bytes with one to four faults in them.

    Args:
        header: bytes at the beginning that most faults are put into; None is all.
    """
    changed = bytearray(content)
    for _ in range(random.choice((1, 1, 1, 2, 3, 4))):
        within = len(changed) if header is None or random.random() < 0.1 else min(header, len(changed))
        at = random.randrange(within + 1)
        random.choice(BYTE_FAULTS)(changed, at, random)
    return bytes(changed)


def _flip(content: bytearray, at: int, random: Random) -> None:
    if at < len(content):
        content[at] ^= 1 << random.randrange(8)


def _replace(content: bytearray, at: int, random: Random) -> None:
    width = random.choice((1, 2, 4, 8))
    number = random.choice(NUMBERS) if random.random() < 0.8 else random.getrandbits(64)
    content[at : at + width] = (number % 256**width).to_bytes(width, "little")


def _cut(content: bytearray, at: int, _: Random) -> None:
    del content[at:]


def _delete(content: bytearray, at: int, random: Random) -> None:
    del content[at : at + random.choice((1, 2, 4, 8, 32, 100))]


def _insert(content: bytearray, at: int, random: Random) -> None:
    content[at:at] = random.choice((b"\0", b"\xff" * 8, random.randbytes(16), b"{" * 2000, b"\xc3\x28", b'"'))


def _repeat(content: bytearray, at: int, random: Random) -> None:
    content[at:at] = content[at : at + random.choice((1, 8, 64, 500))] * random.choice((1, 2, 50))


def _move(content: bytearray, at: int, random: Random) -> None:
    size = random.choice((4, 8, 30))
    piece = content[at : at + size]
    del content[at : at + size]
    to = random.randrange(len(content) + 1)
    content[to:to] = piece


BYTE_FAULTS: tuple[Callable[[bytearray, int, Random], None], ...] = (
    _flip, _flip, _replace, _replace, _replace, _cut, _delete, _insert, _repeat, _move,
)  # fmt: skip


def damage_json(content: bytes, random: Random) -> bytes:
    """Return the JSON text with other values, names or structure in it, or, one time in five, with faulty bytes."""
    if random.random() < 0.2:
        return damage_bytes(content, random)
    value: Any = json.loads(content)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        value = _damaged_value(value, random)
    text = json.dumps(value)
    if random.random() < 0.02:  # deeper than any parser follows
        depth = random.choice((900, 10**5))
        text = text.replace(random.choice(("null", "1", "0", '""')), "[" * depth + "]" * depth, 1)
    return text.encode()


def _damaged_value(value: Any, random: Random) -> Any:
    places = list(_places(value))
    if not places:
        return deepcopy(random.choice(VALUES))
    within, key = random.choice(places)
    kind = random.random()
    if kind < 0.6:
        within[key] = deepcopy(random.choice(VALUES))
    elif kind < 0.7:
        del within[key]
    elif kind < 0.8:
        other, source = random.choice(places)
        if (isinstance(other, list) and source < len(other)) or (isinstance(other, dict) and source in other):
            within[key] = deepcopy(other[source])
    elif isinstance(within, dict):
        within[random.choice((key.upper(), f"{key}2", "", key[:-1]))] = within.pop(key) if kind < 0.9 else within[key]
    else:
        within[key:key] = [deepcopy(random.choice(VALUES))] * random.choice((1, 1, 1000))
    return value


def _places(value: Any) -> Any:
    """Yield (container, key) of every value inside, so that it can be replaced."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(pairs):
        yield value, key
        yield from _places(inner)


def damage_text(content: str, random: Random) -> str:
    """Return the template with words of Jinja put in, cut, repeated or exchanged."""
    for _ in range(random.choice((1, 1, 2, 3, 5))):
        at, to = sorted(random.randrange(len(content) + 1) for _ in range(2))
        kind = random.random()
        if kind < 0.5:
            content = content[:at] + random.choice(WORDS) + content[at:]
        elif kind < 0.65:
            content = content[:at] + random.choice(WORDS) + content[to:]
        elif kind < 0.8:
            content = content[:at] + content[to:]
        elif kind < 0.95:
            content = content[:to] + content[at:to] * random.choice((1, 2, 30)) + content[to:]
        else:
            content = content[:at] + random.choice(WORDS) * random.choice((10, 3000)) + content[at:]
    return content
