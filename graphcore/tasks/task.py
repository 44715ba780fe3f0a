"""What a task is: a name, its own settings under `task.`, and a function that returns what goes into result.json."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphcore.config.settings import Settings
from graphcore.errors import ConfigError

if TYPE_CHECKING:
    from graphcore.tasks.console import Console

Record = dict[str, Any]
PROMPT_KEYS = ("prompt", "prompt_file", "prompt_ids", "system", "stop")  # without effect where no prompt is answered


@dataclass(frozen=True)
class Context:
    """What every task is given.

    Attributes:
        settings: composed and checked.
        console: where it prints.
        output_dir: the run's folder; None where nothing is to be left (outputs=false).
        has_chosen_model: bool, whether a model group was asked for and does not only stand as the default.
    """

    settings: Settings
    console: "Console"
    output_dir: Path | None
    has_chosen_model: bool = True


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        name: as in task=name.
        settings: dataclass of the keys in conf/task/<name>.yaml.
        run: does it; returns the task's part of result.json, with "status" when that is not "ok".
        needs_torch: bool, whether anything is computed; without that torch is not imported.
    """

    name: str
    settings: type
    run: Callable[[Context, Any], Record]
    needs_torch: bool = True


def refuse_without_effect(settings: Settings, task: str, keys: tuple[str, ...]) -> None:
    """Return if none of these keys is set; the others of a task's settings have an effect.

    Raises:
        ConfigError: one is.
    """
    given = [key for key in keys if vars(settings)[key] not in (None, [])]
    if given:
        raise ConfigError(f"{given[0]} has no effect with task={task}; leave it out")
