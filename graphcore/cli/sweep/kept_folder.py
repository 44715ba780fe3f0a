"""Keeps where a sweep writes, for the summary after its last job: jobs may run in other processes or on other machines.

conf/config.yaml names the callback, which Hydra calls in the process of the command.
"""

from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

_kept: list[Path] = []


class KeepSweepFolder(Callback):
    """Hydra's callback at the start of a sweep."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Keep the folder, which has the time of the sweep's start in its name."""
        _kept[:] = [Path(config.hydra.sweep.dir).absolute()]


def kept_sweep_folder() -> Path | None:
    """Return the folder of the sweep that this process has started since the last call; None for none."""
    return _kept.pop() if _kept else None
