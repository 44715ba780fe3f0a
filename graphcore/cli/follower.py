"""A rank other than 0 on the command line: it runs no task, writes no result, and follows rank 0 until that closes."""

from omegaconf import DictConfig

from graphcore.config.compose import to_settings
from graphcore.tasks.termination import PatientProcess


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
