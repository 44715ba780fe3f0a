"""Keeps where a sweep writes, for the summary after its last job: jobs may run in other processes or on other machines.

conf/config.yaml names the callback, which Hydra calls in the process of the command.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig


@dataclass(frozen=True)
class StartedSweep:
    """A sweep that this process has started.

    Attributes:
        started: its time, which tells its jobs from those of an earlier sweep in the same folder.
    """

    folder: Path
    started: str


_kept: list[StartedSweep] = []


class KeepSweepFolder(Callback):
    """Hydra's callback at the start of a sweep.

    Args:
        started: time of the start; Hydra gives all jobs the same.
    """

    def __init__(self, started: str) -> None:
        self._started = started

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Keep the folder, which has the time of the sweep's start in its name, and that time."""
        _kept[:] = [StartedSweep(Path(config.hydra.sweep.dir).absolute(), sweep_start(config.hydra))]


def sweep_start(hydra_config: Any) -> str:
    """Return the time of the sweep's start, from the settings of Hydra in any of its jobs."""
    return str(hydra_config.callbacks["sweep_folder"].started)


def kept_sweep() -> StartedSweep | None:
    """Return the sweep that this process has started since the last call; None for none."""
    return _kept.pop() if _kept else None
