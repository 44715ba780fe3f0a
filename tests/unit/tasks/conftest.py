"""Fixtures for the tests of tasks."""

from functools import partial
from pathlib import Path

import pytest
from chat_folder import save_chat_folder
from task_runs import RunTask, run_in


@pytest.fixture
def run_task(tmp_path: Path) -> RunTask:
    """A function from overrides to the run of a task, in this process."""
    return partial(run_in, tmp_path / "run")


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama 3 with a tokenizer and a chat template."""
    return save_chat_folder(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without a chat template."""
    return save_chat_folder(tmp_path_factory.mktemp("base"), template=None)
