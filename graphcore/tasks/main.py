"""The command line: `graphcore ...` and `python run.py ...`.

    argv --quoting--> Hydra (compose, sweeps, run folder) --> Settings --> task --> result.json, exit status

Torch is imported when a task runs, and what a task or a sweep prints with when there is one, not before: --help, a
mistake and completion are instant.
"""

import io
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra import initialize_config_dir
from hydra.conf import HydraConf
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode, TaskFunction
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from graphcore import __version__
from graphcore.config.compose import VERSION_BASE, check_sweep, register_schemas
from graphcore.config.conf_folder import check_groups, conf_dir
from graphcore.config.messages import config_error
from graphcore.errors import ConfigError, GraphcoreError
from graphcore.tasks.command_line import (
    HELP_FLAGS,
    VERSION_FLAG,
    has_flags,
    is_plain,
    is_sweep,
    prepared_arguments,
    split_flags,
)
from graphcore.tasks.help_text import help_text
from graphcore.tasks.output import OutputError, ResultStream

if TYPE_CHECKING:
    from graphcore.tasks.sweep import Sweep

EXIT_FAILED = 1
EXIT_UNKNOWN = 2
EXIT_INTERRUPTED = 130
OWN_FOLDERS = ("--config-dir", "-cd", "--config-path", "-cp", "hydra.searchpath")  # with options of the user's own
CHOOSE_MODEL = ("model=", "experiment=")
DEBUG = ("debug=true", "debug=on", "debug=yes", "debug=1")
NO_OUTPUTS = ("outputs=false", "outputs=off", "outputs=no", "outputs=0")


def main(arguments: Sequence[str] | None = None, is_quoted: bool = False) -> None:
    """Run what the command line asks for and exit with its status.

    It is 0 when that is done, or when whoever read the output has left; 2 after an unknown flag, key or option or a
    value of the wrong type; 1 after any other error; 130 after Ctrl-C.

    Args:
        arguments: of the command line; None is the process's own.
        is_quoted: text values are in Hydra's grammar already.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    _prepare_streams()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises what it would otherwise print over several lines
    is_debug = any(argument.lower() in DEBUG for argument in given)
    try:
        status = _run(given, is_quoted)
        sys.stdout.flush()  # a reader that has left is noticed here, not when the interpreter ends
    except BrokenPipeError:
        status = 0
    except (GraphcoreError, HydraException, OmegaConfBaseException) as error:
        status = _show(error, is_debug)
    except KeyboardInterrupt:
        print("graphcore: interrupted", file=sys.stderr)
        status = EXIT_INTERRUPTED
    _drop_output()
    sys.exit(status)


def _prepare_streams() -> None:
    """Have standard streams take what tasks give them, and errors of theirs be said by name.

    In the place of one that was closed, as by >&-, Python has None; the next file to be opened would get its number.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # what is no text is said of the line that has it
    if type(sys.stdout) is io.TextIOWrapper:  # what somebody else has put there is theirs
        out = sys.stdout
        sys.stdout = ResultStream(
            out.buffer,
            out.encoding,
            "backslashreplace",  # a terminal that lacks a character gets its escape
            line_buffering=out.line_buffering,
            write_through=out.write_through,
        )
    for name, mode in {"stdin": "r", "stdout": "w", "stderr": "w"}.items():
        if vars(sys)[name] is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - until the process ends


def _run(given: Sequence[str], is_quoted: bool) -> int:
    """Answer --help and --version, or have Hydra run the rest; return the exit status."""
    if is_quoted:
        return _run_hydra(given)
    if any(flag in given for flag in HELP_FLAGS):
        print(help_text(split_flags(given)[1]))
        return 0
    prepared = prepared_arguments(given)
    if VERSION_FLAG in prepared:
        print(f"graphcore {__version__}")
        return 0
    return _run_hydra(prepared)


def _drop_output() -> None:
    """Let nothing more reach what takes nothing more: what is still buffered would raise again at the end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _run_hydra(arguments: Sequence[str]) -> int:
    """Let Hydra compose and call the job, or each job of a sweep; return the exit status."""
    if not any(argument.startswith(OWN_FOLDERS) for argument in arguments):
        check_groups(arguments)
    register_schemas()
    _refuse_folder_without_outputs(arguments)
    if is_sweep(arguments):
        check_sweep(arguments[1:])
    jobs = Jobs()
    try:
        if is_plain(arguments):
            _run_plain(jobs.run, arguments)
        else:
            sys.argv = [sys.argv[0], *arguments]
            hydra.main(version_base=VERSION_BASE, config_path=str(conf_dir()), config_name="config")(jobs.run)()
    except (GraphcoreError, HydraException, BrokenPipeError):  # some are OSErrors or ValueErrors too
        raise
    except ValueError as error:  # Hydra's word for flags that do not go together
        if not has_flags(arguments):
            raise
        raise ConfigError(str(error), is_unknown=True) from error
    except OSError as error:
        place = error.filename or _run_folder(arguments)
        raise OutputError(
            f"{place} cannot be written ({error.strerror}); choose another folder with hydra.run.dir=..., or none with "
            "outputs=false"
        ) from error
    finally:
        jobs.finish()
    if jobs.failures:
        raise jobs.failures[0]
    return max(jobs.statuses, default=0)


@dataclass
class Jobs:
    """What Hydra calls once for a run and once for each job of a sweep, and what came of it.

    Attributes:
        statuses: exit statuses.
        failures: errors of a single run, kept from Hydra, which would print around them.
    """

    statuses: list[int] = field(default_factory=list)
    failures: list[GraphcoreError | OSError] = field(default_factory=list)
    sweep: "Sweep | None" = None

    def run(self, composed: DictConfig) -> None:
        """Do a run, or a sweep's job in a process of its own."""
        hydra_config = HydraConfig.get()
        if hydra_config.mode == RunMode.MULTIRUN:
            self._run_child(composed, hydra_config)
            return
        from graphcore.tasks.job import run_job

        try:
            folder = Path(hydra_config.runtime.output_dir) if composed.outputs else None
            chosen = any(one.lstrip("+").startswith(CHOOSE_MODEL) for one in hydra_config.overrides.task)
            self.statuses.append(run_job(composed, folder, chosen))
        except (GraphcoreError, OSError) as error:
            self.failures.append(error)

    def _run_child(self, composed: DictConfig, hydra_config: HydraConf) -> None:
        if not composed.outputs:  # an experiment's file has chosen the mode
            raise ConfigError("outputs=false has no effect with hydra.mode=MULTIRUN; leave it out")
        from graphcore.tasks.sweep import Sweep

        self.sweep = self.sweep or Sweep()
        self.sweep.run_child(hydra_config)

    def finish(self) -> None:
        """Write a sweep's summary."""
        if self.sweep is not None:
            self.statuses.append(self.sweep.finish())


def _refuse_folder_without_outputs(arguments: Sequence[str]) -> None:
    """Refuse outputs=false beside what has Hydra make a folder before anyone could ask."""
    folders = (argument for argument in arguments if argument.startswith(("hydra.run.dir=", "hydra.mode=")))
    folder = next(folders, None)
    if folder is not None and any(argument.lower() in NO_OUTPUTS for argument in arguments):
        raise ConfigError(f"{folder} has no effect with outputs=false, which makes no folder; leave one of them out")


def _run_folder(arguments: Sequence[str]) -> str:
    """Return where Hydra keeps what it writes of a run; a write into an open file that fails does not name it."""
    given = [argument.partition("=")[2] for argument in arguments if argument.startswith("hydra.run.dir=")]
    return given[-1] if given else str(Path.cwd() / "outputs")


def _run_plain(job: TaskFunction, overrides: Sequence[str]) -> None:
    """Do what `hydra.main` does for a single run, composing once: it composes first to learn that this is no sweep."""
    with initialize_config_dir(str(conf_dir()), job_name="main", version_base=VERSION_BASE):
        application = GlobalHydra.instance().hydra
        assert application is not None, "it was initialised in the line before"
        application.run(config_name="config", task_function=job, overrides=list(overrides))


def _show(error: GraphcoreError | HydraException | OmegaConfBaseException, is_debug: bool) -> int:
    """Print an error, one line or its traceback and that line; return the exit status."""
    if is_debug:
        traceback.print_exception(error)
    said = error if isinstance(error, GraphcoreError) else config_error(error)
    print(f"graphcore: {type(said).__name__}: {' '.join(str(said).split())}", file=sys.stderr)
    return EXIT_UNKNOWN if isinstance(said, ConfigError) and said.is_unknown else EXIT_FAILED


if __name__ == "__main__":
    main()
