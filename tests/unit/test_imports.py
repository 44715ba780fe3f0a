"""Every module can be imported here: those for a GPU too, and all others where there is no triton."""

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.cases import in_case

import graphcore

ROOT = Path(graphcore.__file__).parent
GPU = "graphcore.kernels.gpu"
# imported where decode steps are built for a GPU, and nowhere else
BRINGS_GPU = tuple(
    f"graphcore.graph.gpu.{name}" for name in ("kernel_decode", "kernel_entries", "product_inputs", "norm_fusion")
)
MODULES = sorted(module.name for module in pkgutil.walk_packages([str(ROOT)], "graphcore."))
WITH_RAY = (  # which is an extra
    "graphcore.serving.ray_app",
    *(f"graphcore.serving.replicas.{name}" for name in ("prefix_router", "ray_server", "replica_resources")),
)
WITHOUT_TRITON = """
import importlib, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name == "triton" or name.startswith("triton."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
for name in sys.argv[1:]:
    importlib.import_module(name)
print(sorted(name for name in sys.modules if name == "triton"))
"""


def is_of_the_gpu(name: str) -> bool:
    return name == GPU or name.startswith(f"{GPU}.")


def imported_by(path: Path) -> set[str]:
    """Return the first part of every module that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    return names


def test_every_module_imports() -> None:
    for name in (one for one in MODULES if one not in WITH_RAY):
        with in_case(name):
            assert importlib.import_module(name).__doc__, "does not say what lives there"


@pytest.mark.thorough
def test_modules_for_ray_import() -> None:
    pytest.importorskip("ray", reason="Ray is an extra: pip install 'graphcore[ray]'")
    for name in WITH_RAY:
        assert importlib.import_module(name).__doc__, name


@pytest.mark.thorough
def test_without_triton_all_but_the_gpu_s_modules_import() -> None:
    left_out = (*BRINGS_GPU, *WITH_RAY)
    others = [name for name in MODULES if not is_of_the_gpu(name) and name not in left_out]
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON, *others], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"


def test_only_the_gpu_s_modules_import_triton() -> None:
    folder = ROOT.joinpath(*GPU.split(".")[1:])
    importers = [path for path in ROOT.rglob("*.py") if "triton" in imported_by(path)]
    assert importers, "the kernels for a GPU are written in triton"
    assert [path for path in importers if folder not in path.parents] == []


@pytest.mark.thorough
def test_a_module_of_the_gpu_fails_without_triton() -> None:
    """What the import of the others is worth: the hook does hide triton."""
    command = [sys.executable, "-c", WITHOUT_TRITON, f"{GPU}.norm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "No module named 'triton'" in done.stderr
