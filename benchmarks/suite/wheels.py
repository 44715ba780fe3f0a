"""Puts what a machine without a package index lacks into a folder, and installs from there beside a checkout.

    fetch      on a machine with an index: wheels for a Python on Linux x86-64, into a folder
    install    on the other one: the wheels of that folder into a folder of their own, without any index

Torch, transformers and pytest are there already, with numpy, tqdm and PyYAML, which they need. Imports nothing heavy.
"""

import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

BUILT = ("antlr4-python3-runtime==4.9.3",)  # published as a source package only
PUBLISHED = (
    *("hydra-core==1.3.2", "omegaconf==2.3.0", "gguf==0.19.0", "rich", "markdown-it-py", "mdurl", "pygments"),
    *("einops", "psutil", "hypothesis", "sortedcontainers", "pytest-xdist", "execnet"),
)
PYTHON = "3.12"  # of the machine that lacks them
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
DONE = ".complete"


def fetch_commands(folder: Path, python: str) -> list[list[str]]:
    """Return the commands that put all wheels into a folder."""
    there = ["--quiet", "--no-deps"]
    platforms = [f"--platform={platform}" for platform in PLATFORMS]
    target = ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp", *platforms]
    return [
        [*PIP, "wheel", *there, f"--wheel-dir={folder}", *BUILT],
        [*PIP, "download", *there, *target, f"--dest={folder}", *PUBLISHED],
    ]


def fetch(folder: Path, python: str) -> int:
    """Put all wheels into a folder; return their bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    for command in fetch_commands(folder, python):
        subprocess.run(command, check=True)
    return sum(path.stat().st_size for path in wheels_in(folder))


def wheels_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.whl"))


def install(wheels: Sequence[Path]) -> Path:
    """Return the folder that wheels are installed in; the same wheels are installed once on a machine."""
    digest = hashlib.sha256()
    for wheel in wheels:
        digest.update(wheel.name.encode() + wheel.read_bytes())
    site = Path(tempfile.gettempdir()) / f"graphcore-suite-{digest.hexdigest()[:16]}-{sys.version_info.minor}"
    if not (site / DONE).exists():
        how = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--upgrade", f"--target={site}"]
        subprocess.run([*PIP, "install", *how, *map(str, wheels)], check=True)
        (site / DONE).touch()
    return site
