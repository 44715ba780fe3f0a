"""A file that was written with its hash is read whole or not at all."""

import errno
import hashlib
import os
from pathlib import Path

import pytest

from graphcore.checked_file import read_checked, write_checked


def test_what_is_written_is_read_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "name.json"
    write_checked(path, b"one")
    write_checked(path, b"two")
    assert read_checked(path) == b"two"
    assert {one.name: one.read_bytes() for one in path.parent.iterdir()} == {
        "name.json": b"two",
        "name.sha256": hashlib.sha256(b"two").hexdigest().encode(),
    }


def test_every_bit_counts(tmp_path: Path) -> None:
    path = tmp_path / "name.json"
    content = b"some bytes"
    write_checked(path, content)
    for at in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[at // 8] ^= 1 << at % 8
        path.write_bytes(damaged)
        assert read_checked(path) is None
    path.write_bytes(content)
    assert read_checked(path) == content


@pytest.mark.parametrize("lost", ["name.json", "name.sha256"])
@pytest.mark.parametrize("left", [None, b"", "folder"])
def test_half_of_the_two_files_is_none(lost: str, left: bytes | str | None, tmp_path: Path) -> None:
    write_checked(tmp_path / "name.json", b"content")
    (tmp_path / lost).unlink()
    if isinstance(left, bytes):
        (tmp_path / lost).write_bytes(left)
    elif left is not None:
        (tmp_path / lost).mkdir()
    assert read_checked(tmp_path / "name.json") is None


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, content: bytes) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(OSError, match="No space left"):
        write_checked(tmp_path / "name.json", b"content")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["built.json", "built.sha256"])
def test_a_folder_in_the_place_of_a_file_goes(tmp_path: Path, name: str) -> None:
    (tmp_path / name / "below").mkdir(parents=True)
    write_checked(tmp_path / "built.json", b"content")
    assert read_checked(tmp_path / "built.json") == b"content"
