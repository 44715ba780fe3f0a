"""The time since the process began, and what the compile cache was."""

import subprocess
import sys
import time

import pytest

from graphcore.graph.compile import CompileReport
from graphcore.tasks.report.startup import cache_state


@pytest.mark.parametrize(("hits", "misses", "state"), [(0, 0, "none"), (3, 0, "warm"), (0, 3, "cold"), (2, 1, "mixed")])
def test_the_cache_is_named_by_where_graphs_came_from(hits: int, misses: int, state: str) -> None:
    assert cache_state(CompileReport(1.0, hits, misses)) == state


CODE = "from graphcore.tasks.report.startup import seconds_since_start; print(seconds_since_start())"


@pytest.mark.thorough
def test_what_a_shell_did_before_it_became_python_is_not_counted() -> None:
    command = ["sh", "-c", 'sleep 0.5 && exec "$0" -c "$1"']
    began = time.monotonic()
    done = subprocess.run([*command, sys.executable, CODE], stdout=subprocess.PIPE, check=True, text=True)
    assert 0 < float(done.stdout) < time.monotonic() - began - 0.45  # a tick of the clock is 0.01


@pytest.mark.thorough
def test_the_clock_starts_with_the_process() -> None:
    code = CODE
    began = time.monotonic()
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout
    outside = time.monotonic() - began
    # importing torch takes most of it; the interpreter's own end is outside the measurement
    assert 0.3 * outside < float(found) <= outside + 0.02
