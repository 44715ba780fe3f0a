"""Sweeps: each job in a fresh process, a failed one beside the others, one summary of all."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.conf import HydraConf

CHILD = "from graphcore.tasks.main import main; main(is_quoted=True)"


@dataclass(frozen=True)
class SweepJob:
    """One job of a sweep that has ended."""

    output_dir: Path
    overrides: tuple[str, ...]
    status: int


def run_child(hydra_config: HydraConf) -> SweepJob:
    """Run the job in a process of its own: no compiled graph, cache or broken state of another job reaches it."""
    output_dir = Path(hydra_config.runtime.output_dir)
    overrides = tuple(hydra_config.overrides.task)
    command = [sys.executable, "-c", CHILD, *overrides, f"hydra.run.dir='{output_dir}'"]
    print(f"--- {' '.join(overrides)}", file=sys.stderr, flush=True)
    status = subprocess.run(command, check=False).returncode
    return SweepJob(output_dir, overrides, abs(status))


def finish_sweep(jobs: Sequence[SweepJob]) -> None:
    """Write the sweep's summary."""
