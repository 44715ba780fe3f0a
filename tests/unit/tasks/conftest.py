"""Fixtures for the tests of tasks."""

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from support.chat_folders import save_chat_folder
from support.task_runs import NEW, RunTask, TaskRun, run_in


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


@pytest.fixture
def say(run_task: RunTask, chat_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TaskRun]:
    """A function from a chat's piped lines and overrides to the run."""

    def run(lines: str, *overrides: str, checkpoint: Path = chat_folder) -> TaskRun:
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        return run_task("task=chat", f"model.checkpoint={checkpoint}", f"max_new_tokens={NEW}", *overrides)

    return run
