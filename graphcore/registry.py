"""Finds implementations by name, without a hand-written table.

An extension (architecture, format, task) is one module with one constant. `collect` imports the modules of a
package and gathers the constants of a class; `lookup` finds one by name, or raises an error that lists the names.
"""

import difflib
import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import TypeVar

from graphcore.errors import ConfigError, GraphcoreError

T = TypeVar("T")


def collect(package: ModuleType, kind: type[T]) -> tuple[T, ...]:
    """Return every module-level instance of `kind` defined in the direct submodules of `package`, by module name.

    Raises:
        AssertionError: a submodule defines none, so its extension would be missing without an error.
    """
    found: dict[int, T] = {}
    for module_info in sorted(pkgutil.iter_modules(package.__path__), key=lambda info: info.name):
        module = importlib.import_module(f"{package.__name__}.{module_info.name}")
        here = [value for value in vars(module).values() if isinstance(value, kind)]
        assert here, f"{module.__name__} defines no {kind.__name__}"
        found.update((id(value), value) for value in here)
    return tuple(found.values())


def lookup(noun: str, name: str, table: Mapping[str, T], error: type[GraphcoreError] = ConfigError) -> T:
    """Return `table[name]`.

    Raises:
        error: the name is unknown; the message has the nearest name and all known ones.
    """
    if name in table:
        return table[name]
    raise error(f"unknown {noun} '{name}'{nearest(name, table)}; known: {', '.join(sorted(table))}")


def nearest(name: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """Return " (did you mean 'x'?)" for the closest of the known names, or an empty string.

    Args:
        likeness: smallest accepted similarity, the ratio of difflib.SequenceMatcher: 0 to 1 (equal names).
    """
    names = list(known)
    written = (name, name.lower())
    close = next((found for one in written if (found := difflib.get_close_matches(one, names, 1, likeness))), [])
    return f" (did you mean '{close[0]}'?)" if close else ""
