"""Checks that a change of the code changes no output, no message and no exit status.

python -m benchmarks.same_answers before.json              on the old code: write every case's output
python -m benchmarks.same_answers before.json --compare    on the new code: print what differs, exit status 1
... --parts models,commands    some parts                  ... --cases gemma3/eager    cases whose names contain a text

The small models of tests/ are run on the CPU, in two processes. Times, sizes of memory and temporary names are left
out of what is compared. A part that is left out of the second call is not compared.
"""

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]

from answers.cases import Case, Record, run_cases  # noqa: E402 - its folder is not on the path before
from answers.differences import differences  # noqa: E402

SHOWN = 3  # differences of a case
PARTS = ("models", "packed", "sequences", "fallback", "commands", "compiled")


def all_cases() -> Iterator[Case]:
    """Yield every case; imports the modules that define them, and with these torch."""
    from answers import commands, models, sequences

    yield from commands.cases()
    yield from sequences.cases()
    yield from models.cases()


def chosen(parts: Sequence[str], texts: Sequence[str]) -> list[Case]:
    """Return the cases of some parts whose names contain one of the texts, or all if there are no texts."""
    return [
        case for case in all_cases() if case.part in parts and (not texts or any(text in case.name for text in texts))
    ]


def prepare(folder: Path, parts: Sequence[str]) -> None:
    """Import what most cases need, once for all processes that are forked; give them a cache with built kernels."""
    os.environ["OMP_NUM_THREADS"] = "1"  # this process must have no other thread when it forks
    os.environ["HF_HUB_OFFLINE"] = os.environ["PIP_NO_INDEX"] = "1"
    import torch
    import transformers  # noqa: F401

    import graphcore.engine.engine  # noqa: F401

    torch.set_num_threads(1)
    if "commands" in parts:
        from answers.checkpoints import helper

        helper("support.processes").command_server("graphcore")  # all processes ask the same one
    gc.freeze()  # keeps imported objects out of the children's collections
    cache = folder / "cache"
    cache.mkdir()
    own = Path("~/.cache/graphcore").expanduser()
    for name in ("kernels", "compiled"):  # built code is the same for all, and takes minutes
        (own / name).mkdir(parents=True, exist_ok=True)
        (cache / name).symlink_to(own / name)


def answers_now(cases: Sequence[Case]) -> dict[str, Record]:
    """Run cases and print the seconds that each part took."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="answers-") as folder:
        prepare(Path(folder), [case.part for case in cases])
        answers, seconds = run_cases(cases, Path(folder))
    parts = ", ".join(f"{part} {took:.0f}" for part, took in seconds.items())
    print(f"{len(cases)} cases in {time.monotonic() - began:.0f} s; seconds of processes: {parts}")
    return answers


def main() -> None:
    """Write answers, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="JSON file with the output of each case")
    parser.add_argument("--compare", action="store_true", help="compare with the file instead of writing it")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated parts (default: all, %(default)s)")
    parser.add_argument(
        "--cases", nargs="+", default=[], metavar="TEXT", help="only cases whose names contain one of these"
    )
    parser.add_argument("--output", type=Path, help="with --compare: file for the new outputs")
    given = parser.parse_args()
    parts = given.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    before: dict[str, Record] = json.loads(given.file.read_text("utf-8")) if given.compare else {}
    cases = chosen(parts, given.cases)
    assert len({case.name for case in cases}) == len(cases), "names are unique"
    after = answers_now(cases)
    if not given.compare:
        write(given.file, after)
        return
    if given.output:
        write(given.output, after)
    asked = {
        name: record
        for name, record in before.items()
        if name.partition("/")[0] in parts and (not given.cases or any(text in name for text in given.cases))
    }
    found = differences(asked, after)
    for case, of_case in groupby(found, key=lambda each: each.case):
        first, *others = of_case
        print(first, *others[: SHOWN - 1], sep="\n")
        if len(others) >= SHOWN:
            print(f"{case}: {len(others) + 1 - SHOWN} more fields")
    print(f"{len(found)} differences in {len({each.case for each in found})} of {len(cases)} cases")
    sys.exit(bool(found))


def write(path: Path, answers: dict[str, Record]) -> None:
    """Write answers, a line for each field."""
    path.write_text(json.dumps(answers, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
