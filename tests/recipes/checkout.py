"""What a recipe's test works in: a copy of a contributor's checkout, with new files and edits that the recipe names."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.processes import run_program

ROOT = Path(__file__).parents[2]
COPIED = ("graphcore", "conf", "benchmarks", "run.py")
BUILT = Path(
    "graphcore/kernels/cpu/built"
)  # libraries that pip built; a checkout without them builds one at its first use
SECONDS = 120
# A recipe of CONTRIBUTING.md is a paragraph that begins with **what is added**; the files to add are its paths with a
# name to fill in: `graphcore/tasks/commands/<task>.py`.
RECIPE = r"\*\*{title}\.\*\*(.*?)(?:\n\n|\Z)"
PATH_TO_ADD = re.compile(r"`([\w./<>-]*<\w+>[\w./<>-]*)`")


Edits = dict[str, tuple[tuple[str, str], ...]]  # by file: what is there, and what is put before it


@dataclass(frozen=True)
class Finished:
    """A process that has ended.

    Attributes:
        status: exit status.
        out: what it printed.
        error: what it said beside that.
        result: its result.json; None where it left none.
    """

    status: int
    out: str
    error: str
    result: dict[str, Any] | None = None


@dataclass
class Checkout:
    """A copy of this checkout, which tests extend as CONTRIBUTING.md tells a contributor to.

    Attributes:
        root: its folder, the only one that `graphcore` is imported from.
        cache: a cache folder of its own, for what the shared one must not see: `cache_dir={checkout.cache}`.
        added: paths of the files that were added, relative to `root`.
    """

    root: Path
    cache: Path
    added: list[str] = field(default_factory=list)
    num_runs: int = 0

    def add(self, path: str, content: str | bytes | Path) -> Path:
        """Write a file that is not there yet, and return where it lies.

        Args:
            path: relative to the checkout, with "/".
            content: text or bytes, or the file beside the recipe's test that is copied.
        """
        place = self.root / path
        assert not place.exists(), f"a recipe adds files and edits none, and {path} is there already"
        place.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            content = content.read_bytes()
        place.write_bytes(content if isinstance(content, bytes) else content.encode())
        self.added.append(path)
        return place

    def edit(self, title: str, edits: Edits) -> None:
        """Edit files that a recipe names, and no others."""
        recipe = recipe_text(title)
        for path, places in edits.items():
            is_named = f"`{path}`" in recipe or f"`{Path(path).parent}/`" in recipe
            assert is_named, f"the recipe does not name {path}"
            self._insert(path, places)

    def _insert(self, path: str, places: Sequence[tuple[str, str]]) -> None:
        """Put a text before another one, which the file has once."""
        file = self.root / path
        content = file.read_text(encoding="utf-8")
        for place, added in places:
            assert content.count(place) == 1, f"{path} has {place!r} {content.count(place)} times"
            content = content.replace(place, added + place)
        file.write_text(content, encoding="utf-8")

    def assert_linter_passes(self) -> None:
        """Run the linter on the files that were added."""
        shutil.copy2(ROOT / "pyproject.toml", self.root)
        sources = [path for path in self.added if path.endswith(".py")]
        linted = subprocess.run(
            [sys.executable, "-m", "ruff", "check", "--no-cache", *sources],
            cwd=self.root,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert linted.returncode == 0, linted.stdout

    def run(self, *arguments: str, cwd: Path | None = None, seconds: float = SECONDS) -> Finished:
        """Run `python run.py` with these arguments, in a run folder that is made up unless they start with --."""
        self.num_runs += 1
        folder = self.root.parent / f"run_{self.num_runs}"
        own = [] if any(one.startswith("-") for one in arguments) else [f"hydra.run.dir={folder}"]
        done = self.script("run.py", *arguments, *own, cwd=cwd, seconds=seconds)
        result = folder / "result.json"
        read = json.loads(result.read_text(encoding="utf-8")) if result.exists() else None
        return Finished(done.status, done.out, done.error, read)

    def script(self, path: str, *arguments: str, cwd: Path | None = None, seconds: float = SECONDS) -> Finished:
        """Run a Python file of the checkout."""
        return self._start(arguments, cwd, seconds, script=str(self.root / path))

    def python(self, code: str, cwd: Path | None = None, seconds: float = SECONDS) -> str:
        """Run Python code that imports graphcore from this checkout, and return what it printed."""
        done = self._start((), cwd, seconds, code=code)
        assert done.status == 0, done.error
        return done.out

    def _start(
        self, arguments: Sequence[str], cwd: Path | None, seconds: float, script: str = "", code: str | None = None
    ) -> Finished:
        variables = {**os.environ, "PYTHONPATH": str(self.root)}
        program = {"script": script, "code": code, "variables": variables, "imported": "torch"}
        done = run_program(arguments, cwd or self.root, seconds=seconds, **program)
        return Finished(done.returncode, done.stdout, done.stderr)

    def assert_follows(self, title: str, after: str | None = None) -> None:
        """Return if the files that were added are those that the recipe names; tests may be left out.

        Args:
            after: title of a recipe that this one follows, whose files were added, too.
        """
        named = recipe_paths(title) | (recipe_paths(after) if after else {})
        unnamed = [path for path in self.added if not any(pattern.fullmatch(path) for pattern in named.values())]
        assert not unnamed, f"CONTRIBUTING.md's recipe for {title!r} names {list(named)}, and not {unnamed}"
        missing = [
            path
            for path, pattern in named.items()
            if not path.startswith("tests/") and not any(pattern.fullmatch(one) for one in self.added)
        ]
        assert not missing, f"CONTRIBUTING.md's recipe for {title!r} names {missing}, which the recipe did not need"


def recipe_text(title: str) -> str:
    """Return the text of a recipe of CONTRIBUTING.md, given its title: "A task"."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    found = re.search(RECIPE.format(title=re.escape(title)), text, re.DOTALL)
    assert found is not None, f"CONTRIBUTING.md has no recipe that begins with **{title}.**"
    return found[1]


def recipe_paths(title: str) -> dict[str, re.Pattern[str]]:
    """Return the paths that a recipe names, and what files of theirs are called.

    Args:
        title: of the recipe: "A task".
    """
    paths = PATH_TO_ADD.findall(recipe_text(title))
    assert paths, f"CONTRIBUTING.md's recipe for {title!r} names no file to add, such as `folder/<name>.py`"
    return {path: re.compile(r"[^/]+".join(map(re.escape, re.split(r"<\w+>", path)))) for path in paths}


def copy_checkout(folder: Path) -> Checkout:
    """Return a copy of this checkout in a folder, with the kernels and the bytecode that this one has made."""
    root = folder / "checkout"
    root.mkdir()
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns(BUILT.name))
        else:
            shutil.copy2(ROOT / name, root / name)
    if (ROOT / BUILT).is_dir():
        (root / BUILT).symlink_to(ROOT / BUILT)
    made = Checkout(root, folder / "cache")
    imported = made.python("from importlib.util import find_spec; print(find_spec('graphcore').origin)")
    assert Path(imported.strip()) == root / "graphcore" / "__init__.py", "another graphcore is imported"
    return made
