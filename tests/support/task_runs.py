"""Running a task in this process, from overrides to result.json."""

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from omegaconf import DictConfig

from graphcore.cli.single_run import run_job
from graphcore.config.compose import VERSION_BASE, compose_config, register_schemas
from graphcore.config.conf_folder import conf_dir
from graphcore.errors import GraphcoreError

NEW = 10  # most tokens of an answer in a chat


@dataclass(frozen=True)
class TaskRun:
    """What one run of a task left: exit status, result.json, and the error that it raised."""

    status: int
    record: dict[str, Any]
    error: GraphcoreError | None


RunTask = Callable[..., TaskRun]


@cache
def composed(*overrides: str) -> DictConfig:
    """Return what conf/ and the overrides give; composing takes longer than most of these runs."""
    register_schemas()
    with initialize_config_dir(str(conf_dir()), version_base=VERSION_BASE):
        return compose_config(overrides)


def run_in(folder: Path, *overrides: str) -> TaskRun:
    """Run a task into a folder; eager and quiet unless the overrides say otherwise."""
    status, error = 1, None
    try:
        status = run_job(deepcopy(composed("graph=eager", "device=cpu", "progress=false", *overrides)), folder)
    except GraphcoreError as raised:
        error = raised
    return TaskRun(status, json.loads((folder / "result.json").read_text(encoding="utf-8")), error)
