"""task=export refuses, before anything is loaded, what it could not write; test_artefacts.py runs what it writes."""

from pathlib import Path

import pytest
from support.chat_folders import TINY
from support.task_runs import RunTask

EXPORT = ("task=export", f"model.checkpoint={TINY / 'llama3'}", "device=cpu")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["graph=auto", "task.output=out"], "task=export writes compiled blocks, and graph=auto; add graph=compiled"),
        (["graph=compiled"], "task=export needs task.output=..., the folder to write"),
        (["graph=compiled", "task.output=out", "graph.artefacts=out"], "graph.artefacts has no effect; leave it out"),
        (["graph=compiled", "task.output=out", "prompt=hello"], "prompt has no effect with task=export"),
        (["graph=compiled", "task.output=out", "speculation=lookup"], "no effect with task=export, which generates no"),
    ],
)
def test_settings_that_do_not_fit_are_refused(run_task: RunTask, overrides: list[str], said: str) -> None:
    assert said in str(run_task(*EXPORT, *overrides).error)


def test_a_folder_with_something_in_it_is_left_alone(run_task: RunTask, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "kept.txt").write_text("mine")
    run = run_task(*EXPORT, "graph=compiled", f"task.output={folder}")
    assert "is not empty; choose another folder, or set task.overwrite=true to write into it" in str(run.error)
    assert [path.name for path in folder.iterdir()] == ["kept.txt"]


def test_a_file_is_no_folder(run_task: RunTask, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    run = run_task(*EXPORT, "graph=compiled", f"task.output={tmp_path / 'file' / 'out'}")
    assert f"cannot be a folder, for {tmp_path / 'file'} is a file" in str(run.error)
