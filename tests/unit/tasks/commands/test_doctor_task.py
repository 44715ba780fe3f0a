"""task=doctor: facts of this machine, each with a cure where something is missing."""

from pathlib import Path

import pytest
import torch
from support.task_runs import RunTask

from graphcore.kernels.backend import TorchBackend
from graphcore.tasks.commands import doctor


def test_a_machine_is_described_and_nothing_is_missing(run_task: RunTask, capsys: pytest.CaptureFixture[str]) -> None:
    found = {one["subject"]: one for one in run_task("task=doctor").record["findings"]}
    assert list(found) == ["processor", "kernels", "compiler", "memory", "disk", "GPU", "models"]
    assert "usable" in found["processor"]["found"]
    assert " free in " in found["disk"]["found"]
    assert torch.cuda.is_available() or found["GPU"]["found"].startswith("none")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:7]] == list(found)


def test_what_is_missing_has_a_cure(run_task: RunTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_backend", lambda *_: (TorchBackend(), "graphcore's kernels are missing"))
    monkeypatch.setattr(doctor, "find_cpp_compiler", lambda: None)
    monkeypatch.setattr(doctor, "LEAST_DISK", 1 << 60)
    record = run_task("task=doctor", f"cache_dir={tmp_path}").record
    cures = {one["subject"]: one["cure"] for one in record["findings"] if one["cure"]}
    assert cures["kernels"] == "graphcore's kernels are missing; apt install g++"
    assert "apt install g++" in cures["compiler"]
    assert "cache_dir=" in cures["disk"]


def test_the_rate_of_a_file_is_that_past_the_page_cache(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(3 * doctor.READ_NBYTES))
    rate = doctor.direct_read_rate(file, 0.1)  # None on a file system without direct reads
    assert rate is None or rate > 1e5
    assert doctor.direct_read_rate(tmp_path / "none") is None
