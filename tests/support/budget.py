"""Processor time of test files, skipped tests by reason, and the order in which workers take files: a pytest plugin.

    pytest                       lists files of tests/unit above `unit_budget` seconds (pyproject.toml) at the end
    CI=true pytest               fails if some are above `unit_limit` seconds, too
    pytest --record-durations    writes the time of each file to tests/durations.json: the longest begin first

Time is that of processors, of the process and of the children that it has waited for, so that a busy machine fails
nothing. What fixtures of a file, a package or the session cost counts for the file that needs them first; what
importing costs counts for none.
"""

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

DURATIONS = Path(__file__).parents[1] / "durations.json"
UNIT = "tests/unit/"
LISTED = 15  # files above their budget


def processor_seconds() -> float:
    """Return the processor time of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class ProcessorTime:
    """Measures each phase of each test where it runs, and adds up in the process that reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._config, self._begin = config, 0.0
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._skipped: Counter[str] = Counter()
        self._budget, self._limit = (float(config.getini(name)) for name in ("unit_budget", "unit_limit"))
        # Runs of chosen tests, thorough or slow ones included, may take what they take:
        self._is_quick = "(not thorough)" in config.option.markexpr or config.option.markexpr.endswith("not thorough")

    def pytest_runtest_logstart(self) -> None:
        self._begin = processor_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        report = yield
        now = processor_seconds()
        report.processor_seconds, self._begin = now - self._begin, now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0]] += getattr(report, "processor_seconds", 0.0)
        if report.skipped and not hasattr(report, "wasxfail"):
            self._skipped[reason_of(report)] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._skipped[f"{reason_of(report)} (whole file)"] += 1

    def above(self, seconds: float) -> list[tuple[float, str]]:
        """Return the seconds and names of unit test files that took longer, the longest first."""
        found = [(spent, file) for file, spent in self._seconds.items() if file.startswith(UNIT)]
        return sorted((one for one in found if one[0] > seconds), reverse=True)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self._config, "workerinput"):
            return
        if self._config.getoption("--record-durations"):
            known = recorded_durations() | {file: round(spent, 2) for file, spent in self._seconds.items()}
            root = self._config.rootpath
            kept = {file: spent for file, spent in sorted(known.items()) if (root / file).exists()}
            DURATIONS.write_text(json.dumps(kept, indent=0) + "\n")
        if self.fails() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def fails(self) -> bool:
        """Return whether files above the limit fail this run."""
        return self._is_quick and os.environ.get("CI") == "true" and bool(self.above(self._limit))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write = terminalreporter.write_line
        if self._skipped:
            terminalreporter.section("skipped")
            for reason, count in self._skipped.most_common():
                write(f"{count:5}  {reason}")
        over = self.above(self._budget)
        if over:
            terminalreporter.section(f"unit test files above {self._budget:g} s of processor time")
            for spent, file in over[:LISTED]:
                write(f"{spent:7.1f} s  {file}")
            if len(over) > LISTED:
                write(f"and {len(over) - LISTED} more; {sum(one for one, _ in over):.0f} s together")
            if self.fails():
                write(f"{len(self.above(self._limit))} of them above {self._limit:g} s, which fails this run", red=True)


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return why a test was skipped."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def recorded_durations() -> dict[str, float]:
    """Return the processor seconds of test files as they were last recorded."""
    return json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
