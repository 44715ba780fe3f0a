"""task=runs lists what graphcore has made, and deletes only ended runs that are old."""

import json
from pathlib import Path

import pytest
from support.task_runs import RunTask

from graphcore.errors import ConfigError

OLD, NEW = "2020-01-31/12-00-00-000001", "2999-01-31/12-00-00-000001"
CHECKPOINT = {"name": "mine", "checkpoint": "/a/b.gguf", "published": {"checkpoint": "hf:a/b"}}

UNRESOLVED = {**CHECKPOINT, "checkpoint": "${.published.checkpoint}"}


def write(folder: Path, **fields: object) -> Path:
    (folder / ".hydra").mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(fields), "utf-8")
    return folder


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    top = tmp_path / "outputs"
    write(top / OLD, task="chat", status="ok", settings={"model": CHECKPOINT})
    write(top / NEW, task="bench", status="failed", settings={"model": UNRESOLVED})
    (top / "2020-01-31/13-00-00-000001/.hydra").mkdir(parents=True)  # it may still run
    (top / "2020-01-31/14-00-00-000001").mkdir()  # not known to be graphcore's
    (top / "2020-01-31/15-00-00-000001").symlink_to(write(tmp_path / "elsewhere", task="chat"))
    (top / "2020-02-01").symlink_to(write(tmp_path / "days/12-00-00-000001", task="chat").parent)
    write(top / "mine/12-00-00-000001", task="chat")
    write(top / "2020-1-3/12-0-0-1", task="chat")  # no name that graphcore gives
    other = top / "2020-01-31/16-00-00-000001"  # without .hydra
    other.mkdir()
    (other / "result.json").write_text("{}", "utf-8")
    return top


def test_runs_are_listed_newest_first(run_task: RunTask, outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_task("task=runs", f"task.folder={outputs}")
    assert [(one["task"], one["model"], one["status"]) for one in run.record["runs"]] == [
        ("bench", "mine", "failed"),
        ("-", "-", "unfinished"),
        ("chat", "b.gguf", "ok"),
    ]
    sizes = [sum(file.stat().st_size for file in (outputs / name).glob("*.json")) for name in (NEW, OLD)]
    assert [run.record["runs"][at]["bytes"] for at in (0, 2)] == sizes
    out = capsys.readouterr().out.splitlines()
    assert out[1].split() == [
        "2999-01-31",
        "12:00:00",
        "bench",
        "mine",
        "failed",
        str(sizes[0]),
        "bytes",
        str(outputs / NEW),
    ]
    assert out[4].startswith(f"3 runs in {outputs}, ")


def test_only_old_runs_that_have_ended_are_deleted_and_no_link_is_followed(run_task: RunTask, outputs: Path) -> None:
    before = set(outputs.parent.rglob("*"))
    run = run_task("task=runs", f"task.folder={outputs}", "task.prune=30d")
    gone = before - set(outputs.parent.rglob("*"))
    assert gone == {outputs / OLD, outputs / OLD / ".hydra", outputs / OLD / "result.json"}
    assert (run.record["removed"], len(run.record["runs"])) == ([str(outputs / OLD)], 2)


def test_a_folder_without_runs_and_an_age_that_is_none_are_said(run_task: RunTask, tmp_path: Path) -> None:
    assert run_task("task=runs", f"task.folder={tmp_path / 'none'}").record["runs"] == []
    for age in ("30", "d", "-1d", "1y", "99999w"):
        run = run_task("task=runs", f"task.folder={tmp_path}", f"task.prune={age}")
        assert isinstance(run.error, ConfigError), age
