"""Modules that documents, comments and docstrings name are there under that name."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOPS = ("graphcore", "benchmarks", "tests")
# What a reader would open: a path from the top or from graphcore/ on, or a file in marks, `layout.py` or (layout.py).
PACKAGES = "|".join([*TOPS, *(path.name for path in sorted((ROOT / "graphcore").iterdir()) if path.is_dir())])
NAMED = re.compile(rf"(?<![\w/.])((?:{PACKAGES})/(?:\w+/)*\w+\.py)\b|[`(](\w+\.py)[`)]")


def test_a_module_that_a_text_names_is_there() -> None:
    """Tests name modules that they make up, and the record of changes those that were."""
    modules = [path for top in TOPS for path in (ROOT / top).rglob("*.py")]
    modules += ROOT.glob("*.py")
    sources = [path for path in modules if path.relative_to(ROOT).parts[0] != "tests"]
    texts = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md"), *sources]
    missing = [
        f"{text.relative_to(ROOT)}: {path or name}"
        for text in texts
        if text.name != "CHANGELOG.md"
        for path, name in NAMED.findall(text.read_text(encoding="utf-8"))
        if not any(module.match(path or name) for module in modules)
    ]
    assert not missing


def drawn_files() -> dict[str, list[str]]:
    """Return the files of each folder as docs/architecture.md draws them, the folder's path as the key."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    picture = text.partition("## Floors")[2].split("```")[1].strip("\n")
    found: dict[str, list[str]] = {}
    path: list[str] = []
    for line in picture.splitlines():
        if folder := re.match(r"( *)(\w+)/ ", line):
            path = [*path[: len(folder[1]) // 2], folder[2]]
        elif line.startswith("(beside them)"):
            path = []
        else:
            found.setdefault("/".join(path), []).extend(line.split())
    return found


def test_the_drawing_of_the_floors_is_the_folder_tree() -> None:
    package = ROOT / "graphcore"
    drawn = drawn_files()
    sources = [path for path in package.rglob("*") if path.suffix in (".py", ".h", ".cpp") and path.stem != "__init__"]
    there: dict[str, list[str]] = {}
    for path in sorted(sources):
        name = path.stem if path.suffix == ".py" else path.name
        there.setdefault(path.parent.relative_to(package).as_posix().removeprefix("."), []).append(name)
    assert {folder: sorted(names) for folder, names in drawn.items()} == there


def test_a_class_on_the_two_first_pages_is_in_its_file() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    lives = text.partition("## A request's life")[2].partition("## Floors")[0]
    boxes = re.findall(r"^[ |-]{3,9}(?:or )?(?P<name>\w+)\S*  +\S.* (?P<path>[a-z_/]+\.py)$", lives, re.MULTILINE)
    missing = [
        (name, path)
        for name, path in boxes
        if not re.search(
            rf"^(class|def) {name}\b", (ROOT / "graphcore" / path).read_text(encoding="utf-8"), re.MULTILINE
        )
    ]
    assert len(boxes) > 20
    assert not missing


@pytest.mark.skipif(not (ROOT / ".git").exists() or not shutil.which("git"), reason="needs a clone and git")
def test_a_clone_has_the_folder_of_outputs_and_git_ignores_what_runs_leave_there() -> None:
    def is_ignored(path: str) -> bool:
        return subprocess.run(["git", "check-ignore", "-q", path], cwd=ROOT, check=False).returncode == 0

    assert len((ROOT / "outputs" / "README.md").read_text(encoding="utf-8").splitlines()) == 2
    assert not is_ignored("outputs/README.md")
    assert is_ignored("outputs/2026-11-25/10-00-00/result.json")
    assert is_ignored("outputs/sweeps/2026-11-25/10-00-00/summary.md")
