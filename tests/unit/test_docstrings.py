"""Docstrings read alone: a line that explains a name begins with a noun."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "graphcore"
CONTRIBUTING = PACKAGE.parent / "CONTRIBUTING.md"
SECTION = re.compile(r"^\s*(Args|Attributes):$")
ENTRY = re.compile(r"^(?P<names>\*{0,2}\w+(, \*{0,2}\w+)*): (?P<text>.+)$")
EXAMPLE = re.compile(r"^ *\| `(?P<file>[\w/]+\.\w+)` \| (?P<before>.+) \| (?P<after>.+) \|$", re.MULTILINE)
REMNANT = re.compile(r"^(of|that|which)\b", re.IGNORECASE)


def docstrings(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""


def entries(docstring: str) -> Iterator[tuple[str, str]]:
    """Yield names and text of each line of the sections, without the lines that continue one."""
    section = first = -1
    for line in docstring.splitlines():
        indent = len(line) - len(line.lstrip())
        if SECTION.match(line):
            section, first = indent, -1
        elif line and indent <= section:
            section = -1
        elif line and section >= 0:
            first = indent if first < 0 else first
            if indent == first and (entry := ENTRY.match(line.strip())):
                yield entry["names"], entry["text"]


def remnants(source: str) -> list[str]:
    found = [entry for docstring in docstrings(source) for entry in entries(docstring)]
    return [f"{names}: {text}" for names, text in found if REMNANT.match(text)]


def test_an_argument_or_attribute_is_explained_by_a_noun() -> None:
    found = [
        f"{path.relative_to(PACKAGE.parent).as_posix()}: {line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line in remnants(path.read_text(encoding="utf-8"))
    ]
    assert not found, "begin with a noun (`seconds of the run`, not `of the run`):\n" + "\n".join(found)


def test_a_line_without_its_noun_is_found() -> None:
    source = '''
def copy(rows, at, to):
    """Copy rows.

    Args:
        rows: of the matrix, which may
            of: continue here.
        at, to: offsets in bytes.

    Attributes:
        source, *target: that is read.

    Returns:
        sum: of all rows.
    """
'''
    assert remnants(source) == ["rows: of the matrix, which may", "source, *target: that is read."]


def on_one_line(text: str) -> str:
    return " ".join(text.split())


def test_each_example_for_contributors_is_still_in_its_file() -> None:
    examples = list(EXAMPLE.finditer(CONTRIBUTING.read_text(encoding="utf-8")))
    assert len(examples) > 15
    missing = [
        f"{one['file']}: {line}"
        for one in examples
        if (line := one["after"].strip("` ")) not in on_one_line((PACKAGE / one["file"]).read_text(encoding="utf-8"))
    ]
    assert not missing, "write these lines of CONTRIBUTING.md anew, or choose others:\n" + "\n".join(missing)
