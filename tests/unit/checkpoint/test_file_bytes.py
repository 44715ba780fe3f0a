"""Every kind of change to a file is told from no change, in words."""

import os
from pathlib import Path

from graphcore.checkpoint.file_bytes import file_identity


def test_a_file_that_is_only_read_stays_itself(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(8))
    before = file_identity(path)
    path.read_bytes()
    assert before.change_to(file_identity(path)) == ""


def test_each_change_has_its_words(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(8))
    os.utime(path, ns=(0, 0))
    before = file_identity(path)
    path.write_bytes(bytes(8))
    assert before.change_to(file_identity(path)) == "it was written to"
    path.write_bytes(bytes(7))
    assert before.change_to(file_identity(path)) == "it shrank from 8 to 7 bytes"
    path.write_bytes(bytes(9))
    assert before.change_to(file_identity(path)) == "it grew from 8 to 9 bytes"
    (tmp_path / "y").write_bytes(bytes(8))
    (tmp_path / "y").rename(path)
    assert before.change_to(file_identity(path)) == "another file has taken its place"
