"""The tests that need a GPU, as parts: several files at a time, each in processes of its own.

    files -> shares -> workers, each of which starts pytest for one share after another
                         a process that dies (SIGABRT, a CUDA error that sticks) is replaced and goes on with the rest

What each test says is on the disk as it ends (tests.jsonl, written by pytest_lines.py), so that a killed run keeps it.
"""

import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from suite.bench import Bench
from suite.log import Measurement
from suite.pytest_lines import BEGAN, append_line, lines_of

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests" / "cuda"
KERNELS = ROOT / "tests" / "unit" / "kernels" / "gpu"
PRODUCTS = (
    "products/test_dense_product.py",
    "packed/test_gpu_packed_products.py",
    "packed/test_gpu_to_dense.py",
    "experts/test_gpu_experts.py",
    "experts/test_gpu_packed_experts.py",
)
SMOKE_THREE = "llama3 or gpt_oss or bitnet"
RESULTS = "tests.jsonl"
WORKERS = 10  # processes at a time, each with a context on the card and one core for compilers
COMPLETE = (0, 1, 5)  # pytest: all passed, some failed, no test was left
LOOK = 2.0  # seconds between two looks at what has ended
EVERY = 20  # tests between two rows of the report
BAD = ("FAILED", "ERROR", "DIED")


@dataclass(frozen=True)
class Share:
    """Tests that one process runs: those of one file, or every so manyth of them."""

    path: str
    number: int
    shares: int


def smoke_three(bench: Bench) -> None:
    """Run three architectures; a dry run collects all tests that need a GPU instead."""
    tests = [str(TESTS)] if bench.is_dry else files("smoke")
    run_tests(bench, "smoke of three", tests, select=SMOKE_THREE)


def smoke(bench: Bench) -> None:
    run_tests(bench, "smoke", files("smoke"))


def kernels(bench: Bench) -> None:
    others = sorted(path for path in KERNELS.rglob("test_*.py") if str(path.relative_to(KERNELS)) not in PRODUCTS)
    run_tests(bench, "kernels", map(str, others))


def products(bench: Bench) -> None:
    run_tests(bench, "products", [str(KERNELS / name) for name in PRODUCTS])


def captured(bench: Bench) -> None:
    run_tests(bench, "captured", files("captured"))


def tokens(bench: Bench) -> None:
    run_tests(bench, "tokens", files("tokens"))


def steady(bench: Bench) -> None:
    lists = f"--kernel-lists={bench.folder}"
    run_tests(bench, "steady", files("steady", "repeats", "kernel_lists", "sampling"), lists)


def joins(bench: Bench) -> None:
    run_tests(bench, "joins", files("joins"))


def compiled(bench: Bench) -> None:
    run_tests(bench, "compiled", files("compiled"))


def streamed(bench: Bench) -> None:
    run_tests(bench, "streamed", files("streamed", "experts"))


def fallback(bench: Bench) -> None:
    run_tests(bench, "fallback", files("fallback"))


def budgets(bench: Bench) -> None:
    """Run one file after another: free memory and what may be locked are measured."""
    run_tests(bench, "budgets", files("pinning", "budgets"), workers=1)


def files(*names: str) -> list[str]:
    return [str(TESTS / f"test_cuda_{name}.py") for name in names]


def run_tests(
    bench: Bench, name: str, paths: Iterable[str], *more: str, select: str = "", workers: int | None = None
) -> None:
    """Run the tests marked cuda; in a dry run only collect them.

    Args:
        more: options of pytest.  select: pytest's -k.

    Raises:
        RuntimeError: one failed, none passed, or pytest is not installed.
    """
    options = [*more, *([f"-k={select}"] if select else [])]
    if bench.is_dry:
        collect(paths, options)
        return
    workers = min(WORKERS, os.cpu_count() or 1) if workers is None else workers
    lines, label = bench.folder / RESULTS, f"{bench.log.run} {bench.log.part}"
    with ThreadPoolExecutor(workers) as pool:
        left = {pool.submit(run_share, share, options, lines, label) for share in shares_of(list(paths), workers)}
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


def shares_of(paths: Sequence[str], workers: int) -> list[Share]:
    """Return two shares or so for each worker; where workers are as many as files or fewer, a few for each file."""
    shares = min(workers, -(-2 * workers // len(paths))) if workers > 1 else 1
    return [Share(path, number, shares) for number in range(1, shares + 1) for path in paths]


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


def run_share(share: Share, options: Sequence[str], lines: Path, label: str) -> str:
    """Run a share's tests, in a new process where one died; return what went wrong with pytest itself, if anything."""
    written = ["-p", "suite.pytest_lines", f"--lines={lines}", f"--label={label}"]
    how = [f"--share={share.number}/{share.shares}", "-vv", "--tb=short", "-rf", "--durations=5"]
    command, environment = pytest_command([*written, *how, *options], share.path), own_environment()
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
