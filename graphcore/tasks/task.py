"""A task: a name, its own settings under `task.`, and a function that returns its part of result.json."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphcore.config.settings import Settings

if TYPE_CHECKING:
    from graphcore.tasks.report.console import Console

Record = dict[str, Any]


@dataclass(frozen=True)
class Context:
    """The input of every task: settings, console and output folder.

    Attributes:
        settings: composed and checked settings.
        console: console to print on.
        output_dir: the run's folder; None with outputs=false.
        has_chosen_model: bool, True if a model group was chosen and is not the default.
    """

    settings: Settings
    console: "Console"
    output_dir: Path | None
    has_chosen_model: bool = True


@dataclass(frozen=True)
class Task:
    """A task that a user can run.

    Attributes:
        name: name, as in task=name.
        settings: dataclass of the keys in conf/task/<name>.yaml.
        run: function that does the task and returns its part of result.json, with "status" unless that is "ok".
        check: function that refuses settings of the task, or a machine that cannot run it, before torch is imported.
        needs_torch: bool, False if the task computes nothing, or imports torch itself, beside other work.
    """

    name: str
    settings: type
    run: Callable[[Context, Any], Record]
    check: Callable[[Settings, Any], None] = lambda settings, task: None
    needs_torch: bool = True
