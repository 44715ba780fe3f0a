"""What Inductor makes of every kind of block is what it was: each graph's nodes and launches, golden for each torch."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from difflib import unified_diff
from functools import cache
from pathlib import Path

import pytest
from lowered_graphs import DEVICES, MODELS, golden_folder

from graphcore.device import find_cpp_compiler

pytestmark = pytest.mark.thorough

SCRIPT = Path(__file__).parents[2] / "lowered_graphs.py"
ACCEPT = "python tests/lowered_graphs.py"
# Plain blocks, packed ones, and two kinds of layers with a mixture are lowered in CI; the others are slow.
# Inductor names a launch after the operation behind it where a process first sees that operation, so q4_k goes first.
SOME = ("llama3", "llama3_q4_k", "gpt_oss")
EXTENTS = [
    pytest.param(SOME, id="some", marks=pytest.mark.thorough),
    pytest.param(tuple(name for name in MODELS if name not in SOME), id="others", marks=pytest.mark.slow),
]


def drift(golden: Path, found: Path, models: Sequence[str]) -> str:
    """Return how the files of some models in two folders differ; empty if they do not."""
    names = [f"{model}.txt" for model in models]
    lines: list[str] = []
    for name in names:
        before, now = (
            path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            for path in (golden / name, found / name)
        )
        lines += unified_diff(before, now, f"golden/{name}", f"now/{name}", lineterm="", n=2)
    return "\n".join(lines)


@pytest.fixture(scope="module")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Sequence[str]], Path]:
    """A function from models to a folder of what Inductor makes of them now, for each device that has golden files."""
    return cache(lambda models: lower(tmp_path_factory.mktemp("lowered"), models))


def lower(folder: Path, models: Sequence[str]) -> Path:
    """Write what Inductor makes of some models into a folder and return it."""
    if find_cpp_compiler() is None:
        pytest.skip("Inductor's code for the CPU and the stand-in for a GPU need a C++ compiler")
    devices = [device for device in DEVICES if (golden_folder() / device).is_dir()]
    if importlib.util.find_spec("triton") is None:
        devices = [device for device in devices if device != "cuda"]
    if devices:
        environment = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-W", "ignore", str(SCRIPT), ",".join(devices), str(folder), *models]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr
    return folder


def test_no_golden_file_is_without_a_model() -> None:
    for device in DEVICES:
        golden = golden_folder() / device
        assert not golden.is_dir() or {path.stem for path in golden.iterdir()} <= set(MODELS)


@pytest.mark.parametrize("models", EXTENTS)
@pytest.mark.parametrize("device", DEVICES)
def test_compiled_blocks_have_the_nodes_and_launches_that_they_had(
    device: str, models: Sequence[str], lowered: Callable[[Sequence[str]], Path]
) -> None:
    if device == "cuda" and importlib.util.find_spec("triton") is None:
        pytest.skip("Inductor writes Triton for a GPU, and triton is not installed")
    golden = golden_folder() / device
    if not golden.is_dir():
        pytest.skip(f"{golden.parent.name} has no golden graphs for {device}; `{ACCEPT}` writes them")
    found = drift(golden, lowered(models) / device, models)
    assert not found, f"compiled blocks are no longer what they were; if that is meant, `{ACCEPT}` accepts it\n{found}"
