"""The command line: `graphcore ...` and `python run.py ...`.

    argv --quoting--> Hydra (compose, sweeps, run folder) --> Settings --> task --> result.json, exit status

Torch is imported when a task runs, not before: --help and completion are instant.
"""

import os
import sys
import traceback
from collections.abc import Sequence

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from graphcore.config.compose import VERSION_BASE, conf_dir, register_schemas
from graphcore.config.messages import one_line
from graphcore.errors import GraphcoreError
from graphcore.tasks.command_line import quoted_arguments
from graphcore.tasks.sweep import SweepJob, finish_sweep, run_child

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None, is_quoted: bool = False) -> None:
    """Run what the command line asks for and exit with its status: 0, 1 after an error, 130 after Ctrl-C.

    Args:
        arguments: of the command line; None is the process's own.
        is_quoted: text values are in Hydra's grammar already.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises what it would otherwise print over several lines
    try:
        status = _run_hydra(given if is_quoted else quoted_arguments(given))
    except (GraphcoreError, HydraException, OmegaConfBaseException) as error:
        _show(error, is_debug="debug=true" in (argument.lower() for argument in given))
        status = EXIT_FAILED
    except KeyboardInterrupt:
        print("graphcore: interrupted", file=sys.stderr)
        status = EXIT_INTERRUPTED
    sys.exit(status)


def _run_hydra(arguments: Sequence[str]) -> int:
    """Let Hydra compose and call the job, or each job of a sweep; return the exit status."""
    register_schemas()
    statuses: list[int] = []
    sweep_jobs: list[SweepJob] = []
    failures: list[GraphcoreError] = []

    def job(composed: DictConfig) -> None:
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            sweep_jobs.append(run_child(HydraConfig.get()))
            statuses.append(sweep_jobs[-1].status)
        else:
            from graphcore.tasks.job import run_job  # imports torch

            try:
                statuses.append(run_job(composed, HydraConfig.get().runtime.output_dir))
            except GraphcoreError as error:  # kept from Hydra, which would print around it
                failures.append(error)

    sys.argv = [sys.argv[0], *arguments]
    hydra.main(version_base=VERSION_BASE, config_path=str(conf_dir()), config_name="config")(job)()
    if failures:
        raise failures[0]
    if sweep_jobs:
        finish_sweep(sweep_jobs)
    return max(statuses, default=0)


def _show(error: BaseException, is_debug: bool) -> None:
    """Print an error: one line, or its traceback."""
    if is_debug:
        traceback.print_exception(error)
    text = str(error) if isinstance(error, GraphcoreError) else one_line(error)
    kind = type(error).__name__ if isinstance(error, GraphcoreError) else "ConfigError"
    print(f"graphcore: {kind}: {text}", file=sys.stderr)


if __name__ == "__main__":
    main()
