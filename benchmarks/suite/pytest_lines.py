"""A plugin of pytest: lines on the disk as tests begin and end, a share of the tests, an end with the device.

    pytest -p suite.pytest_lines --lines FILE --label RUN --share 2/5 --group-by name tests/cuda

Tests of the same label that FILE says have begun are left out, so the same command goes on where a process died. After
a test that failed the device is asked whether it still answers: an error that sticks would fail all tests that follow,
so the process ends, with `BROKEN` as its status. Imports nothing heavy.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

BROKEN = 90
BEGAN = "BEGAN"  # the verdict of a test that runs
MOST_WORDS = 2000  # of a failure
Line = dict[str, Any]


def append_line(path: Path, line: Line) -> None:
    """Add a line and wait until it is on the disk; several processes may write into one file."""
    with path.open("ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")  # one call of the system: lines do not mix
        os.fsync(file.fileno())


def lines_of(path: Path) -> list[Line]:
    """Return the lines that were written whole."""
    found = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            found.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return found


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lines", type=Path, help="file that gets a line for each test")
    parser.addoption("--label", default="", help="of this run, in its lines")
    parser.addoption("--share", default="1/1", help="2/5: the second of five shares of the tests")
    parser.addoption("--group-by", default="", help="parameter whose values keep tests together in one share")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Lines(config.getoption("--lines"), config.getoption("--label")))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    number, shares = map(int, config.getoption("--share").split("/"))
    label = config.getoption("--label")
    begun = {line["test"] for line in lines_of(config.getoption("--lines")) if line["label"] == label}
    parameter = config.getoption("--group-by")
    own = shares_of(items, parameter, shares)[number - 1] if parameter else items[number - 1 :: shares]
    items[:] = [item for item in own if item.nodeid not in begun]


def shares_of(items: Sequence[pytest.Item], parameter: str, shares: int) -> list[list[pytest.Item]]:
    """Return the tests in shares of about as many each; those with the same value of a parameter are in one.

    Tests without the parameter are grouped by their function.
    """
    groups: dict[object, list[pytest.Item]] = {}
    for item in items:
        values = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        groups.setdefault(values.get(parameter, item.nodeid.partition("[")[0]), []).append(item)
    found: list[list[pytest.Item]] = [[] for _ in range(shares)]
    for group in sorted(groups.values(), key=len, reverse=True):
        min(found, key=len).extend(group)
    return found


class Lines:
    """Writes down how each test begins and ends."""

    def __init__(self, path: Path, label: str) -> None:
        self.path, self.label = path, label
        self.has_failed = False

    def write(self, test: str, verdict: str, **more: object) -> None:
        append_line(self.path, {"label": self.label, "process": os.getpid(), "test": test, "verdict": verdict, **more})

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.write(nodeid, BEGAN)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        verdict = verdict_of(report)
        if verdict:
            self.has_failed |= verdict in ("FAILED", "ERROR")
            why = "" if verdict == "PASSED" else str(report.longrepr)[-MOST_WORDS:]
            self.write(report.nodeid, verdict, seconds=report.duration, why=why)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        """End the process after a failure that the device does not get over."""
        self.has_failed = False
        result = yield
        if self.has_failed and is_device_broken():
            os._exit(BROKEN)
        return result


def verdict_of(report: pytest.TestReport) -> str:
    """Return a test's verdict; empty if this report is not what decides it."""
    if report.when == "call" or (report.when == "setup" and report.skipped):
        if "wasxfail" in report.__dict__:
            return "XFAIL" if report.skipped else "XPASS"
        return report.outcome.upper()
    return "ERROR" if report.failed else ""


def is_device_broken() -> bool:
    """Return whether CUDA was in use and no longer answers."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
