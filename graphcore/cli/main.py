"""The command line: `graphcore ...` and `python run.py ...`.

    argv --quoting--> Hydra (compose, sweeps, run folder) --> Settings --> task --> result.json, exit status

Torch is imported only when a task runs, and rich only when something is printed with it, so that --help, mistakes and
completion answer at once.
"""

import io
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
from hydra import initialize_config_dir
from hydra.conf import HydraConf
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from graphcore import __version__
from graphcore.cli.help_text import help_text
from graphcore.cli.quoting import (
    HELP_FLAGS,
    MODES,
    VERSION_FLAG,
    has_flags,
    is_plain,
    is_sweep,
    prepared_arguments,
    split_flags,
)
from graphcore.cli.sweep.kept_folder import kept_sweep
from graphcore.cli.user_settings import with_user_settings
from graphcore.config.compose import VERSION_BASE, check_sweep, follows, refuse_deletions, register_schemas
from graphcore.config.conf_folder import check_groups, conf_dir
from graphcore.config.hydra_errors import config_error
from graphcore.errors import ConfigError, GraphcoreError
from graphcore.processors import bound_spinning
from graphcore.tasks.report.output_files import OutputError, ResultStream
from graphcore.tasks.termination import ended_by_signals, undisturbed

EXIT_FAILED = 1
EXIT_UNKNOWN = 2
EXIT_INTERRUPTED = 130
OWN_FOLDERS = ("--config-dir", "-cd", "--config-path", "-cp", "hydra.searchpath")  # options that name a folder
CHOOSE_MODEL = ("model=", "experiment=")
DEBUG = ("debug=true", "debug=on", "debug=yes", "debug=1")
NO_OUTPUTS = ("outputs=false", "outputs=off", "outputs=no", "outputs=0")


def main(arguments: Sequence[str] | None = None, is_quoted: bool = False, keeps_results: bool = True) -> None:
    """Run what the command line asks for and exit with its status.

    The status is 0 after success, or if the reader of the output has left; 2 after an unknown flag, key or option or a
    value of the wrong type; 1 after any other error; 130 after Ctrl-C; 143 after SIGTERM and 129 after SIGHUP.

    Args:
        arguments: arguments of the command line; None is the process's own.
        is_quoted: True if text values are already quoted in Hydra's grammar.
        keeps_results: False to write no folder for a task that prints its result, unless outputs=true asks for one.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    _prepare_streams()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises errors instead of printing them over several lines
    is_debug = any(argument.lower() in DEBUG for argument in given)
    with ended_by_signals() as termination:
        try:
            status = compose_and_run(given, is_quoted, keeps_results)
            sys.stdout.flush()  # fails here, not at interpreter exit, if the reader has left
        except BrokenPipeError:
            status = 0
        except (GraphcoreError, HydraException, OmegaConfBaseException) as error:
            status = _show(error, is_debug)
        except KeyboardInterrupt:
            print("graphcore: interrupted", file=sys.stderr)
            status = EXIT_INTERRUPTED
        _drop_output()
    sys.exit(termination.status(otherwise=status))


def _prepare_streams() -> None:
    """Make standard streams accept every text that a task prints and raise errors that name them.

    A stream that was closed, as by >&-, is None in Python, and the next opened file would get its number; the null
    device takes its place.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # invalid UTF-8 is reported with its line
    if type(sys.stdout) is io.TextIOWrapper:  # a stream that a caller has put there stays
        out = sys.stdout
        sys.stdout = ResultStream(
            out.buffer,
            out.encoding,
            "backslashreplace",  # a character that the terminal's encoding lacks is escaped
            line_buffering=out.line_buffering,
            write_through=out.write_through,
        )
    for name, mode in {"stdin": "r", "stdout": "w", "stderr": "w"}.items():
        if vars(sys)[name] is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - open until the process ends


def _drop_output() -> None:
    """Flush both output streams; redirect one that fails to the null device, or the flush at exit would raise again."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def compose_and_run(arguments: Sequence[str], is_quoted: bool, keeps_results: bool) -> int:
    """Answer --help and --version, or let Hydra compose the settings and run each job; return the exit status."""
    if not is_quoted:
        if arguments[:1] == ["help"]:
            arguments = ["--help", *arguments[1:]]
        if any(flag in arguments for flag in HELP_FLAGS):
            print(help_text(split_flags(arguments)[1]))
            return 0
        arguments = prepared_arguments(arguments)
        if VERSION_FLAG in arguments:
            print(f"graphcore {__version__}")
            return 0
        arguments = with_user_settings(arguments, keeps_results)
    _check_arguments(arguments)
    jobs = Jobs()
    try:
        if is_plain(arguments):  # `hydra.main` would compose twice, to find out that this is no sweep
            with initialize_config_dir(str(conf_dir()), job_name="main", version_base=VERSION_BASE):
                application = GlobalHydra.instance().hydra
                assert application is not None, "it was initialised in the line before"
                application.run(config_name="config", task_function=jobs.run, overrides=list(arguments))
        else:
            sys.argv = [sys.argv[0], *arguments]
            hydra.main(version_base=VERSION_BASE, config_path=str(conf_dir()), config_name="config")(jobs.run)()
    except (GraphcoreError, HydraException, BrokenPipeError):  # some of them are also OSErrors or ValueErrors
        raise
    except ValueError as error:  # Hydra's error for flags that cannot be combined
        if not has_flags(arguments):
            raise
        raise ConfigError(str(error), is_unknown=True) from error
    except OSError as error:
        raise _unwritable(error, arguments) from error
    finally:
        jobs.finish()
    if jobs.failures:
        raise jobs.failures[0]
    return max(jobs.statuses, default=0)


def _check_arguments(arguments: Sequence[str]) -> None:
    """Refuse arguments that are wrong in any composition, and register the types of settings with Hydra."""
    _check_working_directory()
    refuse_deletions(arguments)
    _refuse_completion_of_nothing(arguments)
    if not any(argument.startswith(OWN_FOLDERS) for argument in arguments):
        check_groups(arguments)
    register_schemas()
    _refuse_folder_without_outputs(arguments)
    if is_sweep(arguments):
        check_sweep(arguments[1:])


def _check_working_directory() -> None:
    """Refuse a working directory that has been removed: neither Hydra nor torch starts in one."""
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise ConfigError("the working directory does not exist; change to another") from error


@dataclass
class Jobs:
    """The job function that Hydra calls, once for a run and once for each job of a sweep, with its results.

    Attributes:
        statuses: exit statuses, in order.
        failures: errors of a single run, kept from Hydra, which would print more lines around them.
    """

    statuses: list[int] = field(default_factory=list)
    failures: list[GraphcoreError | OSError] = field(default_factory=list)

    def run(self, composed: DictConfig) -> None:
        """Run a single job, or a sweep's job in a process of its own."""
        hydra_config = HydraConfig.get()
        if hydra_config.mode == RunMode.MULTIRUN:
            self._run_child(composed, hydra_config)
            return
        from graphcore.cli.single_run import run_job

        try:
            if follows(composed):
                from graphcore.cli.follower import run_follower

                self.statuses.append(run_follower(composed))
                return
            folder = Path(hydra_config.runtime.output_dir) if composed.outputs else None
            chosen = any(one.lstrip("+").startswith(CHOOSE_MODEL) for one in hydra_config.overrides.task)
            self.statuses.append(run_job(composed, folder, chosen))
        except (GraphcoreError, OSError) as error:
            self.failures.append(error)

    def _run_child(self, composed: DictConfig, hydra_config: HydraConf) -> None:
        if not composed.outputs:  # set in an experiment's file
            raise ConfigError("outputs=false has no effect with hydra.mode=MULTIRUN; leave it out")
        if composed.parallel.kind == "ring":
            raise ConfigError("parallel=ring runs one job for all ranks; start each job of a sweep with torchrun")
        from graphcore.cli.sweep.child_processes import run_child

        run_child(hydra_config)

    def finish(self) -> None:
        """Write the summary if this was a sweep."""
        sweep = kept_sweep()
        if sweep is not None:
            from graphcore.cli.sweep.child_processes import finish_sweep

            with undisturbed():
                self.statuses.append(finish_sweep(sweep))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Prepare a process that a launcher of Hydra has started for jobs."""
        vars(self).update(state)
        register_schemas()


def _refuse_completion_of_nothing(arguments: Sequence[str]) -> None:
    """Refuse a completion query without the shell's command line in COMP_LINE."""
    asks = any(flag in arguments for flag in MODES["completion"]) and any(one.startswith("query=") for one in arguments)
    if asks and "COMP_LINE" not in os.environ:
        raise ConfigError(
            "-sc query=... is what a shell calls to complete a line, which it gives in COMP_LINE; "
            'eval "$(graphcore -sc install=bash)" makes the shell do so',
            is_unknown=True,
        )


def _refuse_folder_without_outputs(arguments: Sequence[str]) -> None:
    """Refuse outputs=false together with arguments that make Hydra create a folder before settings are read."""
    folders = (argument for argument in arguments if argument.startswith(("hydra.run.dir=", "hydra.mode=")))
    folder = next(folders, None)
    if folder is not None and any(argument.lower() in NO_OUTPUTS for argument in arguments):
        raise ConfigError(f"{folder} has no effect with outputs=false, which makes no folder; leave one of them out")


def _unwritable(error: OSError, arguments: Sequence[str]) -> OutputError:
    """Return an error that names the run's folder, because an error of writing into an open file does not."""
    given = [argument.partition("=")[2] for argument in arguments if argument.startswith("hydra.run.dir=")]
    place = error.filename or (given[-1] if given else str(Path.cwd() / "outputs"))
    return OutputError(
        f"{place} cannot be written ({error.strerror}); choose another folder with hydra.run.dir=..., or none with "
        "outputs=false"
    )


def _show(error: GraphcoreError | HydraException | OmegaConfBaseException, is_debug: bool) -> int:
    """Print an error as one line, with its traceback before it if `is_debug`; return the exit status."""
    if is_debug:
        traceback.print_exception(error)
    said = error if isinstance(error, GraphcoreError) else config_error(error)
    print(f"graphcore: {type(said).__name__}: {' '.join(str(said).split())}", file=sys.stderr)
    return EXIT_UNKNOWN if isinstance(said, ConfigError) and said.is_unknown else EXIT_FAILED


if __name__ == "__main__":
    bound_spinning()
    main()
