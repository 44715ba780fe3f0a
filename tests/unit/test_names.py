"""Names: one name is one thing, and no two files are told apart by an ending alone."""

import ast
import re
from collections import defaultdict
from functools import cache
from itertools import combinations
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "graphcore"
# What every task has; a task is its module, and they are read as bench.run and verify.show.
ROLES = {"run": "graphcore/tasks/commands", "show": "graphcore/tasks/commands"}
# Folders whose modules a registry finds: one thing each, however small.
ENTRIES = {"families", "formats", "commands"}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")


def named(path: Path) -> str:
    return path.relative_to(PACKAGE.parent).as_posix()


def test_a_public_class_or_function_is_defined_once() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in modules():
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        names = {node.name for node in parsed(path).body if isinstance(node, kinds)}
        for name in names:
            if not name.startswith("_") and named(path.parent) != ROLES.get(name):
                found[name].append(named(path))
    doubled = {name: places for name, places in sorted(found.items()) if len(places) > 1}
    assert not doubled


def test_a_file_name_is_told_apart_by_its_folder() -> None:
    """Two folders beside each other may each have a `stream.py`; a folder and one inside it may not."""
    alike = [
        (named(one), named(other))
        for one, other in combinations(modules(), 2)
        if one.name == other.name != "registry.py" and ENTRIES.isdisjoint((one.parent.name, other.parent.name))
        if one.is_relative_to(other.parent) or other.is_relative_to(one.parent) or one.parent.name == other.parent.name
    ]
    assert not alike


def test_no_two_modules_of_a_package_are_forms_of_one_word() -> None:
    """Of `choose` and `choosing`, or `residents` and `residency`, nobody knows which is which without opening them."""
    alike = []
    for one, other in combinations(modules(), 2):
        if one.parent == other.parent and one.parent.name not in ENTRIES and stem(one) == stem(other):
            alike.append((named(one), named(other)))
    assert not alike


def stem(path: Path) -> tuple[str, ...]:
    """Return a file's words without their endings."""
    return tuple(re.sub(r"(ings?|ed|e?s|ency|ents?|ers?|ors?|ions?|ice|e)$", "", word) for word in path.stem.split("_"))
