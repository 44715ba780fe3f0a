"""Processors that may be used: affinity, quotas of control groups of both versions; how torch's threads wait."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.processes import ROOT, write_groups

from graphcore import processors
from graphcore.processors import bound_spinning, seconds_queued, spinning_note, usable_processors

V2 = ("0::/app", "30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw")
V1 = ("3:cpu,cpuacct:/box", "31 24 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct")


@pytest.fixture(autouse=True)
def _sixteen_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)


@pytest.mark.parametrize(
    ("lines", "files", "expected"),
    [
        (V2, {"app/cpu.max": "100000 100000\n"}, 1),
        (V2, {"app/cpu.max": "150000 100000\n"}, 2),
        (V2, {"app/cpu.max": "1000 100000\n"}, 1),
        (V2, {"app/cpu.max": "max 100000\n", "cpu.max": "300000 100000\n"}, 3),
        (V2, {"app/cpu.max": "max 100000\n"}, 16),
        (V2, {"app/cpu.max": "6400000 100000\n"}, 16),
        (V2, {}, 16),
        (V1, {"cpu/box/cpu.cfs_quota_us": "250000\n", "cpu/box/cpu.cfs_period_us": "100000\n"}, 3),
        (V1, {"cpu/box/cpu.cfs_quota_us": "-1\n", "cpu/box/cpu.cfs_period_us": "100000\n"}, 16),
        (V1, {"cpu/box/cpu.cfs_quota_us": "50000\n"}, 16),
    ],
)
def test_a_quota_bounds_the_processors(
    tmp_path: Path, lines: tuple[str, str], files: Mapping[str, str], expected: int
) -> None:
    assert usable_processors(write_groups(tmp_path, *lines, files)) == expected


def test_affinity_bounds_them_where_there_is_no_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    assert usable_processors(write_groups(tmp_path, *V2, {"app/cpu.max": "400000 100000\n"})) == 2


@pytest.mark.parametrize("said", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_what_the_user_has_said_about_waiting_stands(said: str) -> None:
    environment = {said: "mine"}
    bound_spinning(environment)
    assert environment == {said: "mine"}


IMPORTS = """
import os, sys
{first}
import graphcore
assert "torch" not in sys.modules or {first!r}
before = os.environ.get("GOMP_SPINCOUNT")
{second}
import torch
from graphcore.processors import spinning_note
print(torch.heard, before, os.environ.get("GOMP_SPINCOUNT"), bool(spinning_note()))
"""
COMMAND = """
import types
sys.modules["graphcore.cli.main"] = types.SimpleNamespace(main=lambda **_: None)
from graphcore.cli.start import start
start()
"""


def without_waiting() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in processors.SPIN_VARIABLES}


def run_python(code: str, environment: Mapping[str, str]) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    ("first", "second", "user", "expected"),
    [
        ("", "import graphcore.engine", None, ["10000", "None", "None", "False"]),
        ("", "import graphcore.engine", "7", ["7", "7", "7", "False"]),
        ("", COMMAND, None, ["10000", "None", "10000", "False"]),
        ("", COMMAND, "7", ["7", "7", "7", "False"]),
        ("import torch", "import graphcore.engine", None, ["None", "None", "None", "True"]),
    ],
    ids=["engine", "engine, set by the user", "command", "command, set by the user", "torch before graphcore"],
)
def test_torch_is_told_when_it_is_loaded_and_the_caller_s_environment_stays(
    first: str, second: str, user: str | None, expected: list[str], tmp_path: Path
) -> None:
    """Over a torch that keeps what it hears; a command may change its own process's environment."""
    (tmp_path / "torch.py").write_text('import os\nheard = os.environ.get("GOMP_SPINCOUNT")\n')
    environment = {**without_waiting(), "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    environment |= {} if user is None else {"GOMP_SPINCOUNT": user}
    assert run_python(IMPORTS.format(first=first, second=second), environment) == expected


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="torch has another OpenMP library than libgomp")
def test_libgomp_itself_says_for_how_long_threads_spin() -> None:
    """It prints its settings when it is loaded, which is when it reads them."""
    environment = {**without_waiting(), "PYTHONPATH": str(ROOT), "OMP_DISPLAY_ENV": "VERBOSE"}
    for imports, rounds in (("graphcore.engine", "10000"), ("torch, graphcore.engine", "300000")):
        command = [sys.executable, "-c", f"import {imports}"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
        assert f"GOMP_SPINCOUNT = '{rounds}'" in done.stderr, imports


def test_a_note_names_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "load_torch", lambda: False)
    for name in processors.SPIN_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert "GOMP_SPINCOUNT=10000" in spinning_note()
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert spinning_note() == ""


CROWD = """
import os, time
from graphcore.processors import seconds_queued
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
before = seconds_queued()
if os.fork() == 0:
    until = time.perf_counter() + 0.6
    while time.perf_counter() < until: pass
    os._exit(0)
until = time.perf_counter() + 0.6
while time.perf_counter() < until: pass
print(seconds_queued() - before)
"""


@pytest.mark.skipif(seconds_queued() is None, reason="this kernel does not count how long threads wait for a processor")
def test_two_that_share_a_processor_wait_for_each_other() -> None:
    done = subprocess.run([sys.executable, "-c", CROWD], capture_output=True, text=True, check=True, timeout=60)
    assert float(done.stdout) > 0.1  # half of 0.6 s where nothing else runs
