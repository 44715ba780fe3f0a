"""Servers that run are known from their files; what a killed server or another machine has left is not one of them."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from graphcore.serving.running_servers import RunningServer, running_servers, this_server


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the files."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "runtime" / "graphcore" / "servers"


def own() -> RunningServer:
    return this_server("mine", "http://127.0.0.1:8000", 17.0)


def test_a_server_is_listed_until_it_removes_its_file(folder: Path) -> None:
    assert running_servers() == []
    loaded = replace(own(), is_loading=False, context_length=512)
    for server in (own(), loaded):
        server.write()
        assert running_servers() == [server]
    assert folder.stat().st_mode & 0o077 == 0
    loaded.remove()
    assert (running_servers(), list(folder.iterdir())) == ([], [])


def test_the_process_is_told_by_its_start_and_its_memory_is_the_system_s() -> None:
    process, server = psutil.Process(), own()
    began = psutil.boot_time() + server.start / os.sysconf("SC_CLK_TCK")
    assert (server.pid, began) == (process.pid, pytest.approx(process.create_time(), abs=2))
    assert server.memory_nbytes == pytest.approx(process.memory_info().rss, rel=0.1)


def test_what_killed_servers_left_is_removed(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    replace(own(), pid=ended.pid).write()
    replace(own(), start=own().start - 1).write()  # a process of that number from before
    (folder / "1-2.json").write_text("{", "utf-8")
    (folder / "3-4.json").write_text("[]", "utf-8")
    assert len(list(folder.iterdir())) == 4
    assert running_servers() == []
    assert sorted(file.name for file in folder.iterdir()) == ["1-2.json", "3-4.json"]


def test_servers_of_another_machine_are_neither_listed_nor_removed(folder: Path) -> None:
    replace(own(), machine="another").write()
    assert (running_servers(), len(list(folder.iterdir()))) == ([], 1)


def test_servers_with_and_without_a_runtime_folder_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    own().write()
    (file,) = (tmp_path / "state" / "graphcore" / "servers").iterdir()
    assert json.loads(file.read_text("utf-8")) == asdict(own())
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    assert running_servers() == [own()]
    running_servers()[0].remove()
    assert not file.exists()
