"""The team of threads: each phase is whole before the next one begins, whoever is late."""

import subprocess
from pathlib import Path

import pytest

from graphcore.device import find_cpp_compiler
from graphcore.kernels.cpu.library import SOURCES

STRESS = Path(__file__).with_name("team_stress.cpp")


@pytest.fixture(scope="module")
def stress(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = find_cpp_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler works here")
    built = tmp_path_factory.mktemp("team") / "stress"
    subprocess.run(
        [compiler, "-std=c++20", "-O2", "-pthread", "-I", SOURCES, STRESS, "-o", built], check=True, timeout=120
    )
    return built


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_every_phase_is_whole_before_the_next_begins(stress: Path, threads: int) -> None:
    """Random jobs; some portions sleep or yield. Eight threads are more than most machines of CI have cores."""
    done = subprocess.run([stress, str(threads), "2000", "1"], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "whole\n")
