"""Mutation testing: faults made by a program, one at a time, and the tests that notice them.

    python -m benchmarks.mutation --count 100 --seed 0 --output before.json graphcore/kvcache graphcore/planning
    python -m benchmarks.mutation --replay before.json --output after.json  # the same, later

cosmic-ray (the extra `mutation`) finds the places and changes them; a call that stands alone is left out, too, which is
no operator of cosmic-ray's. Each mutant lies in a copy of the checkout and runs, until one test fails, the unit tests
that import its module, and then the files of `--also`. The outcome is `killed` (a test failed, or one test took longer
than `--seconds`: that says the same on a busy machine, which no limit for all tests together does), or `survived`.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from cosmic_ray.ast import get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator, operator_names
from parso.python.tree import Newline

ROOT = Path(__file__).parents[1]
PACKAGES = tuple(
    f"graphcore/{name}" for name in ("kvcache", "planning", "engine/batching", "streaming", "engine/sampler.py")
)
WHOLE_RUN = 7200  # seconds after which a process of tests is ended that hangs outside of any test
MATRIX = ("tests/integration/test_engine_matrix.py",)
COPIED = ("graphcore", "conf", "tests", "benchmarks", "docs", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "run.py",
          "pyproject.toml", "hatch_build.py")  # fmt: skip
# Operators whose mutants say little: `|` joins types far more often than numbers, `is` compares with None.
LEFT_OUT = re.compile("BitOr|BitXor|BitAnd|ExceptionReplacer|Variable|Shift|Pow|Decorator|_IsNot|_Is_(?!IsNot)")


class CallRemover(Operator):  # type: ignore[misc]  # cosmic-ray is not typed
    """Leave a call that stands alone out: `pages.release(row)` becomes `pass`."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        if node.type == "simple_stmt" and node.children[0].type in ("atom_expr", "power"):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        first = node.get_first_leaf()
        first.value, kept = "pass", first
        kept.parent = node
        node.children = [kept, Newline("\n", node.children[-1].start_pos)]
        return node

    @classmethod
    def examples(cls) -> Sequence[Any]:
        return ()


@dataclass(frozen=True)
class Mutant:
    """One changed place.

    Attributes:
        path: file, relative to the checkout.
        line: number of the first changed line.
        operator: what changed it.
        old, new: text of the changed lines, before and after.
    """

    path: str
    line: int
    operator: str
    old: str
    new: str


@dataclass
class Outcome:
    """What tests made of a mutant.

    Attributes:
        verdict: `killed`, `survived` or `not found` (in a replay, where the code has changed).
        killer: first failing test; empty if none failed.
        seconds: wall time of its tests.
    """

    mutant: Mutant
    verdict: str
    killer: str = ""
    seconds: float = 0.0


@dataclass
class Checkouts:
    """Copies of the checkout, one for each mutant that is tested at the same time."""

    root: Path
    free: SimpleQueue[Path] = field(default_factory=SimpleQueue)

    def add(self, index: int) -> None:
        place = self.root / str(index)
        ignored = shutil.ignore_patterns("__pycache__", ".mypy_cache", "*.pyc")
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, place / name, ignore=ignored)
            elif source.exists():
                shutil.copy2(source, place / name)
        self.free.put(place)


@cache
def operators() -> dict[str, Operator]:
    """Return each operator by its name."""
    named = {name.partition("/")[2]: name for name in operator_names() if not LEFT_OUT.search(name)}
    return {"RemoveCall": CallRemover(), **{short: get_operator(name)() for short, name in named.items()}}


def changed_lines(before: str, after: str) -> tuple[int, str, str]:
    """Return the number of the first line that differs, and the differing lines of both texts."""
    old, new = before.splitlines(), after.splitlines()
    first = next(at for at, (one, other) in enumerate(zip(old, new, strict=False)) if one != other)
    last = 0
    while last < min(len(old), len(new)) - first - 1 and old[-1 - last] == new[-1 - last]:
        last += 1
    return first + 1, "\n".join(old[first : len(old) - last]), "\n".join(new[first : len(new) - last])


def places_of(path: Path) -> Iterator[tuple[str, int, Path, int]]:
    """Yield each place that an operator can change: operator, line, file and the place's number for `mutate_code`."""
    tree = get_ast(path.read_text(encoding="utf-8"))
    for name, operator in operators().items():
        occurrences = count()
        for node in walk(tree):
            for start, _ in operator.mutation_positions(node):
                yield name, start[0], path, next(occurrences)


def walk(node: Any) -> Iterator[Any]:
    """Yield a node and all below it, in cosmic-ray's order, parents before children."""
    yield node
    for child in getattr(node, "children", ()):
        yield from walk(child)


def mutant_at(operator: str, path: Path, occurrence: int) -> Mutant | None:
    """Return the mutant of a place; None if it is not Python, or says what the code says."""
    code = path.read_text(encoding="utf-8")
    mutated = mutate_code(code, operators()[operator], occurrence)
    assert mutated is not None, f"{path}: {operator} has no place {occurrence}"
    try:
        if ast.dump(ast.parse(mutated)) == ast.dump(ast.parse(code)):
            return None
    except SyntaxError:
        return None
    line, old, new = changed_lines(code, mutated)
    # `strict=` compares lengths that are equal unless something else is wrong.
    return None if "strict=False" in new else Mutant(path.relative_to(ROOT).as_posix(), line, operator, old, new)


def sample(paths: Sequence[Path], number: int, seed: int) -> list[Mutant]:
    """Return mutants chosen at random, at most one of a line; each line that can be changed is as likely as others."""
    by_line: dict[tuple[Path, int], list[tuple[str, int]]] = defaultdict(list)
    for path in paths:
        for operator, line, _, occurrence in places_of(path):
            by_line[path, line].append((operator, occurrence))
    chance, chosen = random.Random(seed), list[Mutant]()
    for path, line in chance.sample(lines := sorted(by_line), len(lines)):
        operator, occurrence = chance.choice(by_line[path, line])
        if len(chosen) < number and (mutant := mutant_at(operator, path, occurrence)):
            chosen.append(mutant)
    return chosen


@cache
def tests_importing(module: str) -> tuple[str, ...]:
    """Return the unit test files that import a module, the smallest first."""
    found = []
    package, _, name = module.rpartition(".")
    pattern = re.compile(rf"^\s*(from {re.escape(module)} import|import {re.escape(module)}\b|"
                         rf"from {re.escape(package)} import .*\b{re.escape(name)}\b)", re.MULTILINE)  # fmt: skip
    for path in (ROOT / "tests" / "unit").rglob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        if pattern.search(text):
            found.append((len(text), path.relative_to(ROOT).as_posix()))
    return tuple(path for _, path in sorted(found))


def run_tests(checkout: Path, files: Sequence[str], seconds: float) -> tuple[bool, str]:
    """Return whether tests failed, and the first that did.

    Args:
        seconds: limit for one test, which pytest then ends with the stack of each thread.
    """
    limits = ["-o", f"faulthandler_timeout={seconds}", "-o", "faulthandler_exit_on_timeout=true"]
    command = [sys.executable, "-m", "pytest", "-x", "-vv", "-p", "no:cacheprovider", "-p", "no:xdist", *limits, *files]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1", "CI": "true"}
    try:
        done = subprocess.run(
            command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=WHOLE_RUN, check=False
        )
    except subprocess.TimeoutExpired:
        return True, f"more than {WHOLE_RUN} s in all"
    if "Timeout (" in done.stderr:
        last = re.findall(r"^(tests/\S+::.+?) *$", done.stdout, re.MULTILINE)
        return True, f"more than {seconds:.0f} s in {last[-1] if last else 'no test'}"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return done.returncode not in (0, 5), failed[1] if failed else f"pytest's status {done.returncode}"


def judge(mutant: Mutant, checkout: Path, also: Sequence[str], seconds: float) -> Outcome:
    """Run the tests of a mutant in a copy of the checkout, which is as before afterwards."""
    file = checkout / mutant.path
    code = file.read_text(encoding="utf-8") if file.exists() else ""
    places = [found.start() for found in re.finditer(rf"(?m)^{re.escape(mutant.old)}$", code)]
    if not places:
        return Outcome(mutant, "not found")
    place = min(places, key=lambda at: abs(code.count("\n", 0, at) + 1 - mutant.line))
    file.write_text(code[:place] + mutant.new + code[place + len(mutant.old) :], encoding="utf-8")
    begin = time.monotonic()
    try:
        own = tests_importing(mutant.path.removesuffix(".py").replace("/", "."))
        for files in (own, [name for name in also if (ROOT / name).exists()]):
            failed, killer = run_tests(checkout, files, seconds) if files else (False, "")
            if failed:
                return Outcome(mutant, "killed", killer, time.monotonic() - begin)
        return Outcome(mutant, "survived", "", time.monotonic() - begin)
    finally:
        file.write_text(code, encoding="utf-8")


def main() -> None:
    """Make mutants, or read those of an earlier run, test them and write what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=PACKAGES, help="files and folders of graphcore/")
    parser.add_argument("--count", type=int, default=100, help="mutants to make")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replay", type=Path, help="a file of --output: test its mutants again")
    parser.add_argument("--verdict", help="with --replay: only mutants with this verdict")
    parser.add_argument(
        "--also", nargs="*", default=MATRIX, help="test files that run after those importing the module"
    )
    parser.add_argument("--seconds", type=float, default=300, help="limit for one test of a mutant")
    parser.add_argument("--jobs", type=int, default=2, help="mutants tested at the same time")
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    if given.replay:
        earlier = json.loads(given.replay.read_text(encoding="utf-8"))
        mutants = [Mutant(**one["mutant"]) for one in earlier if given.verdict in (None, one["verdict"])]
    else:
        places = [ROOT / path for path in given.paths]
        files = sorted(file for place in places for file in ([place] if place.is_file() else place.rglob("*.py")))
        mutants = sample(files, given.count, given.seed)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.jobs) as pool:
        checkouts = Checkouts(Path(folder))
        for index in range(given.jobs):
            checkouts.add(index)

        def one(mutant: Mutant) -> Outcome:
            checkout = checkouts.free.get()
            try:
                outcome = judge(mutant, checkout, given.also, given.seconds)
            finally:
                checkouts.free.put(checkout)
            place = f"{mutant.path}:{mutant.line} {mutant.operator}"
            print(f"{outcome.verdict:9} {outcome.seconds:5.0f} s  {place}  {outcome.killer}", flush=True)
            return outcome

        outcomes = []
        for outcome in pool.map(one, mutants):
            outcomes.append(outcome)
            given.output.write_text(json.dumps([asdict(done) for done in outcomes], indent=1), encoding="utf-8")
    killed = sum(outcome.verdict == "killed" for outcome in outcomes)
    print(f"{killed} of {len(outcomes)} killed")


if __name__ == "__main__":
    main()
