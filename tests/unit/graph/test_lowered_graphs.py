"""What Inductor makes of every kind of block is what it was: each graph's nodes and launches, golden for each torch."""

import importlib.util
import os
import subprocess
import sys
from difflib import unified_diff
from pathlib import Path

import pytest
from lowered_graphs import DEVICES, golden_folder

from graphcore.device import find_cpp_compiler

pytestmark = pytest.mark.thorough

SCRIPT = Path(__file__).parents[2] / "lowered_graphs.py"
ACCEPT = "python tests/lowered_graphs.py"


def drift(golden: Path, found: Path) -> str:
    """Return how the files of two folders differ; empty if they do not."""
    names = sorted({path.name for folder in (golden, found) for path in folder.glob("*.txt")})
    lines: list[str] = []
    for name in names:
        before, now = (
            path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            for path in (golden / name, found / name)
        )
        lines += unified_diff(before, now, f"golden/{name}", f"now/{name}", lineterm="", n=2)
    return "\n".join(lines)


@pytest.fixture(scope="module")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of what Inductor makes now, for each device that has golden files."""
    if find_cpp_compiler() is None:
        pytest.skip("Inductor's code for the CPU and the stand-in for a GPU need a C++ compiler")
    folder = tmp_path_factory.mktemp("lowered")
    devices = [device for device in DEVICES if (golden_folder() / device).is_dir()]
    if importlib.util.find_spec("triton") is None:
        devices = [device for device in devices if device != "cuda"]
    if devices:
        environment = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-W", "ignore", str(SCRIPT), ",".join(devices), str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_blocks_have_the_nodes_and_launches_that_they_had(device: str, lowered: Path) -> None:
    if device == "cuda" and importlib.util.find_spec("triton") is None:
        pytest.skip("Inductor writes Triton for a GPU, and triton is not installed")
    golden = golden_folder() / device
    if not golden.is_dir():
        pytest.skip(f"{golden.parent.name} has no golden graphs for {device}; `{ACCEPT}` writes them")
    found = drift(golden, lowered / device)
    assert not found, f"compiled blocks are no longer what they were; if that is meant, `{ACCEPT}` accepts it\n{found}"
