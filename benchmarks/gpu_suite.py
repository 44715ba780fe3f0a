"""Run the GPU suite: every GPU speed that docs/numbers.md states, in parts of under 8 minutes each.

    python benchmarks/gpu_suite.py --out FOLDER --call 1                      one of six calls of at most 5 minutes
    python benchmarks/gpu_suite.py --out FOLDER                               all parts, the most valuable first
    python benchmarks/gpu_suite.py --out FOLDER --parts decode_8b_bf16,host   some parts; the report keeps earlier ones
    python benchmarks/gpu_suite.py --out FOLDER --budget-minutes 9            starts no part that would not fit
    python benchmarks/gpu_suite.py --out FOLDER --merge FOLDER1 FOLDER2       one report of several runs
    python benchmarks/gpu_suite.py --list                                     parts and estimates
    python benchmarks/gpu_suite.py --out FOLDER --dry-run                     tiny shapes on the CPU: does it still run?
    python benchmarks/gpu_suite.py --fetch-wheels WHEELS                      packages for a machine without an index
    python benchmarks/gpu_suite.py --out FOLDER --call 1 --wheels WHEELS      on it, in a plain copy of the checkout

A call that is repeated into the same folder leaves out the parts that succeeded, unless --again is given. Each part is
a process of its own with a time limit; if one dies, the report says so, and the others run. FOLDER gets
measurements.jsonl (a line for each measurement, on the disk before the next begins), report.json, report.md, suite.log.
docs/gpu_suite.md says how to read them.
"""

import argparse
import os
import shlex
import signal
import sys
import time
from pathlib import Path

from suite.log import FILE_NAME, Line, Log, read_lines
from suite.machine import commit, describe_ram, ram_in_words
from suite.part_process import LOG, run_process
from suite.registry import ALL, CALL_SECONDS, CALLS, ENDING, PARTS, Part
from suite.report import summarise, write_report
from suite.wheels import PYTHON, fetch, install, wheels_in

ROOT = Path(__file__).parents[1]
PROCESS = Path(__file__).parent / "suite" / "part_process.py"
OVERRUN = 2  # with --call, a part is stopped at this multiple of its estimate, so that later parts can run
INTERRUPTED = 130  # exit status after Ctrl-C, as shells have it


def main() -> None:
    began = time.monotonic()
    options = parse_options()
    if options.list:
        show_parts()
        return
    if options.fetch_wheels:
        nbytes = fetch(options.fetch_wheels, options.python)
        print(f"{options.fetch_wheels}: {nbytes / 1e6:.1f} MB of wheels", file=sys.stderr)
        return
    if options.merge:
        write_report([line for folder in options.merge for line in read_lines(folder)], options.out)
        print(options.out / "report.md", file=sys.stderr)
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the running part, too, as Ctrl-C does
    prepare_path(options.wheels)
    print(ram_in_words(describe_ram()), file=sys.stderr)
    run = time.strftime("%Y%m%dT%H%M%S")
    head = {"command": shlex.join(["python", *sys.argv]), "commit": options.commit or commit(ROOT)}
    Log(options.out, run, options.dry_run).write(head)
    names = chosen_names(options)
    is_interrupted = False
    try:
        if options.dry_run:
            dry_run(options, run, [name for name in names if not PARTS[name].needs_gpu])
        else:
            run_all(options, run, [PARTS[name] for name in names], began)
    except KeyboardInterrupt:
        is_interrupted = True
        print("interrupted; the report has what was measured by then", file=sys.stderr)
    report = write_report(read_lines(options.out), options.out)
    print(f"{options.out / 'report.md'}: {len(report['measurements'])} measurements", file=sys.stderr)
    ended = [line for line in report["outcomes"] if line["run"] == run]
    all_ok = all(line["outcome"] == "ok" for line in ended)
    sys.exit(INTERRUPTED if is_interrupted else 0 if all_ok else 1)


def show_parts() -> None:
    calls = {name: f"call {number}" for number, names in CALLS.items() for name in names}
    for part in ALL:
        print(f"{part.name:20} about {part.seconds:4} s   {calls.get(part.name, ''):8}{part.title}")


def prepare_path(wheels: Path | None) -> None:
    """Let parts and their child processes import from the checkout and from wheels, if there are any."""
    sites = [] if wheels is None else [str(install(wheels_in(wheels)))]
    os.environ["PYTHONPATH"] = os.pathsep.join([*sites, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    sys.path[:0] = [*sites, str(ROOT)]


def chosen_names(options: argparse.Namespace) -> list[str]:
    """Return the parts to run; those of a call that have succeeded in the same folder are left out."""
    if options.call is None:
        return [part.name for part in (options.parts or ALL)]
    outcomes = summarise(read_lines(options.out))["outcomes"]
    ended = [line["part"] for line in outcomes if line["outcome"] == "ok" and line["dry"] == options.dry_run]
    left = [name for name in CALLS[options.call] if options.again or name not in ended]
    if len(left) < len(CALLS[options.call]):
        names = ", ".join(name for name in CALLS[options.call] if name not in left)
        print(f"call {options.call}: {names} succeeded before; --again runs them again", file=sys.stderr)
    return left


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=absolute, default=absolute("outputs/gpu_suite"))
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--parts", type=parts, help="comma-separated names; all if left out")
    what.add_argument(
        "--call", type=int, choices=CALLS, help="run the parts of one of the fixed calls, of at most 5 minutes each"
    )
    parser.add_argument("--again", action="store_true", help="with --call: also the parts that succeeded before")
    parser.add_argument(
        "--budget-minutes", type=float, help="start no part whose estimate exceeds the time that is left"
    )
    parser.add_argument(
        "--cache-dir", type=absolute, help="graphcore's cache_dir, for compiled code; the default one if left out"
    )
    parser.add_argument("--commit", help="commit of the source, if there is no git")
    parser.add_argument("--fetch-wheels", type=Path, metavar="WHEELS", help="download packages into a folder, and exit")
    parser.add_argument("--python", default=PYTHON, help="Python version for --fetch-wheels (default: %(default)s)")
    parser.add_argument("--wheels", type=Path, help="install from this folder of --fetch-wheels, without an index")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    if options.call is not None and options.budget_minutes is None:
        options.budget_minutes = CALL_SECONDS / 60
    if options.wheels is not None and not wheels_in(options.wheels):
        parser.error(f"argument --wheels: {options.wheels} has no wheels; --fetch-wheels puts them there")
    empty = [str(folder) for folder in options.merge or () if not (folder / FILE_NAME).is_file()]
    if empty:
        parser.error(f"argument --merge: no {FILE_NAME} in {', '.join(empty)}")
    if options.dry_run and options.parts and all(part.needs_gpu for part in options.parts):
        parser.error("argument --dry-run: each of these parts needs a GPU, so nothing would run; leave --parts out")
    if not (options.list or options.fetch_wheels):
        try:
            make_writable(options.out)
        except OSError as error:
            parser.error(f"argument --out: {options.out} cannot be written: {error.strerror}")
    return options


def absolute(text: str) -> Path:
    """Return a path that means the same in any folder: tests run in the checkout."""
    return Path(text).absolute()


def make_writable(folder: Path) -> None:
    """Create the folder and check that a file in it can be written; raises OSError if not."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LOG).open("ab").close()


def parts(text: str) -> list[Part]:
    """Return the parts of these names, in the order of the names."""
    unknown = [name for name in text.split(",") if name not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no part is called {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return [PARTS[name] for name in text.split(",")]


def command_of(options: argparse.Namespace, run: str, names: list[str]) -> list[str]:
    cache = "" if options.cache_dir is None else str(options.cache_dir)
    how = "dry" if options.dry_run else "true"
    return [sys.executable, "-P", "-u", str(PROCESS), str(options.out), run, how, cache, *names]


def dry_run(options: argparse.Namespace, run: str, names: list[str]) -> None:
    """Run all parts in one process, because imports take longer than the parts."""
    ended = run_process(command_of(options, run, names), options.out / LOG, 600)
    print(f"dry run: {ended}", file=sys.stderr)
    if ended != "ok":
        Log(options.out, run, True, "dry run").write({"outcome": ended})


def run_all(options: argparse.Namespace, run: str, chosen: list[Part], began: float) -> None:
    """Run parts one after the other; the report is written anew after each."""
    for part in chosen:
        left = float("inf")
        if options.budget_minutes is not None:
            left = options.budget_minutes * 60 - (time.monotonic() - began) - ENDING
        log = Log(options.out, run, False, part.name)
        if part.seconds > left:
            log.write({"outcome": f"not started: about {part.seconds} s, {max(left, 0):.0f} s are left"})
            continue
        print(f"{part.name}: about {part.seconds} s", file=sys.stderr, flush=True)
        start = time.monotonic()
        most = part.limit if options.call is None else min(part.limit, max(60, OVERRUN * part.seconds))
        try:
            ended = run_process(command_of(options, run, [part.name]), options.out / LOG, min(most, left))
        except KeyboardInterrupt:
            log.write({"outcome": "interrupted", "seconds": time.monotonic() - start})
            raise
        lines = read_lines(options.out)
        if not has_ended(lines, run, part.name):
            log.write({"outcome": ended, "seconds": time.monotonic() - start})
        write_report(read_lines(options.out), options.out)
        print(f"{part.name}: {ended}, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


def has_ended(lines: list[Line], run: str, name: str) -> bool:
    """Return whether the part's process recorded its own outcome."""
    return any("outcome" in line and (line["run"], line["part"]) == (run, name) for line in lines)


if __name__ == "__main__":
    main()
