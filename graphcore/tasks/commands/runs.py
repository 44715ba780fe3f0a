"""task=runs: list the run folders under outputs/, or delete old ones; it needs no torch.

outputs/2026-01-31/12-00-00-123456/result.json    a run that has ended
outputs/2026-01-31/12-00-00-123456/.hydra         with no result.json: it runs, or was killed; never deleted

Sweeps, other folders and links are neither listed nor deleted.
"""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from graphcore.checkpoint.sources.inventory import nbytes_of
from graphcore.config.byte_sizes import in_words
from graphcore.config.settings import ModelSettings, PublishedSettings
from graphcore.config.user_path import user_folder
from graphcore.config.validate import PROMPT_KEYS, refuse_unused_settings
from graphcore.errors import ConfigError
from graphcore.tasks.report.console import Console
from graphcore.tasks.report.result_json import FILE_NAME
from graphcore.tasks.report.text_columns import columns
from graphcore.tasks.task import Context, Record, Task

DATE, TIME = "%Y-%m-%d", "%H-%M-%S-%f"  # of the folders' names, as hydra.run.dir in conf/config.yaml has them
AGE = re.compile(r"(\d{1,4})([hdw])")
UNITS = {"h": "hours", "d": "days", "w": "weeks"}
UNFINISHED = "unfinished"  # status of a run without a result
UNKNOWN = "-"


@dataclass
class RunsSettings:
    """The keys of conf/task/runs.yaml."""

    name: str = MISSING
    folder: str = MISSING
    prune: str | None = MISSING


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run.

    Attributes:
        folder: path of the folder.
        date: local time of the start, from the folder's name.
        task, model, status: as result.json has them; "-" where it does not say.
        nbytes: bytes of its files.
    """

    folder: Path
    date: datetime
    task: str
    model: str
    status: str
    nbytes: int


def run(context: Context, task: RunsSettings) -> Record:
    """Delete old runs if asked to, and print those that are there."""
    refuse_unused_settings(context.settings, "runs", PROMPT_KEYS)
    oldest = None if task.prune is None else datetime.now() - age_of(task.prune)
    top = user_folder(task.folder, "task.folder=")
    found = sorted(runs_in(top), key=lambda one: one.date, reverse=True)
    old = [one for one in found if oldest is not None and one.date < oldest]
    removed = [one for one in old if one.status != UNFINISHED and removes(one.folder, context.console)]
    gone = {one.folder for one in removed}
    left = [one for one in found if one.folder not in gone]
    rows = []
    for one in left:
        date = f"{one.date:%Y-%m-%d %H:%M:%S}"
        rows.append((date, one.task, one.model, one.status, in_words(one.nbytes), str(one.folder)))
    for line in columns(("DATE", "TASK", "MODEL", "STATUS", "SIZE", "FOLDER"), rows) if left else ():
        context.console.line(line)
    runs = "1 run" if len(left) == 1 else f"{len(left)} runs"
    context.console.line(f"{runs} in {top}, {in_words(sum(one.nbytes for one in left))}")
    removed_nbytes = sum(one.nbytes for one in removed)
    if oldest is not None:
        kept = f"; {len(old) - len(removed)} without a result were kept" if len(old) > len(removed) else ""
        context.console.line(f"{len(removed)} removed, {in_words(removed_nbytes)}{kept}")
    return {
        "runs": [record_of(one) for one in left],
        "removed": [str(one.folder) for one in removed],
        "removed_bytes": removed_nbytes,
    }


def removes(folder: Path, console: Console) -> bool:
    """Delete a run's folder, and its day's if nothing else is there; return False, and say why, if it cannot be."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        console.note(f"{folder} cannot be removed: {error.strerror} ({error.filename})")
        return False
    with suppress(OSError):  # other runs are there
        folder.parent.rmdir()
    return True


def age_of(text: str) -> timedelta:
    """Return an age such as 30d.

    Raises:
        ConfigError: the text is none.
    """
    match = AGE.fullmatch(text)
    if match is None:
        raise ConfigError(f"task.prune={text} is no age; write hours, days or weeks, such as 12h, 30d or 8w")
    return timedelta(**{UNITS[match[2]]: int(match[1])})


def runs_in(top: Path) -> Iterator[RunFolder]:
    """Yield the runs under a folder that graphcore has made, without following links inside it."""
    for day in folders_in(top):
        for folder in folders_in(day):
            try:
                date = datetime.strptime(f"{day.name} {folder.name}", f"{DATE} {TIME}")
            except ValueError:  # another program's folder
                continue
            if f"{date:{DATE}} {date:{TIME}}" != f"{day.name} {folder.name}":  # 2026-1-2 is no name of ours
                continue
            result = folder / FILE_NAME
            has_result = result.is_file() and not result.is_symlink()
            if (folder / ".hydra").is_dir():
                record = read_result(result) if has_result else {"status": UNFINISHED}
                yield RunFolder(
                    folder,
                    date,
                    str(record.get("task") or UNKNOWN),
                    model_of(record),
                    str(record.get("status") or UNKNOWN),
                    nbytes_of(folder),
                )


def folders_in(folder: Path) -> list[Path]:
    """Return the folders in a folder that are no links; none if there is no such folder."""
    return [one for one in folder.iterdir() if one.is_dir() and not one.is_symlink()] if folder.is_dir() else []


def read_result(path: Path) -> dict[str, Any]:
    """Return a result.json; empty if it is damaged."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def model_of(record: Record) -> str:
    """Return the model's name for users, as `ModelSettings.display_name`."""
    match record:
        case {
            "settings": {
                "model": {"name": str(name), "checkpoint": str(checkpoint), "published": {"checkpoint": published}}
            }
        }:
            is_unresolved = checkpoint.startswith("${")  # in the settings of a run that failed
            model = ModelSettings(name=name, published=PublishedSettings(checkpoint=str(published)))
            return replace(model, checkpoint=str(published) if is_unresolved else checkpoint).display_name
    return UNKNOWN


def record_of(one: RunFolder) -> Record:
    """Return a run as JSON for result.json."""
    return {
        "folder": str(one.folder),
        "date": one.date.isoformat(),
        "task": one.task,
        "model": one.model,
        "status": one.status,
        "bytes": one.nbytes,
    }


RUNS = Task("runs", RunsSettings, run, needs_torch=False)
