"""One run with composed settings: check them, do the task, and write result.json, also after an error.

Torch is imported with the task, after the settings and the checkpoint's path were checked, so that a misspelling is
reported at once.
"""

import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from graphcore.checkpoint.sources.fetch import check_source
from graphcore.config.compose import merge_schema, to_settings
from graphcore.config.settings import Settings
from graphcore.errors import ConfigError
from graphcore.processors import load_torch, uncollected_imports
from graphcore.tasks.registry import task_named
from graphcore.tasks.report.output_files import write_json
from graphcore.tasks.report.result_json import FILE_NAME, ProcessorWait, failed, minimal_record, neighbours_line
from graphcore.tasks.report.secret_keys import hide_secrets, without_secrets
from graphcore.tasks.requests.presets import system_text
from graphcore.tasks.task import Context, Record, Task
from graphcore.tasks.termination import undisturbed

EXIT_STATUS = {"ok": 0, "failed": 1, "interrupted": 130}


def run_job(composed: DictConfig, folder: Path | None, has_chosen_model: bool = True) -> int:
    """Do the task and write its result; return the exit status.

    Args:
        folder: folder of the run; None writes nothing.
        has_chosen_model: True if a model group was chosen and is not the default.

    Raises:
        GraphcoreError: the task failed; result.json has the error, too.
    """
    waits = ProcessorWait.look()
    record = first_record(composed)
    if folder is not None:
        hide_secrets(folder, plain_settings(composed))
    try:
        settings = to_settings(composed)
        if settings.system is not None:
            settings = replace(settings, system=system_text(settings.system, "system="))
        check_source(settings.model.checkpoint)
        from graphcore.tasks.report.console import Console  # imports rich; errors in settings are reported without it

        with Console(settings.progress) as console:
            console.announce("starting")
            with uncollected_imports():
                task, own = task_of(settings)
                task.check(settings, own)
                if task.needs_torch:
                    load_torch()
            done = task.run(Context(settings, console, folder, has_chosen_model), own)
        record.update(settings=without_secrets(asdict(settings)), **done)
    except KeyboardInterrupt:
        record.update(status="interrupted")
    except BrokenPipeError:  # the reader of the output has left
        record.update(status="interrupted")
        raise
    except BaseException as error:
        record = failed(record, f"{type(error).__name__}: {error}")
        raise
    finally:
        with undisturbed():
            record["seconds"] = time.perf_counter() - waits.began
            if "torch" in sys.modules:
                record["machine"].update(processor_names())
            record["neighbours"] = waits.record(record.get("threads"))
            if folder is not None:
                write_json(folder / FILE_NAME, record)
    say_ending(record, folder)
    return EXIT_STATUS[record["status"]]


def say_ending(record: Record, folder: Path | None) -> None:
    """Print what the run lost to other processes, how it ended, and where its result is."""
    line = neighbours_line(record["neighbours"])
    if line is not None:
        print(line, file=sys.stderr, flush=True)
    ending = {"ok": "", "failed": f"graphcore: {record['error']}", "interrupted": "graphcore: interrupted"}
    if ending[record["status"]]:
        print(ending[record["status"]], file=sys.stderr, flush=True)
    if record["status"] != "failed" and folder is not None:
        print(f"result: {folder / FILE_NAME}", file=sys.stderr, flush=True)


def first_record(composed: DictConfig) -> Record:
    """Return the result's first fields, from settings that are not checked yet and may be wrong."""
    settings = without_secrets(plain_settings(composed))
    task = settings.get("task")
    return minimal_record(task.get("name") if isinstance(task, dict) else None, settings)


def plain_settings(composed: DictConfig) -> dict[str, Any]:
    """Return composed settings as plain data."""
    plain = OmegaConf.to_container(composed)
    assert isinstance(plain, dict), "the root config is a mapping"
    return {str(key): value for key, value in plain.items()}


def processor_names() -> dict[str, str | None]:
    """Return the names of the machine's processor and GPU; the GPU's comes from torch."""
    import torch

    from graphcore.device import cpu_name

    return {"cpu": cpu_name(), "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None}


def task_of(settings: Settings) -> tuple[Task, Any]:
    """Return the task that the settings name, and its own checked settings.

    Raises:
        ConfigError: there is no such task, or one of its keys is wrong.
    """
    name = settings.task.get("name") if isinstance(settings.task, dict) else None
    if not isinstance(name, str):
        raise ConfigError("task has no name; choose one with task=generate")
    task = task_named(name)
    return task, merge_schema(task.settings, settings.task, f"task={name}")
