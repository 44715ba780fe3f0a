"""Running a task in this process, from overrides to result.json."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from chat_folder import save_chat_folder
from hydra import compose, initialize_config_dir

from graphcore.config.compose import VERSION_BASE, register_schemas
from graphcore.config.conf_folder import conf_dir
from graphcore.errors import GraphcoreError
from graphcore.tasks.job import run_job


@dataclass(frozen=True)
class TaskRun:
    """What one run of a task left: exit status, result.json, and the error that it raised."""

    status: int
    record: dict[str, Any]
    error: GraphcoreError | None


RunTask = Callable[..., TaskRun]


@pytest.fixture
def run_task(tmp_path: Path) -> RunTask:
    """A function from overrides to the run; eager and quiet unless they say otherwise."""

    def run(*overrides: str) -> TaskRun:
        register_schemas()
        with initialize_config_dir(str(conf_dir()), version_base=VERSION_BASE):
            composed = compose("config", ["graph=eager", "device=cpu", "progress=false", *overrides])
        status, error = 1, None
        try:
            status = run_job(composed, str(tmp_path / "run"))
        except GraphcoreError as raised:
            error = raised
        return TaskRun(status, json.loads((tmp_path / "run" / "result.json").read_text()), error)

    return run


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama 3 with a tokenizer and a chat template."""
    return save_chat_folder(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without a chat template."""
    return save_chat_folder(tmp_path_factory.mktemp("base"), template=None)
