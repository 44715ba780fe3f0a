"""The tests that need a GPU, as parts: the tests of a part in several processes at a time.

    tests -> groups (those of one model, which compile the same kernels) -> shares -> a process for each
                                       a process that dies (SIGABRT, a sticky CUDA error) is replaced and continues

Most of their time goes to compilers. What each test says is on the disk as it ends (tests.jsonl, written by
pytest_lines.py), so that a killed run keeps it.
"""

import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from suite.bench import Bench
from suite.log import Measurement
from suite.pytest_lines import BEGAN, append_line, lines_of

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests" / "cuda"
KERNELS = ROOT / "tests" / "unit" / "kernels" / "gpu"
# Files of tests/cuda in the order in which a process runs them, but those that measure an idle card.
MODELS = (
    *("smoke", "captured", "streamed", "joins", "kernel_lists", "repeats", "steady", "experts", "sampling", "tokens"),
    *("coded_caches", "adapters", "compiled", "fallback", "low_bit", "server"),
)
IDLE_CARD = ("pinning", "budgets", "ring")
RESULTS = "tests.jsonl"
WORKERS = 20  # processes at a time, at most, each with a context on the card
WORKERS_PER_CPU = 1.25  # each waits for the device or the disk some of the time
COMPLETE = (0, 1, 5)  # pytest: all passed, some failed, no test was left
LOOK = 2.0  # seconds between two looks at what has ended
EVERY = 20  # tests between two rows of the report
BAD = ("FAILED", "ERROR", "DIED")


def models(bench: Bench) -> None:
    """Run the tests of whole models; those that write kernel lists write them to the run's folder."""
    run_tests(bench, "models", files(*MODELS), f"--kernel-lists={bench.folder}", group_by="name")


def kernels(bench: Bench) -> None:
    run_tests(bench, "kernels", [str(KERNELS)])


def budgets(bench: Bench) -> None:
    """Run one file after another: free memory and what may be locked are measured."""
    run_tests(bench, "budgets", files(*IDLE_CARD), workers=1)


def files(*names: str) -> list[str]:
    return [str(TESTS / f"test_cuda_{name}.py") for name in names]


def run_tests(
    bench: Bench, name: str, paths: Sequence[str], *options: str, group_by: str = "", workers: int | None = None
) -> None:
    """Run the tests marked cuda; in a dry run only collect them.

    Args:
        options: options of pytest.
        group_by: parameter of tests; those with the same value run in one process. Empty for no parameter.
        workers: processes at a time; None for WORKERS_PER_CPU of them for each processor, at most WORKERS.

    Raises:
        RuntimeError: one failed, none passed, or pytest is not installed.
    """
    if bench.is_dry:
        collect(paths, options)
        return
    if workers is None:
        workers = min(WORKERS, int(WORKERS_PER_CPU * (os.cpu_count() or 1)))
    shares = [(f"--share={number}/{workers}", f"--group-by={group_by}") for number in range(1, workers + 1)]
    lines, label = bench.folder / RESULTS, f"{bench.log.run} {bench.log.part}"
    with ThreadPoolExecutor(workers) as pool:
        left = {pool.submit(run_share, paths, [*share, *options], lines, label) for share in shares}
        ended, said = set[Future[str]](), 0
        while left:
            now, left = wait(left, LOOK, FIRST_COMPLETED)
            ended |= now
            verdicts = verdicts_of(lines, label)
            if len(verdicts) >= said + EVERY:
                said = len(verdicts)
                write(bench, f"{name} (so far)", verdicts)
    problems = [problem for problem in (future.result() for future in ended) if problem]
    verdicts = verdicts_of(lines, label)
    write(bench, name, verdicts, is_whole=not problems)
    if problems:
        raise RuntimeError(f"{problems[0]}; is pytest installed? suite.log has its words")
    failed = failed_of(verdicts)
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(verdicts)} tests failed: {', '.join(failed[:5])}")
    if "PASSED" not in verdicts.values():
        raise RuntimeError(f"no test passed: {len(verdicts)} were skipped; {RESULTS} says why")


def pytest_command(options: Sequence[str], *paths: str) -> list[str]:
    return [sys.executable, "-u", "-m", "pytest", "-m", "cuda", "-p", "no:cacheprovider", *options, *paths]


def own_environment() -> dict[str, str]:
    """Return the environment of a pytest: options of one that runs the suite would write over that one's report."""
    own = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    path = [str(ROOT / "benchmarks"), str(ROOT), *filter(None, [own.get("PYTHONPATH")])]
    return {**own, "PYTHONPATH": os.pathsep.join(path)}


def collect(paths: Iterable[str], options: Sequence[str]) -> None:
    """Let pytest find the tests.

    Raises:
        RuntimeError: it cannot.
    """
    command = pytest_command(["--collect-only", *options], *paths)
    done = subprocess.run(command, cwd=ROOT, env=own_environment(), check=False)
    if done.returncode:
        raise RuntimeError(f"pytest ended with status {done.returncode}; is it installed? suite.log has its words")


def run_share(paths: Sequence[str], options: Sequence[str], lines: Path, label: str) -> str:
    """Run a share's tests, in a new process where one died; return what went wrong with pytest itself, if anything."""
    written = ["-p", "suite.pytest_lines", f"--lines={lines}", f"--label={label}"]
    how = ["-vvv", "--tb=short", "-rf", "--durations=5"]
    command, environment = pytest_command([*written, *how, *options], *paths), own_environment()
    while True:
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=environment)
            status = process.wait()
            output.seek(0)
            print(output.read(), end="", flush=True)  # into the suite's log
        own = [line for line in lines_of(lines) if (line["label"], line["process"]) == (label, process.pid)]
        ended = {line["test"] for line in own if line["verdict"] != BEGAN}
        for line in own:
            if line["test"] not in ended:
                why = f"pytest's process ended with status {status} during this test"
                append_line(lines, {**line, "verdict": "DIED", "why": why})
        if status in COMPLETE and not (status == 1 and not own):
            return ""
        if not own:
            return f"pytest ended with status {status}"


def verdicts_of(lines: Path, label: str) -> dict[str, str]:
    """Return the verdict of each test of one run of a part."""
    found: dict[str, str] = {}
    for line in lines_of(lines):
        if line["label"] == label and line["verdict"] != BEGAN and found.get(line["test"]) not in BAD:
            found[line["test"]] = line["verdict"]
    return found


def failed_of(verdicts: Mapping[str, str]) -> list[str]:
    return [test for test, verdict in verdicts.items() if verdict in BAD]


def write(bench: Bench, name: str, verdicts: Mapping[str, str], is_whole: bool = False) -> None:
    counts, failed = Counter(verdicts.values()), failed_of(verdicts)
    row = Measurement(name, "passed tests", [float(counts["PASSED"])], details={"failed": failed, **counts})
    row.note = ", ".join(f"{count} {verdict.lower()}" for verdict, count in counts.items())
    if verdicts:
        row.aim("none fails", not failed and is_whole and counts["PASSED"] > 0)
    bench.log.add(row)
