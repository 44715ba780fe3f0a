"""One run: compose is done; check, do the task, write result.json whatever happens.

Torch comes with the task, after the settings and the checkpoint's path were checked: what is misspelt is said at once.
"""

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from graphcore.checkpoint.sources.fetch import check_source
from graphcore.config.compose import merge_schema, to_settings
from graphcore.config.settings import Settings
from graphcore.errors import ConfigError
from graphcore.tasks.neighbours import Neighbourhood, neighbours_line
from graphcore.tasks.output import write_json
from graphcore.tasks.registry import task_named
from graphcore.tasks.result_file import FILE_NAME, failed, minimal_record
from graphcore.tasks.task import Context, Record, Task

EXIT_STATUS = {"ok": 0, "failed": 1, "interrupted": 130}


def run_job(composed: DictConfig, folder: Path | None, has_chosen_model: bool = True) -> int:
    """Do the task and write its result; return the exit status.

    Args:
        folder: of the run; None writes nothing.
        has_chosen_model: a model group was asked for.

    Raises:
        GraphcoreError: the task failed; result.json says so too.
    """
    neighbourhood = Neighbourhood.look()
    record = first_record(composed)
    try:
        settings = to_settings(composed)
        check_source(settings.model.checkpoint)
        record.update(do_task(settings, folder, has_chosen_model, record["machine"]))
    except KeyboardInterrupt:
        record.update(status="interrupted")
    except BrokenPipeError:  # whoever read the output has left
        record.update(status="interrupted")
        raise
    except BaseException as error:
        record = failed(record, f"{type(error).__name__}: {error}")
        raise
    finally:
        record["seconds"] = time.perf_counter() - neighbourhood.began
        record["neighbours"] = neighbourhood.record(record.get("threads"))
        if folder is not None:
            write_json(folder / FILE_NAME, record)
    line = neighbours_line(record["neighbours"])
    if line is not None:
        print(line, file=sys.stderr, flush=True)
    ending = {"ok": "", "failed": f"graphcore: {record['error']}", "interrupted": "graphcore: interrupted"}
    if ending[record["status"]]:
        print(ending[record["status"]], file=sys.stderr, flush=True)
    if record["status"] != "failed" and folder is not None:
        print(f"result: {folder / FILE_NAME}", file=sys.stderr, flush=True)
    return EXIT_STATUS[record["status"]]


def first_record(composed: DictConfig) -> Record:
    """Return the fields that stand before the settings are checked; they may be wrong in any way."""
    plain = OmegaConf.to_container(composed)
    assert isinstance(plain, dict), "the root config is a mapping"
    settings = {str(key): value for key, value in plain.items()}
    task = settings.get("task")
    return minimal_record(task.get("name") if isinstance(task, dict) else None, settings)


def processor_names() -> dict[str, str | None]:
    """Return what the machine's processor and its GPU are called, asking torch."""
    import torch

    from graphcore.device import cpu_name

    return {"cpu": cpu_name(), "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None}


def do_task(settings: Settings, folder: Path | None, has_chosen_model: bool, machine: Record) -> Record:
    """Do the task; return its part of the record.

    Args:
        machine: takes the processors' names.

    Raises:
        GraphcoreError: it failed.
    """
    from graphcore.tasks.console import Console  # brings rich

    console = Console(settings.progress)
    console.announce("starting")
    try:
        task, own = task_of(settings)
        if task.needs_torch:
            machine.update(processor_names())  # brings torch, which takes a second or several
        done = task.run(Context(settings, console, folder, has_chosen_model), own)
    finally:
        console.finish()
    return {"settings": asdict(settings), **done}


def task_of(settings: Settings) -> tuple[Task, Any]:
    """Return the task that the settings name, and its own settings, checked.

    Raises:
        ConfigError: there is no such task, or a key of it is wrong.
    """
    name = settings.task.get("name") if isinstance(settings.task, dict) else None
    if not isinstance(name, str):
        raise ConfigError("task has no name; choose one with task=generate")
    task = task_named(name)
    return task, merge_schema(task.settings, settings.task, f"task={name}")
