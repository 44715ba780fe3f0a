"""One run: compose is done; check, do the task, write result.json whatever happens."""

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from graphcore.config.compose import merge_schema, to_settings
from graphcore.config.settings import Settings
from graphcore.device import cpu_name
from graphcore.errors import ConfigError
from graphcore.registry import lookup
from graphcore.tasks.console import Console
from graphcore.tasks.output import write_json
from graphcore.tasks.registry import TASKS
from graphcore.tasks.result_file import FILE_NAME, failed, minimal_record
from graphcore.tasks.task import Context, Record, Task

EXIT_STATUS = {"ok": 0, "failed": 1, "interrupted": 130}


def run_job(composed: DictConfig, output_dir: str) -> int:
    """Do the task and write its result; return the exit status.

    Raises:
        GraphcoreError: the task failed; result.json says so too.
    """
    began = time.perf_counter()
    record = first_record(composed)
    folder = Path(output_dir)
    try:
        record.update(do_task(composed, folder))
    except KeyboardInterrupt:
        record.update(status="interrupted")
    except BaseException as error:
        record = failed(record, f"{type(error).__name__}: {error}")
        raise
    finally:
        record["seconds"] = time.perf_counter() - began
        write_json(folder / FILE_NAME, record)
    ending = {"ok": "", "failed": f"graphcore: {record['error']}", "interrupted": "graphcore: interrupted"}
    if ending[record["status"]]:
        print(ending[record["status"]], file=sys.stderr, flush=True)
    if record["status"] != "failed":
        print(f"result: {folder / FILE_NAME}", file=sys.stderr, flush=True)
    return EXIT_STATUS[record["status"]]


def first_record(composed: DictConfig) -> Record:
    """Return the fields that stand before the settings are checked; they may be wrong in any way."""
    plain = OmegaConf.to_container(composed)
    assert isinstance(plain, dict), "the root config is a mapping"
    settings = {str(key): value for key, value in plain.items()}
    task = settings.get("task")
    record = minimal_record(task.get("name") if isinstance(task, dict) else None, settings)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    record["machine"].update(cpu=cpu_name(), gpu=gpu)
    return record


def do_task(composed: DictConfig, folder: Path) -> Record:
    """Check the settings and do the task; return its part of the record.

    Raises:
        GraphcoreError: it failed.
    """
    settings = to_settings(composed)
    task, own = task_of(settings)
    console = Console(settings.progress)
    try:
        done = task.run(Context(settings, console, folder), own)
    finally:
        console.end_progress()
    return {"settings": asdict(settings), **done}


def task_of(settings: Settings) -> tuple[Task, Any]:
    """Return the task that the settings name, and its own settings, checked.

    Raises:
        ConfigError: there is no such task, or a key of it is wrong.
    """
    name = settings.task.get("name") if isinstance(settings.task, dict) else None
    if not isinstance(name, str):
        raise ConfigError("task has no name; choose one with task=generate")
    task = lookup("task", name, TASKS)
    return task, merge_schema(task.settings, settings.task, f"task={name}")
