"""One run: compose is done; check, do the task, write result.json."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from graphcore.config.compose import merge_schema, to_settings
from graphcore.config.settings import Settings
from graphcore.errors import ConfigError, GraphcoreError
from graphcore.registry import lookup
from graphcore.tasks.console import Console
from graphcore.tasks.registry import TASKS
from graphcore.tasks.result import FILE_NAME, base_record, write_json
from graphcore.tasks.task import Context, Record, Task

EXIT_OK, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 130


def run_job(composed: DictConfig, output_dir: str) -> int:
    """Do the task and write its result; return the exit status.

    Raises:
        GraphcoreError: the task failed; result.json says so too.
    """
    settings = to_settings(composed)
    task, own = task_of(settings)
    record = base_record(settings, task.name)
    path = Path(output_dir) / FILE_NAME
    console = Console(settings.progress)
    try:
        record.update(task.run(Context(settings, console, Path(output_dir)), own))
    except GraphcoreError as error:
        write_json(path, failed(record, error))
        raise
    finally:
        console.end_progress()
    write_json(path, record)
    console.note(f"result: {path}")
    return EXIT_INTERRUPTED if record["status"] == "interrupted" else EXIT_OK


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


def failed(record: Record, error: BaseException) -> Record:
    """Return the record as that of a failed run."""
    return {**record, "status": "failed", "error": f"{type(error).__name__}: {error}"}
