"""Running graphcore as people do: a process of its own, from a folder of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = 120


def environment() -> dict[str, str]:
    """Return this process's environment with the package importable from anywhere."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def graphcore(*arguments: str, cwd: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command line and return what it printed."""
    command = [sys.executable, "-m", "graphcore.tasks.main", *arguments]
    return subprocess.run(
        command, cwd=cwd, env=environment(), input=stdin, capture_output=True, text=True, timeout=SECONDS, check=False
    )
