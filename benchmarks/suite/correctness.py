"""The tests that need a GPU, as parts: what they say is written down as they run, so that a killed run keeps it."""

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from suite.bench import Bench
from suite.log import Measurement

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
VERDICT = re.compile(r"^(?P<test>\S+::\S.*?) (?P<verdict>PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)\b")
EVERY = 20  # verdicts between two lines of the log


def smoke(bench: Bench) -> None:
    """Run every architecture once; a dry run collects all tests that need a GPU instead."""
    run_tests(bench, "smoke", [str(TESTS if bench.is_dry else TESTS / "test_cuda_smoke.py")])


def kernels(bench: Bench) -> None:
    run_tests(bench, "kernels", [str(KERNELS), *(f"--ignore={KERNELS / name}" for name in PRODUCTS)])


def products(bench: Bench) -> None:
    run_tests(bench, "products", [str(KERNELS / name) for name in PRODUCTS])


def captured(bench: Bench) -> None:
    run_tests(bench, "captured", files("captured"))


def tokens(bench: Bench) -> None:
    run_tests(bench, "tokens", files("tokens"))


def steady(bench: Bench) -> None:
    lists = f"--kernel-lists={bench.folder}"
    run_tests(bench, "steady", [*files("steady", "repeats", "kernel_lists", "sampling"), lists])


def compiled(bench: Bench) -> None:
    run_tests(bench, "compiled", files("compiled"))


def streamed(bench: Bench) -> None:
    run_tests(bench, "streamed", files("streamed"))


def budgets(bench: Bench) -> None:
    run_tests(bench, "budgets", files("pinning", "budgets", "experts"))


def files(*names: str) -> list[str]:
    return [str(TESTS / f"test_cuda_{name}.py") for name in names]


def run_tests(bench: Bench, name: str, paths: Sequence[str]) -> None:
    """Run the tests marked cuda; in a dry run only collect them.

    Raises:
        RuntimeError: one failed, none passed, or pytest is not installed.
    """
    how = ["--collect-only"] if bench.is_dry else ["-vv", "--tb=short", "-rf", "--durations=15"]
    command = [sys.executable, "-u", "-m", "pytest", "-m", "cuda", "-p", "no:cacheprovider", *how, *paths]
    # Options of a pytest that runs this are its own: another report would be written over the one that it writes.
    own = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    verdicts: Counter[str] = Counter()
    failed: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=own
    ) as process:
        assert process.stdout is not None, "it has a pipe"
        for line in process.stdout:
            print(line, end="", flush=True)  # into the suite's log
            match = VERDICT.match(line)
            if match:
                verdicts[match["verdict"]] += 1
                failed += [match["test"]] * (match["verdict"] in ("FAILED", "ERROR"))
                if sum(verdicts.values()) % EVERY == 0:
                    write(bench, f"{name} (so far)", verdicts, failed)
    if process.returncode not in (0, 1) or (process.returncode == 1 and not failed):
        raise RuntimeError(f"pytest ended with status {process.returncode}; is it installed? suite.log has its words")
    write(bench, name, verdicts, failed, is_whole=True)
    if not (verdicts["PASSED"] or failed or bench.is_dry):
        raise RuntimeError(f"no test passed: {sum(verdicts.values())} were skipped; suite.log says why")
    if failed:
        raise RuntimeError(f"{len(failed)} of {sum(verdicts.values())} tests failed: {', '.join(failed[:5])}")


def write(bench: Bench, name: str, verdicts: Counter[str], failed: Sequence[str], is_whole: bool = False) -> None:
    row = Measurement(name, "passed tests", [float(verdicts["PASSED"])], details={"failed": list(failed), **verdicts})
    row.note = ", ".join(f"{count} {verdict.lower()}" for verdict, count in verdicts.items())
    if verdicts:
        row.aim("none fails", not failed and is_whole and verdicts["PASSED"] > 0)
    bench.log.add(row)
