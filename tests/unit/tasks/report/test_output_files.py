"""Files are whole or not there."""

import json
import os
import stat
from pathlib import Path

import pytest

from graphcore.tasks.report.output_files import OutputError, write_bytes, write_json


def test_a_record_is_valid_json_with_its_characters(tmp_path: Path) -> None:
    path = tmp_path / "new" / "result.json"
    write_json(path, {"text": "é語😀", "half": "\udcff", "speed": float("nan"), "list": [float("inf"), 1.5, (2,)]})
    assert json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail) == {
        "text": "é語😀",
        "half": "\udcff",
        "speed": None,
        "list": [None, 1.5, [2]],
    }
    assert "é語😀" in path.read_text(encoding="utf-8")


def test_the_file_has_the_permissions_of_any_other(tmp_path: Path) -> None:
    write_json(tmp_path / "result.json", {})
    (tmp_path / "plain").write_text("")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("result.json", "plain")}
    assert len(modes) == 1


def test_a_failed_write_leaves_the_old_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result.json"
    write_bytes(path, b"old")

    def fill_the_disk(self: Path, content: bytes) -> int:
        with self.open("wb") as file:
            file.write(content[:1])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fill_the_disk)
    with pytest.raises(OutputError, match=r"result\.json cannot be written \(No space left on device\)"):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no device that is always full")
def test_a_disk_that_is_full_is_said_and_the_old_file_stays(tmp_path: Path) -> None:
    """The system's own refusal: what is written beside the file goes to a device that is always full."""
    path = tmp_path / "result.json"
    write_bytes(path, b"old")
    (tmp_path / f".result.json.{os.getpid()}").symlink_to("/dev/full")
    with pytest.raises(OutputError, match=r"result\.json cannot be written \(No space left on device\); free space"):
        write_json(path, {"tokens": list(range(10_000))})
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]


def test_a_folder_that_cannot_be_made_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written") as caught:
        write_json(tmp_path / "file" / "result.json", {})
    assert "\n" not in str(caught.value)
