"""A rank other than 0 on the command line: it runs no task, writes no result, and follows rank 0 until that closes."""

import os
from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf

from graphcore.config.compose import to_settings
from graphcore.tasks.termination import PatientProcess


def follows(composed: DictConfig) -> bool:
    """Return whether this process is a rank that follows another one."""
    return OmegaConf.select(composed, "parallel.kind") == "ring" and os.environ.get("RANK", "0") != "0"


def without_folder(arguments: Sequence[str]) -> Sequence[str]:
    """Return the arguments with which Hydra makes no folder for a rank that follows; for any other process, as given.

    A folder that they name is that of all ranks, and rank 0 makes it, too.
    """
    is_rank = "parallel=ring" in arguments and os.environ.get("RANK", "0") != "0"
    names_folder = any(argument.startswith("hydra.run.dir=") for argument in arguments)
    return [*arguments, "outputs=false"] if is_rank and not names_folder else arguments


def run_follower(composed: DictConfig) -> int:
    """Follow rank 0 until it closes its engine; return the exit status.

    Ctrl-C and SIGTERM reach all ranks of a machine, through torchrun. Rank 0 decides how its answers end, and needs the
    others until then: once the model is loaded, the first signal changes nothing here, and a second one ends the rank.

    Raises:
        GraphcoreError: a setting, the checkpoint or the machine stands in the way, here or on another rank, or a rank
            was lost.
    """
    settings = to_settings(composed)
    if isinstance(settings.task, dict) and settings.task.get("name") == "plan":
        return 0  # rank 0 plans for all, and needs no other process
    process = PatientProcess()
    process.begin()
    from graphcore.engine.ring.follow import follow  # imports torch, which takes a second

    def be_patient() -> None:
        process.patience = 1

    follow(settings, on_loaded=be_patient)
    return 0
