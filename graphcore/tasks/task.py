"""What a task is: a name, its own settings under `task.`, and a function that returns what goes into result.json."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphcore.config.settings import Settings
from graphcore.tasks.console import Console

Record = dict[str, Any]


@dataclass(frozen=True)
class Context:
    """What every task is given.

    Attributes:
        settings: composed and checked.
        console: where it prints.
        output_dir: the run's folder.
    """

    settings: Settings
    console: Console
    output_dir: Path


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        name: as in task=name.
        settings: dataclass of the keys in conf/task/<name>.yaml.
        run: does it; returns the task's part of result.json, with "status" when that is not "ok".
    """

    name: str
    settings: type
    run: Callable[[Context, Any], Record]
