"""The command line: `graphcore ...` and `python run.py ...`.

    argv --quoting--> Hydra (compose, sweeps, run folder) --> Settings --> task --> result.json, exit status

Torch is imported when a task runs, not before: --help and completion are instant.
"""

import io
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

from graphcore.config.compose import VERSION_BASE, check_sweep, register_schemas
from graphcore.config.conf_folder import check_groups, conf_dir
from graphcore.config.messages import one_line
from graphcore.errors import GraphcoreError
from graphcore.tasks.command_line import is_sweep, prepared_arguments
from graphcore.tasks.output import OutputError
from graphcore.tasks.sweep import Sweep

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
OWN_FOLDERS = ("--config-dir", "-cd", "--config-path", "-cp", "hydra.searchpath")  # with options of the user's own
DEBUG = ("debug=true", "debug=on", "debug=yes", "debug=1")


def main(arguments: Sequence[str] | None = None, is_quoted: bool = False) -> None:
    """Run what the command line asks for and exit with its status: 0, 1 after an error, 130 after Ctrl-C.

    Args:
        arguments: of the command line; None is the process's own.
        is_quoted: text values are in Hydra's grammar already.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises what it would otherwise print over several lines
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that lacks a character gets its escape
    try:
        prepared = given if is_quoted else prepared_arguments(given)
        status = _run_hydra(prepared)
    except BrokenPipeError:  # whoever read the output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = EXIT_FAILED
    except (GraphcoreError, HydraException, OmegaConfBaseException) as error:
        _show(error, is_debug=any(argument.lower() in DEBUG for argument in given))
        status = EXIT_FAILED
    except KeyboardInterrupt:
        print("graphcore: interrupted", file=sys.stderr)
        status = EXIT_INTERRUPTED
    sys.exit(status)


def _run_hydra(arguments: Sequence[str]) -> int:
    """Let Hydra compose and call the job, or each job of a sweep; return the exit status."""
    if not any(argument.startswith(OWN_FOLDERS) for argument in arguments):
        check_groups(arguments)
    register_schemas()
    if is_sweep(arguments):
        check_sweep(arguments[1:])
    statuses: list[int] = []
    failures: list[GraphcoreError | OSError] = []
    sweep = Sweep()

    def job(composed: DictConfig) -> None:
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            sweep.run_child(HydraConfig.get())
            return
        from graphcore.tasks.job import run_job  # imports torch

        try:
            statuses.append(run_job(composed, HydraConfig.get().runtime.output_dir))
        except (GraphcoreError, OSError) as error:  # kept from Hydra, which would print around it
            failures.append(error)

    sys.argv = [sys.argv[0], *arguments]
    try:
        hydra.main(version_base=VERSION_BASE, config_path=str(conf_dir()), config_name="config")(job)()
    except HydraException:  # some are OSErrors too
        raise
    except OSError as error:
        raise OutputError(
            f"{error.filename} cannot be written ({error.strerror}); choose another folder with hydra.run.dir=..."
        ) from error
    finally:
        if sweep.jobs:
            statuses.append(sweep.finish())
    if failures:
        raise failures[0]
    return max(statuses, default=0)


def _show(error: BaseException, is_debug: bool) -> None:
    """Print an error: one line, or its traceback and that line."""
    if is_debug:
        traceback.print_exception(error)
    text = str(error) if isinstance(error, GraphcoreError) else one_line(error)
    kind = type(error).__name__ if isinstance(error, GraphcoreError) else "ConfigError"
    print(f"graphcore: {kind}: {' '.join(text.split())}", file=sys.stderr)


if __name__ == "__main__":
    main()
