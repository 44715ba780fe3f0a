"""Installing: a wheel has its kernels inside, nobody needs a compiler to run them, and a bad one fails no install."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from graphcore.compiler import find_own_compiler, find_ziglang, targets_here

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "ggml_blocks.npz"
# What libggml packed is packed anew and unpacked by the kernels; libggml's own weights are the reference.
SCRIPT = """
import json, sys
from pathlib import Path
import numpy as np, torch
import graphcore
from graphcore.device import find_cpp_compiler
from graphcore.kernels.cpu.library import find_library
from graphcore.kernels.cpu.kernel_packing import KernelPacking
stored = np.load(sys.argv[1])
library = find_library(Path("nothing-is-built-here"))
packing = KernelPacking("q4_k", 16, stored["Q4_K.f32"].size // 16, str(library))
packed = packing.pack(torch.from_numpy(stored["Q4_K.raw"].reshape(16, -1)))
dense = torch.from_numpy(stored["Q4_K.f32"].reshape(16, -1))
x = torch.randn(1, packing.columns, generator=torch.Generator().manual_seed(0))
product = packing.linear(x, packed, None, "float")
exact = x.double() @ dense.double().T
print(json.dumps({
    "package": str(Path(graphcore.__file__).parent), "library": str(library), "compiler": find_cpp_compiler(),
    "differing": int((packing.unpack(packed, torch.float32) != dense).sum()),
    "error": float((product.double() - exact).norm() / exact.norm()),
    "built": Path("nothing-is-built-here").exists(),
}))
"""


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """An environment whose packages are this one's, but for graphcore."""
    venv.create(tmp_path / "bare", with_pip=False)
    site = next((tmp_path / "bare").glob("lib/python*/site-packages"))
    ours = [path for path in sys.path if path.endswith("site-packages")]  # an editable graphcore is not among them
    (site / "packages.pth").write_text("\n".join(ours) + "\n", encoding="utf-8")
    return tmp_path / "bare"


def without_compilers(folder: Path, **places: str) -> dict[str, str]:
    """Return this process's environment with a PATH that holds nothing, and nothing of this checkout."""
    empty = folder / "empty"
    empty.mkdir(exist_ok=True)
    left_out = ("CXX", "CC", "PYTHONPATH", "PYTHONHOME")
    return {**{k: v for k, v in os.environ.items() if k not in left_out}, "PATH": str(empty), **places}


def build_wheel(folder: Path, environment: dict[str, str], *flags: str) -> Path:
    """Return the wheel that `python -m build` makes, by way of the sdist unless it is told otherwise."""
    command = [sys.executable, "-m", "build", *flags, "--outdir", str(folder)]
    done = subprocess.run([*command, str(ROOT)], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(wheel: Path, bare: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(bare / "bin" / "python"),
        "install",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run([*command, "--quiet", str(wheel)], check=True)


def run(bare: Path, folder: Path) -> dict[str, object]:
    """Return what the installed package says of itself where there is no compiler."""
    command = [str(bare / "bin" / "python"), "-W", "ignore", "-c", SCRIPT, str(GOLDEN)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=without_compilers(folder), cwd=folder, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(not targets_here(), reason="kernels are built ahead on Linux, x86-64 and aarch64")
@pytest.mark.skipif(find_own_compiler() is None, reason="needs a C++ compiler to build a wheel")
def test_a_wheel_multiplies_packed_weights_where_there_is_no_compiler(bare: Path, tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path / "dist", dict(os.environ), "--wheel", "--no-isolation", "--skip-dependency-check")
    check(wheel, bare, tmp_path)


@pytest.mark.slow  # a minute, and pip fetches ziglang
@pytest.mark.skipif(not targets_here(), reason="kernels are built ahead on Linux, x86-64 and aarch64")
def test_pip_brings_the_compiler_that_the_machine_does_not_have(bare: Path, tmp_path: Path) -> None:
    check(build_wheel(tmp_path / "dist", without_compilers(tmp_path)), bare, tmp_path)


def check(wheel: Path, bare: Path, folder: Path) -> None:
    """Install a wheel and run what is inside where no compiler is."""
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name.endswith(f"-py3-none-{platform}.whl")
    install(wheel, bare)
    found = run(bare, folder)
    assert found["compiler"] is None
    assert str(found["package"]).startswith(str(bare))
    assert str(found["library"]).startswith(str(found["package"]))
    assert (found["differing"], found["built"]) == (0, False)
    assert float(str(found["error"])) < 1e-5  # float32 sums


@pytest.mark.skipif(not targets_here(), reason="kernels are built ahead on Linux, x86-64 and aarch64")
@pytest.mark.skipif(find_ziglang() is not None, reason="with ziglang in this environment there is a compiler")
@pytest.mark.parametrize(
    ("compiler", "said"),
    [
        ("case \"$*\" in *probe.cpp*) exit 0;; esac; echo 'x.cpp:1: error: too old' >&2; exit 1", "too old"),
        ("exit 1", "no C++ compiler works here"),
    ],
)
def test_what_cannot_be_built_is_left_out_of_the_wheel_and_said(compiler: str, said: str, tmp_path: Path) -> None:
    """The sdist's copy of the sources has nothing built beside it."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--skip-dependency-check"]
    broken = tmp_path / "g++"
    broken.write_text(f"#!/bin/sh\n{compiler}\n", encoding="ascii")
    broken.chmod(0o755)
    done = subprocess.run(
        [*command, "--outdir", str(tmp_path / "dist"), str(ROOT)],
        capture_output=True, text=True, env={**os.environ, "CXX": str(broken)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert [wheel.name.endswith("-py3-none-any.whl") for wheel in (tmp_path / "dist").glob("*.whl")] == [True]
    assert f"{said}; its kernels are built at their first use" in done.stdout + done.stderr
