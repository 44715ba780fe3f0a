"""A file is hashed once, and again when its size or time says that it is another."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from graphcore.checkpoint.sources import known_hash
from graphcore.checkpoint.sources.known_hash import known_sha256


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were read whole."""
    found: list[Path] = []
    read: Callable[[Path], str] = known_hash.file_sha256
    monkeypatch.setattr(known_hash, "file_sha256", lambda path: found.append(path) or read(path))
    return found


def test_the_same_file_is_read_once(tmp_path: Path, reads: list[Path]) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"bytes")
    hashes = {known_sha256(path, tmp_path / "hashes") for _ in range(3)}
    assert hashes == {hashlib.sha256(b"bytes").hexdigest()}
    assert reads == [path]


@pytest.mark.parametrize("change", ["content", "time", "other file"])
def test_a_file_that_changed_is_read_again(change: str, tmp_path: Path, reads: list[Path]) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"bytes")
    status = path.stat()
    known_sha256(path, tmp_path / "hashes")
    content = b"bytes" if change == "time" else b"sixth!" if change == "content" else b"other"
    if change == "other file":
        (tmp_path / "other").write_bytes(content)
        os.utime(tmp_path / "other", ns=(status.st_atime_ns, status.st_mtime_ns))
        (tmp_path / "other").replace(path)
    else:
        path.write_bytes(content)
        os.utime(path, ns=(0, status.st_mtime_ns + 1))
    assert known_sha256(path, tmp_path / "hashes") == hashlib.sha256(content).hexdigest()
    assert len(reads) == 2


def test_a_damaged_note_is_written_again(tmp_path: Path, reads: list[Path]) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"bytes")
    right = known_sha256(path, tmp_path / "hashes")
    (note,) = (tmp_path / "hashes").glob("*.json")
    note.write_bytes(note.read_bytes().replace(right[:8].encode(), b"00000000"))
    assert known_sha256(path, tmp_path / "hashes") == right
    assert known_sha256(path, tmp_path / "hashes") == right
    assert len(reads) == 2


def test_a_folder_that_cannot_be_written_costs_only_the_keeping(tmp_path: Path, reads: list[Path]) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"bytes")
    (tmp_path / "hashes").write_bytes(b"a file where a folder should be")
    for _ in range(2):
        assert known_sha256(path, tmp_path / "hashes") == hashlib.sha256(b"bytes").hexdigest()
    assert len(reads) == 2
